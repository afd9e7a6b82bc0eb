"""The demo, on small checkpoints: what it prints, and when it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo.py"


def run_demo(*checkpoints: str, in_process: bool = False) -> subprocess.CompletedProcess[str]:
    """``python examples/demo.py``, with vLLM's engine in processes of its own unless said."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("VLLM_ENABLE") and name != "VLLM_LOGGING_LEVEL"
    }
    if in_process:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return subprocess.run(
        [sys.executable, str(DEMO), *checkpoints],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def doctored(checkpoint: Callable[..., str], tmp_path: Path) -> str:
    """A copy of the tiny Llama whose second block has one weight matrix off by a thousandth."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "doctored"
    shutil.copytree(checkpoint("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.001
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_both_engines_agree(checkpoint: Callable[..., str], name: str) -> None:
    ran = run_demo(checkpoint(name), in_process=name != "llama")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""
    first_words = [line.split()[0].rstrip("*") for line in ran.stdout.splitlines() if line]
    for value in (
        "input_ids",
        "token_embeddings",
        "self_attn.attention_queries",
        "self_attn.attention_probabilities",
        "layer_mid",
        "mlp.mlp_neurons",
        "layer_output",
        "logits",
        "next_token_probs",
    ):
        assert value in first_words
    assert "Not on vLLM: attention_mask: a vLLM request is one unpadded sequence" in ran.stdout
    assert "All 48 values agree within 1e-04 of their rows." in ran.stdout
    # Three prompts: five tokens each, and the lens at each of three blocks.
    assert sum(line.rstrip()[-6:-4] == "0." for line in ran.stdout.splitlines()) == 24


@pytest.mark.slow
def test_a_block_that_differs_is_found_and_fails(
    checkpoint: Callable[..., str], doctored: str
) -> None:
    ran = run_demo(checkpoint("llama"), doctored, in_process=True)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    last = ran.stdout.splitlines()[-1]
    assert last.startswith("The first in the forward pass: layers.1.mlp.mlp_output, by 1.")


def test_a_path_without_a_checkpoint_is_named() -> None:
    ran = run_demo("/no/such/checkpoint")
    assert ran.returncode != 0
    assert "no checkpoint at '/no/such/checkpoint'" in ran.stderr


def test_vllm_can_be_imported_after_a_checkpoint_was_fetched(tmp_path: Path) -> None:
    code = f"""
from nnterp.core.testing.checkpoints import _download
from pathlib import Path
try:
    _download("./none.whl", Path({str(tmp_path)!r}))
except RuntimeError:
    pass
import torch.utils.cpp_extension  # as vLLM does
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
