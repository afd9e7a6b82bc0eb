"""Llama on vLLM: fused blocks."""

from __future__ import annotations

from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from nnterp.core.architectures import LLAMA as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, FusedLayer, layer=LlamaDecoderLayer, attention=LlamaAttention, mlp=LlamaMLP
)
