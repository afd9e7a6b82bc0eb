"""OLMoE on vLLM: fused blocks."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.olmoe import OlmoeAttention, OlmoeDecoderLayer, OlmoeMoE

from nnterp.core.architectures import OLMOE as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=OlmoeDecoderLayer,
    attention=OlmoeAttention,
    mixture=OlmoeMoE,
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint clips queries, keys and values, norms the experts' weights, or
            has another epsilon, another activation, biases or a tied head.
    """
    only(
        model,
        clip_qkv=None,
        norm_topk_prob=False,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
    )
