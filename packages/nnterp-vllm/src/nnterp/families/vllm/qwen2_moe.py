"""Qwen2-MoE on vLLM: fused blocks."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen2_moe import (
    Qwen2MoeAttention,
    Qwen2MoeDecoderLayer,
    Qwen2MoeMLP,
    Qwen2MoeSparseMoeBlock,
)

from nnterp.core.architectures import QWEN2_MOE as ARCHITECTURE
from nnterp.families.vllm import qwen2
from nnterp.vllm import FusedLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=Qwen2MoeDecoderLayer,
    attention=Qwen2MoeAttention,
    mlp=Qwen2MoeMLP,
    mixture=Qwen2MoeSparseMoeBlock,
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint has no biases, or as for Qwen2.
    """
    qwen2.check(model)
    only(model, qkv_bias=True)
