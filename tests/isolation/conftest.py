"""The modules that the tests here share with the scripts lie beside them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The engine's processes take this path over, and find the same modules.
sys.path.insert(0, str(Path(__file__).parent))
