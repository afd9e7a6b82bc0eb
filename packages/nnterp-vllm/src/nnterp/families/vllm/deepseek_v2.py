"""DeepSeek-V2 on vLLM: fused blocks, with latent attention or, where that is off, expanded."""

from __future__ import annotations

from typing import Any

import torch
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


def check(model: Any) -> None:
    """Refuse float16, in which vLLM divides the whole stream to keep it in range.

    Raises:
        ValueError: the checkpoint scales its experts, and the model is loaded in float16.
    """
    if model.dtype == torch.float16 and model.text_config.routed_scaling_factor != 1:
        raise ValueError(
            f"in float16 vLLM divides {model.model_name}'s stream by its routed_scaling_factor, so "
            f"no value would be the checkpoint's own; load it with dtype='bfloat16' or 'float32'"
        )
