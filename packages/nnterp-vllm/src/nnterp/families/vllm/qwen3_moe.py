"""Qwen3-MoE on vLLM: fused blocks."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeDecoderLayer,
    Qwen3MoeMLP,
    Qwen3MoeSparseMoeBlock,
)

from nnterp.core.architectures import QWEN3_MOE as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=Qwen3MoeDecoderLayer,
    attention=Qwen3MoeAttention,
    mlp=Qwen3MoeMLP,
    mixture=Qwen3MoeSparseMoeBlock,
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint has biases.
    """
    only(model, attention_bias=False)
