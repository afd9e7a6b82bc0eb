"""Qwen2-MoE on transformers."""

from __future__ import annotations

from transformers.models.qwen2_moe.modeling_qwen2_moe import (
    Qwen2MoeAttention,
    Qwen2MoeDecoderLayer,
    Qwen2MoeMLP,
    Qwen2MoeSparseMoeBlock,
)

from nnterp.core.architectures import QWEN2_MOE as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=Qwen2MoeDecoderLayer,
    attention=Qwen2MoeAttention,
    mlp=Qwen2MoeMLP,
    mixture=Qwen2MoeSparseMoeBlock,
)
