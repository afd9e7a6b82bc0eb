"""All that the kit is told of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine import ToyModel


@dataclass(frozen=True)
class Toy:
    """The toy engine, or one with something wrong in it."""

    label: str = "toy"
    model: type[ToyModel] = ToyModel
    model_types: tuple[str, ...] = ("llama", "mistral")
    name = "toy"

    @property
    def version(self) -> str:
        return torch.__version__

    def load(self, path: Path, **options: Any) -> ToyModel:
        return self.model(path, **options)

    def close(self, model: ToyModel) -> None:
        pass
