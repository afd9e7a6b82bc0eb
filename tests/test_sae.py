"""The example that splices a sparse autoencoder into a value: what it prints, and what it does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nnterp.core.testing import assert_close

SAE = Path(__file__).resolve().parents[1] / "examples" / "sae.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_sae", SAE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
def test_both_engines_agree(checkpoint):
    ran = subprocess.run(
        [sys.executable, str(SAE), checkpoint("llama")],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("Both engines agree within 1e-04.\n")
    moved = {line[:36].strip(): line[36:60].strip() for line in ran.stdout.splitlines()[3:8]}
    assert float(moved["spliced, error and all"]) < 1e-5
    assert float(moved["spliced, features alone"]) > 0.1
    (without,) = (size for name, size in moved.items() if name.startswith("without"))
    assert float(without) > 1e-3


@pytest.mark.parametrize("error", [True, False])
def test_it_does_what_a_hook_on_plain_transformers_does(example, checkpoint, open_model, error):
    path, layer = checkpoint("llama", add_bos=True), 1
    with open_model("hf", path, dispatch=True) as model, torch.no_grad():
        sae = example.SparseAutoencoder(model.hidden_size, 4 * model.hidden_size)
        positions = example.token_positions(model, example.PROMPT, example.WORD)
        feature, activity = example.strongest(model, sae, layer, positions)
        found = example.spliced(
            model, sae, layer, error=error, without=feature, positions=positions
        )
    assert activity.max() > 0

    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer(example.PROMPT, return_tensors="pt")
    assert tokenizer.decode(prompt["input_ids"][0, positions]).strip() == example.WORD

    def replaced(module, given, stream):
        features = ((stream - sae.bias) @ sae.encoder + sae.threshold).clamp_min(0)
        edited = features.clone()
        edited[:, positions, feature] = 0
        whole = edited @ sae.decoder + sae.bias
        return whole + (stream - (features @ sae.decoder + sae.bias)) * error

    plain.model.layers[layer].register_forward_hook(replaced)
    with torch.no_grad():
        expected = plain(**prompt).logits[:, -1]
    assert_close(found, expected, 1e-5, "logits")
