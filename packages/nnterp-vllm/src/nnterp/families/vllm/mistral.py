"""Mistral on vLLM: fused blocks."""

from __future__ import annotations

from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.mistral import MistralAttention, MistralDecoderLayer, MistralMLP

from nnterp.core.architectures import MISTRAL as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, FusedLayer, layer=MistralDecoderLayer, attention=MistralAttention, mlp=LlamaMLP
)
ENVOYS[MistralMLP] = ENVOYS[LlamaMLP]
