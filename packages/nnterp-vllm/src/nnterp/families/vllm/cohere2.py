"""Cohere-2 on vLLM: the whole stream first of a pair; no head, the embedding projects."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.commandr import CohereAttention, CohereDecoderLayer, CohereMLP

from nnterp.core.architectures import COHERE2 as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE, PlainLayer, layer=CohereDecoderLayer, attention=CohereAttention, mlp=CohereMLP
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint has biases, another activation or a head of its own.
    """
    only(model, attention_bias=False, hidden_act="silu", tie_word_embeddings=True)
