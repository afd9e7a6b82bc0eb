"""DeepSeek-V3 on vLLM, which runs it with DeepSeek-V2's classes and turns the channels in pairs."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2DecoderLayer,
    DeepseekV2MLAAttention,
    DeepseekV2MLP,
    DeepseekV2MoE,
)

from nnterp.core.architectures import DEEPSEEK_V3 as ARCHITECTURE
from nnterp.families.vllm import deepseek_v2
from nnterp.vllm import (
    ExpandedAttention,
    FusedLayer,
    LatentAttention,
    Rotary,
    declare,
    only,
    rotated,
)

_ROTARY = Rotary(lambda host: host.config.qk_rope_head_dim, halves=True)
RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=DeepseekV2DecoderLayer,
    attention={
        DeepseekV2Attention: rotated(ExpandedAttention, _ROTARY),
        DeepseekV2MLAAttention: rotated(LatentAttention, _ROTARY),
    },
    mlp=DeepseekV2MLP,
    mixture=DeepseekV2MoE,
)


settings = deepseek_v2.settings


def check(model: Any) -> None:
    """Refuse what vLLM computes otherwise, and what DeepSeek-V2's does not take.

    Raises:
        ValueError: the checkpoint's channels turn in halves, or as for DeepSeek-V2.
    """
    deepseek_v2.check(model)
    only(model, rope_interleave=True)
