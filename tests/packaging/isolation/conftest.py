"""A checkpoint for the environments that lack the conformance kit's packages."""

from __future__ import annotations

from pathlib import Path

import pytest

PROMPT = [5, 17, 3, 42, 8]


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    return PROMPT


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, made by transformers, without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def expected(checkpoint: Path, prompt: list[int]):
    """What plain transformers says of the prompt: the last position's logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[:, -1]
