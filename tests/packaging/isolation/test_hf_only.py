"""Run where nnterp-hf is installed without vLLM: ``hatch run hf-only:test``."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nnterp.core

pytestmark = pytest.mark.isolation


@pytest.mark.parametrize("module", ["vllm", "nnterp.vllm", "nnterp.families.vllm"])
def test_vllm_is_absent(module):
    with pytest.raises(ModuleNotFoundError):
        __import__(module)


def test_the_other_engine_is_offered_by_its_command():
    assert nnterp.core.engines() == ("hf",)
    with pytest.raises(nnterp.core.MissingBackend, match=r'pip install "nnterp-vllm\[cuda\]"'):
        nnterp.core.load("x", engine="vllm")


def test_nothing_is_missing_or_at_odds():
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert checked.stdout == "No broken requirements found.\n"


def test_a_model_is_read_by_standard_names(checkpoint, prompt, expected):
    import torch

    model = nnterp.core.load(str(checkpoint), engine="hf", dtype=torch.float32)
    with model.prefill(prompt):
        residual = model.layers[1].layer_output.save()
        logits = model.logits.save()
    assert residual.shape == (1, len(prompt), 64)
    torch.testing.assert_close(logits[:, -1].detach(), expected, rtol=1e-5, atol=1e-6)
