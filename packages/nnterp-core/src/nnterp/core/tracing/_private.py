"""Private copies: what a read hands out, and how an edit of it is noticed."""

from __future__ import annotations

from typing import Any

import torch
from nnsight.tracing.tracer import save as _mark_saved
from torch import Tensor


def clone(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` that counts its versions, under inference mode too."""
    if not torch.is_inference_mode_enabled():
        return tensor.clone()
    with torch.inference_mode(False):
        return tensor.clone()


def plain(tensor: Tensor) -> Tensor:
    """``tensor`` without the private type; same storage, same version counter."""
    return tensor.as_subclass(Tensor) if type(tensor) is Private else tensor


def released(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """``value`` with plain tensors in it for private ones; lists and dicts keep who they are."""
    if type(value) is Private:
        return plain(value)
    if not isinstance(value, (list, dict, tuple)) or id(value) in seen:
        return value
    seen = seen | {id(value)}
    if type(value) is list:
        value[:] = [released(one, seen) for one in value]
    elif type(value) is dict:
        value.update({key: released(one, seen) for key, one in value.items()})
    elif isinstance(value, tuple):
        items = [released(one, seen) for one in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class Private(Tensor):
    """A value handed to a block: its own storage, whose edits go back to the model.

    ``save()`` keeps what the value holds at that moment, so that a later edit of the value
    does not change what was saved. Operations give plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _served: Tensor | None
    _handed_version: int
    _handed_shape: torch.Size
    _exposed: bool

    @classmethod
    def of(cls, value: Tensor) -> Private:
        """A private copy of ``value``."""
        if torch.is_grad_enabled() and value.requires_grad:
            # What is saved has to lie upstream of the model, or its gradient never comes.
            served = clone(value)
            private = clone(served).as_subclass(cls)
            private._served = served
        else:
            copy = clone(value)
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    private = copy.as_subclass(cls)
            else:
                private = copy.as_subclass(cls)
            private._served = None
        private._handed_version = private._version
        private._handed_shape = value.shape
        private._exposed = False
        return private

    @property
    def edited(self) -> bool:
        """Whether it may differ from what was read."""
        return self._version != self._handed_version or self._exposed

    def save(self) -> Tensor:
        """Keep the value as it is now, past the trace; gives a plain tensor."""
        if self._served is not None and not self.edited:
            kept: Tensor = _mark_saved(self._served)
        else:
            kept = _mark_saved(clone(plain(self)))
        return kept

    # These give the storage out where a version counter may not see it written.
    @property
    def data(self) -> Tensor:
        self._exposed = True
        return plain(self).data

    @data.setter
    def data(self, new: Tensor) -> None:
        raise TypeError("assign the value itself, or edit it in place, instead of its .data")

    def detach(self) -> Tensor:
        self._exposed = True
        return plain(self).detach()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        self._exposed = True
        return plain(self).numpy(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return clone(plain(self).detach())
