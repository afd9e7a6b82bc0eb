"""DeepSeek-V2 on vLLM: fused blocks, with latent attention or, where that is off, expanded."""

from __future__ import annotations

from vllm.model_executor.models.deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2DecoderLayer,
    DeepseekV2MLAAttention,
    DeepseekV2MLP,
    DeepseekV2MoE,
)

from nnterp.core.architectures import DEEPSEEK_V2 as ARCHITECTURE
from nnterp.vllm import ExpandedAttention, FusedLayer, LatentAttention, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=DeepseekV2DecoderLayer,
    attention={
        DeepseekV2Attention: ExpandedAttention,
        DeepseekV2MLAAttention: LatentAttention,
    },
    mlp=DeepseekV2MLP,
    mixture=DeepseekV2MoE,
)
