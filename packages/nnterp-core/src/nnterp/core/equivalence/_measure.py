"""Measuring how far apart two runs are, and how much of it the dtypes explain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from nnterp.core import VOCABULARY
from nnterp.core.reading import row_errors, row_scale

from ._report import LogitsAgreement, Measure
from ._run import Run

Runs: TypeAlias = Sequence[tuple[Run, Run | None]]
"""a's and b's run, each with its float32 run."""

BOUNDS: Mapping[str, float] = {
    "float64": 1e-9,
    # Between transformers and vLLM: 5.9e-5 at most on SmolLM2-135M (30 blocks, mlp_output), 8.7e-6
    # on small random models of twenty architectures.
    "float32": 1e-4,
    "float16": 5e-2,
    "bfloat16": 3e-1,
}
"""The largest difference of a row that a dtype explains, where no float32 run measures it."""

ROUNDS_ALIKE = 8.0
"""How many times as much as the other one engine may round in the same dtype, in the root mean
square. Between transformers and vLLM in bfloat16 it is 0.4 to 2.3 times, over every value, prompt
and step of SmolLM2-135M; a kernel that is wrong in a narrow dtype alone is told by this."""

# Computed for the last position alone by some engines.
_LAST_ALONE = ("lm_head_output", "logits")


def base_bound(a: Run, b: Run) -> float:
    """What remains between two engines without any rounding to a narrower dtype."""
    both = {a.side.dtype, b.side.dtype}
    return BOUNDS["float64" if both == {"float64"} else "float32"]


def measured(keys: Sequence[str], step: int, runs: Runs, prompts: int) -> dict[str, Measure | None]:
    """Values of one step, each of the prompt in which the two are furthest apart.

    Args:
        keys: the values' standard paths.
        step: which step.
        runs: a's and b's run, each with its float32 run.
        prompts: how many prompts there are.

    Returns:
        The measures by key; ``None`` for what one of the two has not on that step.
    """
    found: dict[str, list[Measure]] = {key: [] for key in keys}
    for prompt in range(prompts):
        own = [run.values(prompt, step) for run, _ in runs]
        exact = [None if one is None else one.values(prompt, step) for _, one in runs]
        for key in keys:
            if key in own[0] and key in own[1]:
                values = own[0][key], own[1][key]
                precise = [None if one is None else one.get(key) for one in exact]
                found[key].append(_pair(key, values, precise, runs, prompt))
    return {
        key: max(ones, key=lambda one: (one.excess, one.error)) if ones else None
        for key, ones in found.items()
    }


def _pair(
    key: str,
    values: tuple[Tensor, Tensor],
    exacts: Sequence[Tensor | None],
    runs: Runs,
    prompt: int,
) -> Measure:
    name = key.rsplit(".", 1)[-1]
    shapes = (list(values[0].shape), list(values[1].shape))
    problem, shape = _common(values, name)
    if problem is not None:
        return _exact(shapes, prompt, [], problem)
    a, b = (_cut(value, shape, name) for value in values)
    exact = [None if one is None else _cut(one, shape, name) for one in exacts]
    if not a.is_floating_point():
        found = difference(b, a, a)
        return _exact(shapes, prompt, found.row, "the integers differ" if found.error else None)
    scale = row_scale(a if exact[0] is None else exact[0])
    found = difference(b, a, scale)
    base = base_bound(runs[0][0], runs[1][0])
    bound = bound_rms = base
    rounding: list[float | None] = []
    rounding_rms: list[float | None] = []
    for own, precise, (run, _) in zip((a, b), exact, runs, strict=True):
        apart = None if precise is None else difference(own, precise, scale)
        stated = BOUNDS.get(run.side.dtype, BOUNDS["bfloat16"])
        rounding.append(None if apart is None else apart.error)
        rounding_rms.append(None if apart is None else apart.rms)
        bound += stated if apart is None else apart.error
        bound_rms += stated if apart is None else apart.rms
    x, y = rounding_rms
    alike = runs[0][0].side.dtype == runs[1][0].side.dtype and not VOCABULARY[name].computed
    if alike and x is not None and y is not None:
        bound_rms = base + min(x, ROUNDS_ALIKE * y + base) + min(y, ROUNDS_ALIKE * x + base)
    in_float32 = None
    narrow = any(exact is not run for run, exact in runs)
    if narrow and runs[0][1] is not runs[1][1] and exact[0] is not None and exact[1] is not None:
        in_float32 = difference(exact[1], exact[0], scale).error
    return Measure(
        shapes=shapes,
        error=found.error,
        rms=found.rms,
        cosine=smallest_cosine(a, b),
        rounding=(rounding[0], rounding[1]),
        rounding_rms=(rounding_rms[0], rounding_rms[1]),
        bound=bound,
        bound_rms=bound_rms,
        in_float32=in_float32,
        prompt=prompt,
        row=found.row,
    )


def _exact(
    shapes: tuple[list[int], list[int]], prompt: int, row: list[int], problem: str | None
) -> Measure:
    """Of values that are the same or are not."""
    error = 0.0 if problem is None else float("inf")
    return Measure(
        shapes=shapes,
        error=error,
        rms=error,
        cosine=1.0 if problem is None else -1.0,
        rounding=(None, None),
        rounding_rms=(None, None),
        bound=0.0,
        bound_rms=None,
        in_float32=None,
        prompt=prompt,
        row=row,
        problem=problem,
    )


def _common(values: tuple[Tensor, Tensor], name: str) -> tuple[str | None, tuple[int, ...]]:
    """Why two values cannot be compared, or the shape of what both have."""
    a, b = values
    said = f"shapes differ: {list(a.shape)} and {list(b.shape)}"
    if a.is_floating_point() != b.is_floating_point():
        return "one holds integers, the other does not", ()
    if a.dim() != b.dim():
        return said, ()
    if a.shape == b.shape:
        return None, tuple(a.shape)
    shape = tuple(min(pair) for pair in zip(a.shape, b.shape, strict=True))
    differing = [axis for axis, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
    if name in _LAST_ALONE and differing == [1] and shape[1] == 1:
        return None, shape
    if differing == [VOCABULARY[name].layout.axis("key")]:
        # A window's cache may have dropped what no query attends to.
        longer = a if a.shape[-1] > b.shape[-1] else b
        gone = longer[..., : -shape[-1]]
        if bool((gone == (-torch.inf if name == "attention_scores" else 0)).all()):
            return None, shape
    return said, ()


def _cut(value: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """The last of each axis; a head's scores as one row, since one alone may cancel to nothing."""
    for axis, size in enumerate(shape):
        value = value.narrow(axis, value.shape[axis] - size, size)
    return value.flatten(2) if name == "attention_scores" else value


def logits_agreement(step: int, runs: Runs, prompts: int) -> LogitsAgreement:
    """How alike the next token's distributions are, at every position that both computed.

    Args:
        step: which step.
        runs: a's and b's run.
        prompts: how many prompts there are.
    """
    divergences, top1, top5 = [], [], []
    for prompt in range(prompts):
        a, b = (run.logits(prompt, step) for run, _ in runs)
        count = min(a.shape[1], b.shape[1])
        log_p = a[0, -count:].double().log_softmax(-1)
        log_q = b[0, -count:].double().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0))
        k = min(5, log_p.shape[-1])
        best_p, best_q = log_p.topk(k).indices, log_q.topk(k).indices
        top1.append((best_p[:, 0] == best_q[:, 0]).double())
        shared = (best_p.unsqueeze(-1) == best_q.unsqueeze(-2)).any(-1)
        top5.append(shared.double().mean(-1))
    kl = torch.cat(divergences)
    return LogitsAgreement(
        positions=len(kl),
        kl=float(kl.max()),
        kl_mean=float(kl.mean()),
        top1=float(torch.cat(top1).mean()),
        top5=float(torch.cat(top5).mean()),
    )


@dataclass(frozen=True)
class Difference:
    """How far apart two tensors are.

    Attributes:
        error: the largest difference of a row, over its scale; inf where an entry is finite on
            one side alone, or an integer differs.
        rms: the root mean square of all differences over their rows' scales.
        row: the row of the largest difference, one index for each axis but the last.
    """

    error: float
    rms: float
    row: list[int]


def difference(actual: Tensor, expected: Tensor, scale: Tensor) -> Difference:
    """How far ``actual`` is from ``expected``.

    Args:
        actual: ``[..., width]``.
        expected: of the same shape.
        scale: ``[...]``, as :func:`nnterp.core.reading.row_scale` gives it; integers take none.
    """
    lead = tuple(expected.shape[:-1])
    if not expected.is_floating_point():
        wrong = (actual != expected).any(-1)
        error = torch.where(wrong, torch.inf, 0.0)
        squares = torch.zeros((), dtype=torch.float64)
    else:
        a, e = actual.double(), expected.double()
        usable = a.isfinite() & e.isfinite()
        masked = (a == -torch.inf) & (e == -torch.inf)
        distance = (a - e).abs().where(usable, 0.0)
        error = row_errors(distance, scale)
        error = error.masked_fill((~usable & ~masked).any(-1), torch.inf)
        shares = torch.where(distance == 0, 0.0, distance / scale.unsqueeze(-1))
        squares = shares[usable].square().mean() if bool(usable.any()) else shares.new_zeros(())
    if error.isnan().any():
        error = error.nan_to_num(nan=torch.inf)
    worst = int(error.argmax())
    place = torch.unravel_index(torch.tensor(worst), lead) if lead else ()
    return Difference(
        error=float(error.flatten()[worst]),
        rms=float(squares.sqrt()),
        row=[int(axis) for axis in place],
    )


def smallest_cosine(a: Tensor, b: Tensor) -> float:
    """The smallest cosine of two rows; masked entries count for nothing, rows of zeros neither.

    Args:
        a, b: ``[..., width]``, floating.
    """
    usable = a.isfinite() & b.isfinite()
    a, b = a.double().where(usable, 0.0), b.double().where(usable, 0.0)
    length = a.norm(dim=-1) * b.norm(dim=-1)
    found = (a * b).sum(-1)[length > 0] / length[length > 0]
    return float(found.min().clamp(-1, 1)) if found.numel() else 1.0
