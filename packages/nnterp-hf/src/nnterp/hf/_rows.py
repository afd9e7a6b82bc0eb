"""Rows that a model flattens: ``[batch * seq, ...]`` where a batch is expected."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nnterp.core.tracing import Lens, running


class Flattened(Lens):
    """``[batch * seq, ...]`` as the block's own ``[batch, seq, ...]``.

    A tensor that has its batch axis already stays as it is. nnsight finds a block's rows by
    that axis, which such a tensor has not: it is served whole to every invoke, and a write
    gives the whole back.

    Args:
        axes: how many axes follow.
    """

    def __init__(self, axes: int = 1) -> None:
        self.axes = axes

    @staticmethod
    def _shape(raw: Tensor, host: Any) -> tuple[int, int, int]:
        """The batch's rows, and the first and the number of the block's own."""
        batcher, mediator = host.interleaver.batcher, running()
        group = None if mediator is None else mediator.batch_group
        if batcher is None or group is None:
            rows = 1 if batcher is None else max(batcher.total, 1)
            return rows, 0, rows
        start, size = group
        # A step of one token looks like a batch, and nnsight has cut it to the rows already.
        if not batcher.batching or raw.shape[0] == size:
            return size, 0, size
        return batcher.total, start, size

    def get(self, raw: Tensor, host: Any) -> Tensor:
        if raw.dim() > 1 + self.axes:
            return raw
        total, start, size = self._shape(raw, host)
        return raw.view(total, -1, *raw.shape[1:])[start : start + size]

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        if raw.dim() > 1 + self.axes:
            return new
        total, start, size = self._shape(raw, host)
        whole = raw.view(total, -1, *raw.shape[1:]).clone()
        whole[start : start + size] = new
        return whole.view(raw.shape)
