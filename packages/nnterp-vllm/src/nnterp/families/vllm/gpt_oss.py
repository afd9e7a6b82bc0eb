"""GPT-OSS on vLLM: fused blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.model_executor.models.gpt_oss import MLPBlock, OAIAttention, TransformerBlock

from nnterp.core.architectures import GPT_OSS
from nnterp.vllm import FusedLayer, declare, only

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


def check(model: Any) -> None:
    """Refuse what vLLM has fixed.

    Raises:
        ValueError: the checkpoint has another epsilon, no biases, windows in other blocks than the
            even ones, another limit or slope of the activation, a tied head, or another rotary.
    """
    kinds = ["sliding_attention", "full_attention"]
    only(
        model,
        rms_norm_eps=1e-5,
        attention_bias=True,
        layer_types=[kinds[i % 2] for i in range(model.num_layers)],
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        tie_word_embeddings=False,
        rope_type="yarn",
        attention_factor=None,
        mscale=None,
        mscale_all_dim=None,
    )
