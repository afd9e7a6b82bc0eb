"""Qwen3-MoE on transformers."""

from __future__ import annotations

from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeDecoderLayer,
    Qwen3MoeMLP,
    Qwen3MoeSparseMoeBlock,
)

from nnterp.core.architectures import QWEN3_MOE as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=Qwen3MoeDecoderLayer,
    attention=Qwen3MoeAttention,
    mlp=Qwen3MoeMLP,
    mixture=Qwen3MoeSparseMoeBlock,
)
