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
from nnterp.vllm import ExpandedAttention, FusedLayer, LatentAttention, declare, only

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


def settings(config: Any) -> dict[str, dict[str, Any]]:
    """No option, but rotary settings are refused that vLLM overwrites when it builds the model.

    Raises:
        ValueError: the checkpoint's rotary is neither plain nor yarn, or yarn in a way of its own.
    """
    if config.rope_parameters["rope_type"] != "default":
        only(config, rope_type="yarn", attention_factor=None, truncate=True)
    return {}


def check(model: Any) -> None:
    """Refuse what vLLM leaves out, and float16, in which vLLM divides the stream to fit its range.

    Raises:
        ValueError: the checkpoint has biases, a tied head or groups of experts that its choice
            does not heed; or it scales its experts, and the model is loaded in float16.
    """
    only(model, attention_bias=False, mlp_bias=False, tie_word_embeddings=False)
    config = model.text_config
    if getattr(config, "topk_method", None) == "greedy" and (config.n_group or 1) > 1:
        only(model, topk_method="group_limited_greedy")
    if model.dtype == torch.float16 and model.text_config.routed_scaling_factor != 1:
        raise ValueError(
            f"in float16 vLLM divides {model.model_name}'s stream by its routed_scaling_factor, so "
            f"no value would be the checkpoint's own; load it with dtype='bfloat16' or 'float32'"
        )
