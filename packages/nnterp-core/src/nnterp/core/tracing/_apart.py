"""What torch keeps for a whole thread, in which blocks and the model run by turns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from nnsight.intervention.interleaver import Mediator
from torch import overrides
from torch.utils import _device

_DEVICES = "cpu", "cuda"
_MODES: Any = overrides


class _Settings(NamedTuple):
    gradients: bool
    dtype: torch.dtype
    device: torch.device | None
    modes: tuple[Any, ...]
    casts: tuple[tuple[bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> _Settings:
        return cls(
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            _device.CURRENT_DEVICE,
            tuple(_MODES._get_current_function_mode_stack()),
            tuple(
                (torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in _DEVICES
            ),
        )

    def apply(self) -> None:
        torch._C._set_grad_enabled(self.gradients)
        torch.set_default_dtype(self.dtype)
        for _ in _MODES._get_current_function_mode_stack():
            _MODES._pop_mode()
        for mode in self.modes:
            _MODES._push_mode(mode)
        _device.CURRENT_DEVICE = self.device
        for device, (enabled, dtype) in zip(_DEVICES, self.casts, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


class Apart(Mediator):
    """A block whose torch settings are its own.

    The model, and whatever else runs with it, is computed as it would be without the block,
    though the block asks for a value inside ``torch.autocast``, ``torch.no_grad`` or
    ``torch.device``, or leaves another default dtype or device behind.
    """

    settings: _Settings | None = None

    def switch(self, *args: Any) -> Any:
        """Run the block until it asks for something or ends; returns what it asks for."""
        models = _Settings.now()
        if self.settings is not None:
            self.settings.apply()
        try:
            return super().switch(*args)
        finally:
            mine = _Settings.now()
            self.settings = None
            if mine != models:
                self.settings = mine
                models.apply()
