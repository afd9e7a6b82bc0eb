"""Differences of two tensors, row by row, on a scale that several comparisons share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nnterp.core.reading import row_errors


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
