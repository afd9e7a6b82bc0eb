"""BLOOM on vLLM: plain blocks."""

from __future__ import annotations

from vllm.model_executor.models.bloom import BloomAttention, BloomBlock, BloomMLP

from nnterp.core.architectures import BLOOM as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, PlainLayer, layer=BloomBlock, attention=BloomAttention, mlp=BloomMLP
)
