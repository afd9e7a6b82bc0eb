"""Qwen2 on vLLM: fused blocks."""

from __future__ import annotations

from vllm.model_executor.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP

from nnterp.core.architectures import QWEN2 as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, FusedLayer, layer=Qwen2DecoderLayer, attention=Qwen2Attention, mlp=Qwen2MLP
)
