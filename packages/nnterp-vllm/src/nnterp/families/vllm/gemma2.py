"""Gemma-2 on vLLM: fused blocks; no head, the embedding projects."""

from __future__ import annotations

from vllm.model_executor.models.gemma2 import Gemma2Attention, Gemma2DecoderLayer, Gemma2MLP

from nnterp.core.architectures import GEMMA2 as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, FusedLayer, layer=Gemma2DecoderLayer, attention=Gemma2Attention, mlp=Gemma2MLP
)
