"""Qwen3 on transformers."""

from __future__ import annotations

from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP

from nnterp.core.architectures import QWEN3 as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=Qwen3DecoderLayer, attention=Qwen3Attention, mlp=Qwen3MLP
)
