"""Run where only nnterp-core is installed, from the source tree: ``hatch run core-only:test``."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import nnterp.core

pytestmark = pytest.mark.isolation


@pytest.mark.parametrize(
    "module",
    ["torch", "nnsight", "transformers", "vllm", "numpy", "nnterp.hf", "nnterp.vllm"],
)
def test_what_core_does_not_need_is_absent(module):
    assert find_spec(module) is None


def test_no_engine_is_found_and_the_vocabulary_is_there():
    assert nnterp.core.engines() == ()
    assert "layer_output" in nnterp.core.VOCABULARY
