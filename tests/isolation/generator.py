"""Blocks made at random: what they read and edit, on which steps, beside which others.

A program is data. The oracle computes in plain transformers, with plain torch hooks, what every
read of it must give; an engine runs it through the standard names.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from nnterp.core import VOCABULARY
from nnterp.core.reading import host_of, value_at
from nnterp.core.testing import Edit, Oracle, row_error
from nnterp.core.testing.cases import Change, changed, perform

BOUND = 3e-5
"""Edits one after another: three times the bound of a single one."""

VOCABULARY_SIZE = 256

_ORDER = (
    "layer_input",
    "attention_input",
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_scores",
    "attention_probabilities",
    "attention_head_outputs",
    "attention_output",
    "layer_mid",
    "mlp_input",
    "mlp_neurons",
    "mlp_output",
    "layer_output",
)
_BEFORE = ("input_ids", "token_embeddings")
_AFTER = ("final_norm_output", "logits", "next_token_probs")

# `twice` reads a value two times and edits the second: the first stays what it was.
Action = Literal["read", "assign", "in_place", "position", "augment", "twice"]
WRITES: tuple[Action, ...] = ("assign", "in_place", "position", "augment", "twice")
WAYS = {"assign": "assignment", "augment": "in_place", "twice": "in_place"}


@dataclass(frozen=True)
class Act:
    """One thing that a block does."""

    key: str
    action: Action
    position: int = 0

    def change(self, step: int) -> Change:
        way: Any = WAYS.get(self.action, self.action)
        return Change(self.key, way, step=step, position=self.position)


@dataclass(frozen=True)
class Invoke:
    """One prompt and what its block does, step by step.

    Attributes:
        seed: the seed of an invoke that samples on vLLM, where each has its own settings; what
            it reads is of the prompt's step alone.
    """

    prompt: tuple[int, ...]
    steps: tuple[tuple[Act, ...], ...]
    seed: int | None = None


@dataclass(frozen=True)
class Program:
    """One trace."""

    seed: int
    invokes: tuple[Invoke, ...]

    @property
    def tokens(self) -> int:
        return max(len(invoke.steps) for invoke in self.invokes)


def place(key: str) -> tuple[int, int]:
    """Where a value is in the forward."""
    name = key.rsplit(".", 1)[-1]
    if key.startswith("layers."):
        return int(key.split(".")[1]), _ORDER.index(name)
    return (-1, _BEFORE.index(name)) if name in _BEFORE else (10**6, _AFTER.index(name))


def keys_of(oracle: Oracle, model: Any) -> list[str]:
    """The values that the oracle knows and the engine serves, in forward order."""
    served = {name for name, reason in model.support().items() if reason is None}

    def is_served(key: str) -> bool:
        parts = key.split(".")
        return key in served or ".".join(["layers", "*", *parts[2:]]) in served

    known = oracle.run([5, 7, 9]).keys()
    left = {"attention_mask", "lm_head_output"}
    return sorted((key for key in known if key not in left and is_served(key)), key=place)


def program(seed: int, keys: list[str]) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    invokes = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        length = rng.choice((1, 2, 5, 9, 17))
        prompt = tuple(rng.randrange(3, VOCABULARY_SIZE) for _ in range(length))
        sampled = rng.randrange(2**31) if rng.random() < 0.15 else None
        steps = []
        for step in range(1 if sampled is not None else rng.choice((1, 1, 2, 3))):
            width = length if step == 0 else 1
            # A decode step has no pattern, and little reason to read everything.
            usable = [key for key in keys if step == 0 or not key.endswith(_PATTERN)]
            chosen = sorted(rng.sample(usable, rng.randint(1, 6)), key=place)
            steps.append((*(act(rng, key, width) for key in chosen), Act("logits", "read")))
        invokes.append(Invoke(prompt, tuple(steps), sampled))
    return Program(seed, tuple(invokes))


_PATTERN = ("attention_scores", "attention_probabilities")


def act(rng: random.Random, key: str, width: int) -> Act:
    name = key.rsplit(".", 1)[-1]
    writable = VOCABULARY[name].writable and name not in _PATTERN
    if not writable or rng.random() < 0.5:
        return Act(key, "read")
    # The engines hold logits of different positions; the last is on both.
    position = -1 if name == "logits" else rng.randrange(width)
    return Act(key, rng.choice(WRITES), position)


# -- what it must give -------------------------------------------------------------------

Rows = dict[tuple[int, int, str], Tensor]
"""What a block read: by its step, the number of the act, and which read it was."""


def expected(oracle: Oracle, invoke: Invoke) -> Rows:
    """What each read of an invoke gives in plain transformers, until an end token comes."""
    rows: Rows = {}
    edits = []
    for step, acts in enumerate(invoke.steps):
        for number, one in enumerate(acts):
            edits += _edits(one, step, number, rows)
    record = oracle.edited(invoke.prompt, edits, len(invoke.steps) - 1)
    ends = oracle.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    last = next((i for i, token in enumerate(record.tokens) if token in ends), len(record.tokens))
    return {key: row for key, row in rows.items() if key[0] <= last}


def _edits(one: Act, step: int, number: int, rows: Rows) -> Iterator[Edit]:
    def note(which: str) -> Callable[[Tensor], Tensor]:
        def fn(value: Tensor) -> Tensor:
            rows[step, number, which] = _shown(one.key, value)
            return value

        return fn

    yield from _noted(one.key, note("before"), step, rows, number)
    if one.action != "read":
        yield Edit(one.key, lambda value: changed(value, one.change(step)), step)
        yield Edit(one.key, note("after"), step)


def _noted(key: str, fn: Any, step: int, rows: Rows, number: int) -> Iterator[Edit]:
    if key != "next_token_probs":
        yield Edit(key, fn, step)
        return

    def probabilities(value: Tensor) -> Tensor:
        rows[step, number, "before"] = value[:, -1].softmax(-1).clone()
        return value

    # It is computed, and what it is computed of is where it can be watched.
    yield Edit("logits", probabilities, step)


def _shown(key: str, value: Tensor) -> Tensor:
    return value[:, -1:].clone() if key == "logits" else value.clone()


# -- what it gives -------------------------------------------------------------------------


def run_step(model: Any, acts: tuple[Act, ...], step: int, rows: Rows) -> None:
    """What a block does in one step; it runs where the model is."""
    for number, one in enumerate(acts):
        first = value_at(model, one.key)
        if one.action == "twice":
            changed(value_at(model, one.key), one.change(step))
        elif one.action == "augment":
            host, name = host_of(model, one.key)
            setattr(host, name, changed(first.clone(), one.change(step)))
        rows[step, number, "before"] = _shown(one.key, first)
        if one.action in ("assign", "in_place", "position"):
            perform(model, one.change(step))
        if one.action != "read":
            rows[step, number, "after"] = _shown(one.key, value_at(model, one.key))


def outcome(model: Any, made: Program, reach: list[int]) -> list[Rows]:
    """What each invoke's reads give on an engine; ``reach`` is how many steps each has."""
    settings = [
        {"temperature": 0.9, "seed": invoke.seed, "max_tokens": 1}
        if invoke.seed is not None and model.engine == "vllm"
        else {}
        for invoke in made.invokes
    ]
    with model.decode(max_new_tokens=made.tokens) as tracer:
        for invoke, steps, setting in zip(made.invokes, reach, settings, strict=True):
            with tracer.invoke(list(invoke.prompt), **setting):
                rows = {}.save()
                for step in tracer.iter[0:steps]:
                    run_step(model, invoke.steps[step], step, rows)
    return rows if isinstance(rows, list) else [rows]


def compare(oracle: Oracle, model: Any, made: Program) -> list[str]:
    """What is wrong with a program on an engine; empty if nothing is."""
    wanted = [expected(oracle, invoke) for invoke in made.invokes]
    reach = [1 + max(step for step, *_ in rows) for rows in wanted]
    try:
        found = outcome(model, made, reach)
    except Exception as error:
        return [f"seed {made.seed}: {type(error).__name__}: {str(error)[:300]}"]
    problems = []
    for index, (want, have) in enumerate(zip(wanted, found, strict=True)):
        for key in sorted(want.keys() | have.keys()):
            step, number, which = key
            one = made.invokes[index].steps[step][number]
            name = f"seed {made.seed}, invoke {index}, step {step}: {one.action} {one.key} {which}"
            if key not in want or key not in have:
                problems.append(f"{name}: only one side has it")
            elif want[key].shape != have[key].shape:
                problems.append(f"{name}: {tuple(have[key].shape)} not {tuple(want[key].shape)}")
            elif not (error := _error(one.key, have[key], want[key])) <= BOUND:
                problems.append(f"{name}: a row is {error:.1e} off")
    return problems


def _error(key: str, have: Tensor, want: Tensor) -> float:
    if key.endswith("attention_scores"):
        # A row may hold one score, near zero by cancellation: all heads are one row.
        have, want = have.flatten(1), want.flatten(1)
    return row_error(have, want)


# -- faults that it must find ------------------------------------------------------------------


def _no_write_back() -> Any:
    from nnterp.core.tracing._private import Private

    return mock.patch.object(Private, "edited", property(lambda self: False))


def _wrong_rows() -> Any:
    from nnsight.intervention.batching import Batcher

    original = Batcher.narrow

    def narrow(self: Any, value: Any, group: Any) -> Any:
        return original(self, value, group and [0, group[1]])

    return mock.patch.object(Batcher, "narrow", narrow)


def _late_edit() -> Any:
    from nnterp.core.tracing._values import Value, running

    original = Value.put

    def put(self: Any, host: Any, site: Any, raw: Any, new: Tensor) -> Any:
        waiting = running().__dict__.setdefault("planted", {})
        before = waiting.get(self.label(host))
        waiting[self.label(host)] = new
        if before is None or before.shape != new.shape:
            before = self._rows(host, site, raw, running()).clone()
        return original(self, host, site, raw, before)

    return mock.patch.object(Value, "put", put)


def _shifted_edit() -> Any:
    from nnterp.core.tracing._values import Value

    original = Value.put

    def put(self: Any, host: Any, site: Any, raw: Any, new: Tensor) -> Any:
        return original(self, host, site, raw, new.roll(1, -1))

    return mock.patch.object(Value, "put", put)


def _alias() -> Any:
    from nnterp.core.tracing._private import Private

    return mock.patch.object(Private, "of", classmethod(aliased))


def aliased(cls: Any, value: Tensor) -> Any:
    """``Private.of`` without the copy: what is handed out is the model's own buffer."""
    with torch.inference_mode(False):
        # The storage itself, under a tensor that counts its versions.
        view = torch.empty(0, dtype=value.dtype).set_(
            value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )
        private = view.as_subclass(cls)
    private._served, private._exposed = None, False
    private._handed_version = private._version
    return private


def _half_dropped() -> Any:
    from nnterp.core.tracing._lenses import Halves

    return mock.patch.object(Halves, "get", lambda self, raw, host: self.first.get(raw, host))


FAULTS: dict[str, Callable[[], Any]] = {
    "no_write_back": _no_write_back,
    "wrong_rows": _wrong_rows,
    "late_edit": _late_edit,
    "shifted_edit": _shifted_edit,
    "alias": _alias,
    "half_dropped": _half_dropped,
}
"""Faults of this code, by name: each is a patch to enter. The last is vLLM's alone."""


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """The code with one of its faults."""
    with FAULTS[fault]():
        yield


def both(path: str) -> Iterator[Any]:
    """The two engines on a checkpoint, one after the other."""
    from nnterp.hf import StandardizedTransformer
    from nnterp.vllm import StandardizedVLLM

    torch.set_num_threads(1)
    yield StandardizedTransformer(path, attn_implementation="eager", dispatch=True)
    with StandardizedVLLM(path, dtype="float32", max_model_len=128, dispatch=True) as model:
        yield model
