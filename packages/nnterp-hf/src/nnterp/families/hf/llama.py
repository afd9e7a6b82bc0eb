"""Llama on transformers."""

from __future__ import annotations

from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from nnterp.core.architectures import LLAMA as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=LlamaDecoderLayer, attention=LlamaAttention, mlp=LlamaMLP
)
