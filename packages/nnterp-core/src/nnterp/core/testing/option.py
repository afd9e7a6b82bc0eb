"""The command-line option of a conformance run; plain Python, since pytest reads it first."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def add_option(parser: pytest.Parser) -> None:
    """``--conformance-report FILE``, for the ``pytest_addoption`` of the conftest at the root.

    pytest reads its options before it loads any other conftest, so the plugin itself comes too
    late to have one.

    Args:
        parser: pytest's.
    """
    # Another conftest may have declared it.
    with contextlib.suppress(ValueError):
        parser.getgroup("nnterp").addoption(
            "--conformance-report",
            metavar="FILE",
            help="write what each checkpoint serves on each engine, and how closely, as JSON",
        )
