"""PhiMoE on vLLM: plain blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.model_executor.models.phimoe import PhiMoE, PhiMoEAttention, PhiMoEDecoderLayer

from nnterp.core.architectures import PHIMOE
from nnterp.vllm import PlainLayer, declare, only

ARCHITECTURE = replace(PHIMOE, mlp="block_sparse_moe")
RENAME, ENVOYS = declare(
    ARCHITECTURE,
    PlainLayer,
    layer=PhiMoEDecoderLayer,
    attention=PhiMoEAttention,
    mixture=PhiMoE,
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint's router chooses among other experts than those within 0.01, or
            it has another activation, no biases or a tied head.
    """
    only(
        model,
        router_jitter_noise=0.01,
        hidden_act="silu",
        attention_bias=True,
        tie_word_embeddings=False,
    )
