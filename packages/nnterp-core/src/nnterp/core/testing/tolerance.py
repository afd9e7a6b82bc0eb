"""How closely a value must agree with the reference: one rule, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nnterp.core.reading import row_errors, row_scale


@dataclass(frozen=True)
class WorstRow:
    """The row in which two tensors differ most.

    Attributes:
        error: its largest difference over its scale; 0.0 when all is equal, inf for a difference
            that no scale can excuse (a NaN, an infinity on one side, an integer that differs).
        index: where the row is, one index for each axis but the last.
        difference: its largest absolute difference.
        scale: what the difference was divided by.
    """

    error: float
    index: tuple[int, ...]
    difference: float
    scale: float


def worst_row(actual: Tensor, expected: Tensor) -> WorstRow:
    """The row of ``actual`` that is furthest from ``expected``'s, and by how much.

    A row is what lies along the last axis. Its error is its largest difference over its largest
    magnitude in ``expected``; a row smaller than 1e-3 of the median row is divided by the median
    row's magnitude instead. Entries that are -inf in both are equal and give no scale.

    Args:
        actual: any shape; a tensor without axes is one row of one entry.
        expected: the reference, of the same shape.

    Raises:
        ValueError: the shapes differ (broadcasting is no excuse), or one holds integers and the
            other does not.
    """
    if actual.shape != expected.shape:
        raise ValueError(
            f"shapes differ: actual {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    if actual.dtype.is_complex or expected.dtype.is_complex:
        raise ValueError(f"complex values are not compared: {actual.dtype}, {expected.dtype}")
    if actual.is_floating_point() != expected.is_floating_point():
        raise ValueError(f"kinds differ: actual {actual.dtype}, expected {expected.dtype}")
    if expected.numel() == 0:
        return WorstRow(0.0, (), 0.0, 0.0)
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    lead = tuple(expected.shape[:-1])
    width = expected.shape[-1] if expected.ndim else 1
    if expected.is_floating_point():
        rows_a = actual.double().reshape(-1, width)
        rows_e = expected.double().reshape(-1, width)
        masked = (rows_a == -torch.inf) & (rows_e == -torch.inf)
        usable = rows_a.isfinite() & rows_e.isfinite()
        broken = (~usable & ~masked).any(-1)
        distance = (rows_a - rows_e).abs().where(usable, 0.0)
        difference, scale = distance.amax(-1), row_scale(rows_e)
        error = row_errors(distance, scale)
        error = error.masked_fill(broken, torch.inf)
    else:
        rows_a, rows_e = actual.reshape(-1, width), expected.reshape(-1, width)
        if rows_e.dtype != torch.bool:
            rows_a, rows_e = rows_a.long(), rows_e.long()
        difference = (rows_a != rows_e).double().amax(-1)
        scale = torch.zeros_like(difference)
        error = torch.where(difference == 0, 0.0, torch.inf)
    worst = rest = int(error.argmax())
    place: list[int] = []
    for length in reversed(lead):
        rest, at = divmod(rest, length)
        place.insert(0, at)
    return WorstRow(
        error=float(error[worst]),
        index=tuple(place),
        difference=float(difference[worst]),
        scale=float(scale[worst]),
    )


def row_error(actual: Tensor, expected: Tensor) -> float:
    """The largest relative difference over all rows.

    Args:
        actual: any shape.
        expected: the reference, of the same shape.

    Returns:
        0.0 where all is equal. inf where an entry is not finite (-inf on both sides is equal),
        and, for integers and booleans, where any entry differs.

    Raises:
        ValueError: the shapes differ, or one holds integers and the other does not.
    """
    return worst_row(actual, expected).error


def assert_close(actual: Tensor, expected: Tensor, bound: float, what: str) -> None:
    """Raise unless every row of ``actual`` is within ``bound`` of ``expected``'s.

    Args:
        actual: any shape.
        expected: the reference, of the same shape.
        bound: the largest relative difference allowed in a row.
        what: what is compared, for the message.

    Raises:
        AssertionError: a row is further away; the message names the worst one and its sizes.
        ValueError: the shapes or kinds differ; the message names ``what`` too.
    """
    try:
        worst = worst_row(actual, expected)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if worst.error <= bound:
        return
    row_a, row_e = actual.detach().cpu()[worst.index], expected.detach().cpu()[worst.index]
    if expected.is_floating_point():
        detail = (
            f"largest difference {worst.difference:.3e} on a scale of {worst.scale:.3e}; "
            f"{_unusable(row_a)} entries not finite in actual, {_unusable(row_e)} in expected"
        )
    else:
        detail = f"{int((row_a != row_e).sum())} entries differ"
    raise AssertionError(
        f"{what}: row {_place(worst.index)} is off by {worst.error:.3e} of its scale, "
        f"{bound:.1e} is allowed ({detail}); shape {tuple(expected.shape)}"
    )


def _unusable(row: Tensor) -> int:
    return int((~row.isfinite()).sum())


def _place(index: Sequence[int]) -> str:
    return "[" + ", ".join(str(axis) for axis in index) + "]"
