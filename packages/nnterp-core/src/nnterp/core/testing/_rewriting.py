"""Has pytest rewrite the kit's asserts; imported before the modules that hold them."""

from __future__ import annotations

import sys

import pytest

_NAMES = [f"nnterp.core.testing.{name}" for name in ("bench", "cases", "conformance", "tolerance")]

# pytest warns of what it comes too late for.
pytest.register_assert_rewrite(*(name for name in _NAMES if name not in sys.modules))
