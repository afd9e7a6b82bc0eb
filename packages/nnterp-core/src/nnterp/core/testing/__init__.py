"""What conformance tests need: checkpoints, an oracle, and one rule for how close is close."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnterp.core.testing.checkpoints import build as build
    from nnterp.core.testing.checkpoints import cache_root as cache_root
    from nnterp.core.testing.checkpoints import smollm2 as smollm2
    from nnterp.core.testing.oracle import PATCHES as PATCHES
    from nnterp.core.testing.oracle import Edit as Edit
    from nnterp.core.testing.oracle import Oracle as Oracle
    from nnterp.core.testing.oracle import Record as Record
    from nnterp.core.testing.recipes import RECIPES as RECIPES
    from nnterp.core.testing.recipes import Recipe as Recipe
    from nnterp.core.testing.recipes import Reference as Reference
    from nnterp.core.testing.tolerance import WorstRow as WorstRow
    from nnterp.core.testing.tolerance import assert_close as assert_close
    from nnterp.core.testing.tolerance import row_error as row_error
    from nnterp.core.testing.tolerance import worst_row as worst_row

_PLACES = {
    "checkpoints": ("build", "cache_root", "smollm2"),
    "oracle": ("PATCHES", "Edit", "Oracle", "Record"),
    "recipes": ("RECIPES", "Recipe", "Reference"),
    "tolerance": ("WorstRow", "assert_close", "row_error", "worst_row"),
}

__all__ = [
    "PATCHES",
    "RECIPES",
    "Edit",
    "Oracle",
    "Recipe",
    "Record",
    "Reference",
    "WorstRow",
    "assert_close",
    "build",
    "cache_root",
    "row_error",
    "smollm2",
    "worst_row",
]


def __getattr__(name: str) -> Any:
    # Most bring in torch or transformers, which whoever needs another part does without.
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
