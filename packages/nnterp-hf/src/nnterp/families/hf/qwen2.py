"""Qwen2 on transformers."""

from __future__ import annotations

from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP

from nnterp.core.architectures import QWEN2 as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=Qwen2DecoderLayer, attention=Qwen2Attention, mlp=Qwen2MLP
)
