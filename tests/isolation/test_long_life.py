"""An engine that serves for long holds no more memory than one that has just warmed up."""

from __future__ import annotations

import lifetime
import pytest

pytestmark = pytest.mark.slow


def test_memory_stays_flat():
    grown, left = lifetime.live(1500, settle=700)
    assert left == 0
    assert len(grown) >= 3, grown
    assert max(grown.values()) < 20, grown
