"""Reading models by standard names: what comparing two of them and testing one have in common.

It needs torch, and of a model nothing but the protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from nnterp.core import OutOfOrder
from nnterp.core.protocols import Step

SMALL_ROW = 1e-3
"""A row smaller than this share of the median row is held to the median row's scale."""

_keep: ContextVar[Callable[[Any], Any] | None] = ContextVar("keep", default=None)

_OF_EXPERTS = ("expert_indices", "expert_weights", "expert_outputs")


def host_of(model: Any, key: str) -> tuple[Any, str]:
    """The module that a value is on, and the value's name."""
    *path, name = key.split(".")
    host = model
    for part in path:
        host = host[int(part)] if part.isdigit() else getattr(host, part)
    return host, name


def value_at(model: Any, key: str) -> Any:
    """Read a value by its key, in a trace."""
    host, name = host_of(model, key)
    return getattr(host, name)


def copied(value: Any) -> Any:
    """A copy that no later edit reaches; what is no tensor as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def saved(value: Any) -> Any:
    """Keep what a block makes, a container too, past its end, whatever engine runs the block.

    Args:
        value: what to keep.

    Returns:
        The value itself; after the block, a list of them where several invokes saved one name.

    Raises:
        ValueError: no block runs.
    """
    keep = _keep.get()
    if keep is not None:
        keep(value)
        return value
    import nnsight

    return nnsight.save(value)


@contextmanager
def keeping(keep: Callable[[Any], Any]) -> Iterator[None]:
    """For an engine without nnsight, while it runs a block: :func:`saved` calls ``keep``."""
    token = _keep.set(keep)
    try:
        yield
    finally:
        _keep.reset(token)


def reasons(model: Any, step: Step = "prefill") -> dict[str, str | None]:
    """``support()``, one entry a block: why a value is not served, or ``None``."""
    found: dict[str, str | None] = {
        key: reason
        for key, reason in model.support(step=step).items()
        if not key.startswith("layers.")
    }
    for i in range(model.num_layers):
        found |= {
            f"layers.{i}.{key}": reason for key, reason in model.support(i, step=step).items()
        }
    return found


def by_expert(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one step, by key, with each token's experts in the order of their indices."""
    found = dict(values)
    for key, indices in values.items():
        host, _, name = key.rpartition(".")
        if name != "expert_indices":
            continue
        order = indices.argsort(-1)
        for other in _OF_EXPERTS:
            value = values.get(f"{host}.{other}")
            if value is not None:
                place = order if value.dim() == order.dim() else order.unsqueeze(-1)
                found[f"{host}.{other}"] = value.take_along_dim(place, 2)
    return found


def can_be_read(model: Any, prompt: Sequence[int], keys: Sequence[str]) -> bool:
    """Whether the keys can be read in the order given, in one trace."""
    try:
        with model.prefill(prompt):
            for key in keys:
                value_at(model, key)
    except OutOfOrder:
        return False
    return True


def forward_order(keys: Sequence[str], in_order: Callable[[Sequence[str]], bool]) -> list[str]:
    """The keys in the order of the forward, found by asking whether some can be read in a row.

    Args:
        keys: the keys, in the order they may well be in.
        in_order: whether the keys can be read in the order given.
    """
    if in_order(keys):
        return list(keys)
    ordered: list[str] = []
    for key in keys:
        low, high = 0, len(ordered)
        while low < high:
            middle = (low + high) // 2
            if in_order([ordered[middle], key]):
                low = middle + 1
            else:
                high = middle
        ordered.insert(low, key)
    return ordered


def row_scale(reference: Tensor) -> Tensor:
    """What a row's differences are divided by: its largest magnitude.

    A row smaller than 1e-3 of the median row takes the median row's. Entries that are not finite
    give no scale.

    Args:
        reference: ``[..., width]``, floating.

    Returns:
        ``[...]``, float64.
    """
    # float64 has room for the difference of any two float32 values.
    rows = reference.double()
    magnitude = rows.abs().where(rows.isfinite(), 0.0).amax(-1)
    median = magnitude.median()
    return magnitude.where(magnitude >= SMALL_ROW * median, median)


def row_errors(distance: Tensor, scale: Tensor) -> Tensor:
    """The largest distance of each row as a share of its scale.

    Args:
        distance: ``[..., width]``, absolute differences.
        scale: ``[...]``; where even it is zero, any difference at all is unexcused.
    """
    largest = distance.amax(-1)
    return torch.where(largest == 0, 0.0, largest / scale)
