"""Lenses: how a value lies in what a module takes or returns, and how it is put back.

A lens is two functions. ``get(raw, host)`` finds the value in the raw object served at a
location; ``put(raw, new, host)`` gives the raw object with the value replaced, leaving
``raw`` as it was. They compose with ``|``, the outermost first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

KEEP: Any = object()
"""What a hand-back gives when the model should go on with the very object it has."""


class Lens:
    """Where a value lies in a raw object. This one: it is the raw object."""

    def get(self, raw: Any, host: Any) -> Any:
        """The value in ``raw``."""
        return raw

    def put(self, raw: Any, new: Any, host: Any) -> Any:
        """``raw`` with the value replaced by ``new``."""
        return new

    def __or__(self, inner: Lens) -> Lens:
        return _Composed(self, inner)


class _Composed(Lens):
    def __init__(self, outer: Lens, inner: Lens) -> None:
        self.outer, self.inner = outer, inner

    def get(self, raw: Any, host: Any) -> Any:
        return self.inner.get(self.outer.get(raw, host), host)

    def put(self, raw: Any, new: Any, host: Any) -> Any:
        inside = self.inner.put(self.outer.get(raw, host), new, host)
        return KEEP if inside is KEEP else self.outer.put(raw, inside, host)


class First(Lens):
    """The tensor itself, or the first of a tuple or list."""

    def get(self, raw: Any, host: Any) -> Any:
        return raw[0] if isinstance(raw, (tuple, list)) else raw

    def put(self, raw: Any, new: Any, host: Any) -> Any:
        return type(raw)((new, *raw[1:])) if isinstance(raw, (tuple, list)) else new


class Field(Lens):
    """An entry of a transformers model output."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, raw: Any, host: Any) -> Any:
        return raw[self.name]

    def put(self, raw: Any, new: Any, host: Any) -> Any:
        return type(raw)(**{**raw, self.name: new})


@cache
def _position(forward: Callable[..., Any], name: str) -> int:
    names = list(inspect.signature(forward).parameters)
    if name not in names:
        raise ValueError(
            f"{forward.__qualname__} takes no {name!r}: it is called in another way than its "
            f"family declares"
        )
    return names.index(name) - 1


class Argument(Lens):
    """One argument of a call, by position, or by its name in the host's ``forward``."""

    def __init__(self, which: str | int) -> None:
        self.which = which

    def _find(self, raw: Any, host: Any) -> tuple[int, str]:
        if isinstance(self.which, int):
            return self.which, ""
        if self.which in raw[1]:
            return -1, self.which
        return _position(type(host._module).forward, self.which), ""

    def get(self, raw: Any, host: Any) -> Any:
        index, name = self._find(raw, host)
        return raw[1][name] if name else raw[0][index]

    def put(self, raw: Any, new: Any, host: Any) -> Any:
        (args, kwargs), (index, name) = raw, self._find(raw, host)
        if name:
            return args, {**kwargs, name: new}
        return (*args[:index], new, *args[index + 1 :]), kwargs


class Halves(Lens):
    """A residual stream carried as two halves, each found by a lens; the value is their sum.

    The second half may be ``None``: the whole stream is then in the first. What a write changes
    is put in the first half, with zeros in the second, so that what adds them changes nothing;
    the rest keeps its halves, whose sum a fused norm takes before it is rounded.
    """

    def __init__(self, first: Lens, second: Lens) -> None:
        self.first, self.second = first, second

    def get(self, raw: Any, host: Any) -> Tensor:
        hidden, residual = self.first.get(raw, host), self.second.get(raw, host)
        stream: Tensor = hidden if residual is None else hidden + residual
        return stream

    def put(self, raw: Any, new: Tensor, host: Any) -> Any:
        hidden, residual = self.first.get(raw, host), self.second.get(raw, host)
        if residual is None:
            return self.first.put(raw, new, host)
        kept = new == hidden + residual
        raw = self.first.put(raw, torch.where(kept, hidden, new), host)
        return self.second.put(raw, torch.where(kept, residual, 0), host)


class Item(Lens):
    """The entry ``index`` of a tuple."""

    def __init__(self, index: int) -> None:
        self.index = index

    def get(self, raw: Any, host: Any) -> Any:
        return raw[self.index]

    def put(self, raw: Any, new: Any, host: Any) -> Any:
        return (*raw[: self.index], new, *raw[self.index + 1 :])


class Scaled(Lens):
    """A tensor times a factor of the host's; entries that a write leaves equal stay bit-equal."""

    def __init__(self, factor: Callable[[Any], Any]) -> None:
        self.factor = factor

    def get(self, raw: Tensor, host: Any) -> Tensor:
        scaled: Tensor = raw * self.factor(host)
        return scaled

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        factor = self.factor(host)
        old = raw * factor
        # Both branches carry the gradient of `new`; the first adds an exact zero.
        return torch.where(new == old, raw + (new - old) / factor, new / factor)


def multiplied(host: Any, lens: Lens) -> Lens:
    """``lens`` times the architecture's factor on contributions, where it has one."""
    multiplier = host.facts.residual_multiplier
    return lens if multiplier is None else lens | Scaled(lambda h: multiplier(h.config))


class Summed(Lens):
    """An output and a bias that the caller adds to it, ``(output, bias)``; the bias may be
    ``None``. Entries that a write leaves equal stay bit-equal."""

    def get(self, raw: Any, host: Any) -> Tensor:
        output, bias = raw
        found: Tensor = output if bias is None else output + bias
        return found

    def put(self, raw: Any, new: Tensor, host: Any) -> Any:
        output, bias = raw
        if bias is not None:
            new = torch.where(new == output + bias, output, new - bias)
        return new, bias


class InPlace(Lens):
    """A tensor that the model also holds under another name: a write fills it.

    For a stream that enters a norm and is added to again after it, and for keys and values
    that are in a cache by the time they are seen.
    """

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Any:
        raw.copy_(new)
        return KEEP


class Batched(Lens):
    """One request's rows, ``[seq, ...]``, as a batch of one, ``[1, seq, ...]``."""

    def get(self, raw: Tensor, host: Any) -> Tensor:
        return raw.unsqueeze(0)

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        return new.squeeze(0)


class Heads(Lens):
    """Flat heads, ``[seq, heads * width]``, as ``[1, heads, seq, width]``.

    With ``inside=True`` the heads come after the sequence, ``[1, seq, heads, width]``.
    """

    def __init__(self, count: Callable[[Any], int], inside: bool = False) -> None:
        self.count, self.inside = count, inside

    def get(self, raw: Tensor, host: Any) -> Tensor:
        heads = raw.reshape(1, raw.shape[0], self.count(host), -1)
        return heads if self.inside else heads.transpose(1, 2)

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        return (new if self.inside else new.transpose(1, 2)).reshape(raw.shape)


class Derived(Lens):
    """A value computed from the raw object; it is read-only."""

    def __init__(self, function: Callable[[Any, Any], Any], instead: str) -> None:
        self.function, self.instead = function, instead

    def get(self, raw: Any, host: Any) -> Any:
        return self.function(raw, host)
