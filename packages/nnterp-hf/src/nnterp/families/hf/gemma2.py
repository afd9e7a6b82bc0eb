"""Gemma-2 on transformers; it scales inside the embedding module."""

from __future__ import annotations

from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2Attention,
    Gemma2DecoderLayer,
    Gemma2MLP,
)

from nnterp.core.architectures import GEMMA2 as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=Gemma2DecoderLayer, attention=Gemma2Attention, mlp=Gemma2MLP
)
