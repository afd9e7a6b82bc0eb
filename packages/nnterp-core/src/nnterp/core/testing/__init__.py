"""What conformance tests need: checkpoints, an oracle, and one rule for how close is close."""

from __future__ import annotations

from nnterp.core.testing.checkpoints import (
    RECIPES,
    Recipe,
    Reference,
    build,
    cache_root,
    smollm2,
)
from nnterp.core.testing.oracle import PATCHES, Edit, Oracle, Record
from nnterp.core.testing.tolerance import WorstRow, assert_close, row_error, worst_row

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
