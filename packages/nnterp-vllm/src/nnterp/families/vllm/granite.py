"""Granite on vLLM: plain blocks."""

from __future__ import annotations

from vllm.model_executor.models.granite import GraniteAttention, GraniteDecoderLayer, GraniteMLP

from nnterp.core.architectures import GRANITE as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, PlainLayer, layer=GraniteDecoderLayer, attention=GraniteAttention, mlp=GraniteMLP
)
