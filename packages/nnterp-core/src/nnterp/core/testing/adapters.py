"""What an engine supplies to be tested: how to load a checkpoint on it and how to close it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nnterp.core import families
from nnterp.core.protocols import StandardModel
from nnterp.core.testing.recipes import RECIPES, Recipe


class Adapter(Protocol):
    """An engine, as the kit drives it.

    What a model serves is asked of the model, with ``support()``; what it lets be written is
    tried. So an adapter says neither.

    Attributes:
        name: the engine's name, as families are registered for it.
        label: what it is called in the ids of tests. Another than the name where one engine is
            tested in several ways.
        version: the version of what computes, ``"0.32.0"``: known faults are of some versions.
        model_types: of an engine without families, the model types that it runs; with families
            there is no such attribute.
    """

    @property
    def name(self) -> str: ...

    @property
    def label(self) -> str: ...

    @property
    def version(self) -> str: ...

    def load(self, path: Path, **options: Any) -> StandardModel:
        """The checkpoint in float32, ready to run, with room for 256 tokens.

        Args:
            path: the checkpoint's folder.
            **options: what the engine's class takes besides. The kit gives none; they are for
                tests of one's own, as ``family=`` is.
        """
        ...

    def close(self, model: StandardModel) -> None:
        """Give back what ``load`` took, so that the next model finds the process as it was."""
        ...


@dataclass(frozen=True, eq=False)
class Subject:
    """What is tested: one checkpoint on one engine."""

    recipe: Recipe
    adapter: Adapter

    @property
    def label(self) -> str:
        """What it is called in the ids of tests: ``"gemma2-vllm"``."""
        return f"{self.recipe.name}-{self.adapter.label}"

    @property
    def group(self) -> str:
        """Subjects of one model type run in one process, in the order of the engines."""
        return self.recipe.model_type

    @property
    def sparse(self) -> bool:
        """Whether a block of it is a mixture of experts."""
        return self.recipe.reference.mixture is not None

    def __repr__(self) -> str:
        return f"Subject({self.label!r})"


def subjects(
    adapters: Sequence[Adapter], recipes: Iterable[Recipe] = RECIPES.values()
) -> list[Subject]:
    """Every recipe on every engine that runs its architecture, engine after engine.

    Args:
        adapters: the engines, the one that the others are compared with first.
        recipes: the checkpoints.
    """
    recipes = list(recipes)
    return [
        Subject(recipe, adapter)
        for adapter in adapters
        for recipe in recipes
        if _runs(adapter, recipe.model_type)
    ]


def _runs(adapter: Adapter, model_type: str) -> bool:
    named = getattr(adapter, "model_types", None)
    if named is not None:
        return model_type in named
    return not {model_type, families.module_name(model_type)}.isdisjoint(
        families.known(adapter.name)
    )
