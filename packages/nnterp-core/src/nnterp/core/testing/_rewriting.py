"""Has pytest rewrite the kit's asserts; imported before the modules that hold them."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *(f"nnterp.core.testing.{name}" for name in ("bench", "cases", "conformance", "tolerance"))
)
