"""GPT-OSS on vLLM: fused blocks."""

from __future__ import annotations

from dataclasses import replace

from vllm.model_executor.models.gpt_oss import MLPBlock, OAIAttention, TransformerBlock

from nnterp.core.architectures import GPT_OSS
from nnterp.vllm import FusedLayer, declare

ARCHITECTURE = replace(
    GPT_OSS, embed_tokens="model.embedding", self_attn="attn", attention_adds="attn"
)
RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=TransformerBlock,
    attention=OAIAttention,
    mixture=MLPBlock,
    router="router",
)
