"""Qwen3 on vLLM: fused blocks."""

from __future__ import annotations

from vllm.model_executor.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP

from nnterp.core.architectures import QWEN3 as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, FusedLayer, layer=Qwen3DecoderLayer, attention=Qwen3Attention, mlp=Qwen3MLP
)
