"""Cohere on vLLM: the whole stream first of a pair; no head, the embedding projects."""

from __future__ import annotations

from vllm.model_executor.models.commandr import CohereAttention, CohereDecoderLayer, CohereMLP

from nnterp.core.architectures import COHERE as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, PlainLayer, layer=CohereDecoderLayer, attention=CohereAttention, mlp=CohereMLP
)
