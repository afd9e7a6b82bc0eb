"""What the conformance suite covers: nothing dropped out of it, and what it expects of whom."""

from __future__ import annotations

from typing import Any

import pytest

from nnterp.core import VOCABULARY, engines
from nnterp.core.testing import conformance
from nnterp.core.testing.bench import Bench
from nnterp.core.testing.cases import PROMPTS

# Tested on both engines, whatever else is.
ALWAYS = (
    *("llama", "gpt2", "gemma2", "mistral", "qwen2", "qwen3", "gptj", "gpt_neox", "gpt_neox_seq"),
    *("opt", "opt_postln", "falcon", "falcon_new", "falcon_seq", "falcon_seq_bias"),
    *("falcon_alibi", "bloom", "olmo2", "granite", "cohere", "cohere2", "cohere2_window", "arcee"),
    *("phi", "starcoder2"),
)

# Values that plain transformers has and an engine leaves out, by the engine's label.
LEFT_OUT = {
    "hf": set(),
    "hf-sdpa": set(),
    "vllm": {"attention_mask", "lm_head_output", "mlp.expert_outputs"},
}

# Values of the vocabulary's writable ones that an engine has read-only.
READ_ONLY = {
    "hf": set(),
    "hf-sdpa": {"attention_scores", "attention_probabilities"},
    "vllm": {
        *("attention_scores", "attention_probabilities"),
        *("expert_weights", "expert_indices"),
    },
}

# What vLLM has read-only besides where the attention works on latents.
LATENT = {"attention_keys", "attention_values"}


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_engine_is_tested(suite: Any, engine: str) -> None:
    """An engine is not installed, or a checkpoint that it was tested on is not any more."""
    assert engine in engines()
    tested = {one.recipe.name for one in suite.subjects if one.adapter.name == engine}
    assert tested >= set(ALWAYS)


def test_window_is_exceeded(suite: Any) -> None:
    """No prompt is longer than a checkpoint's window, so that the window is not tested."""
    windows = {one.recipe.name: one.recipe.window for one in suite.subjects}
    longest = max(len(ids) for ids in PROMPTS.values())
    assert {name for name, window in windows.items() if window and window >= longest} <= {"cohere2"}


def test_every_test_says_what_it_means() -> None:
    """A conformance test has no explanation of what its failure means."""
    tests = [test for name, test in vars(conformance).items() if name.startswith("test_")]
    assert len(tests) > 20
    assert [test.__name__ for test in tests if not (test.__doc__ or "").strip()] == []


def test_left_out(bench: Bench) -> None:
    """An engine leaves out a value that it served, or serves one more: change the table above."""
    known = set(bench.references.records["five"].keys())
    reasons = bench.reasons()
    left_out = {
        key.split(".", 2)[-1] if key.startswith("layers.") else key
        for key, reason in reasons.items()
        if reason is not None and key in known
    }
    assert left_out <= LEFT_OUT[bench.subject.adapter.label]


def test_read_only(bench: Bench) -> None:
    """An engine refuses to have a value written that it let be written, or the other way round."""
    keys = bench.keys()
    served = {key.rsplit(".", 1)[-1] for key in keys}
    refused = {
        name
        for key in keys
        if VOCABULARY[name := key.rsplit(".", 1)[-1]].writable
        and conformance.is_read_only(bench, key)
    }
    expected = READ_ONLY[bench.subject.adapter.label]
    if bench.subject.adapter.name == "vllm" and bench.subject.recipe.reference.latent:
        expected = expected | LATENT
    assert refused == expected & served


def test_positions_of_logits(bench: Bench) -> None:
    """transformers has logits of every position of a prompt, vLLM of the last alone."""
    for prompt in ("one", "five", "forty"):
        logits = bench.prefill(prompt)["logits"]
        last = bench.subject.adapter.name == "vllm"
        assert logits.shape[1] == (1 if last else len(PROMPTS[prompt]))
