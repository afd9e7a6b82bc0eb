"""Qwen2-MoE on vLLM: fused blocks."""

from __future__ import annotations

from vllm.model_executor.models.qwen2_moe import (
    Qwen2MoeAttention,
    Qwen2MoeDecoderLayer,
    Qwen2MoeMLP,
    Qwen2MoeSparseMoeBlock,
)

from nnterp.core.architectures import QWEN2_MOE as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=Qwen2MoeDecoderLayer,
    attention=Qwen2MoeAttention,
    mlp=Qwen2MoeMLP,
    mixture=Qwen2MoeSparseMoeBlock,
)
