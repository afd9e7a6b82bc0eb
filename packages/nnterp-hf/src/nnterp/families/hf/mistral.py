"""Mistral on transformers."""

from __future__ import annotations

from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralMLP,
)

from nnterp.core.architectures import MISTRAL as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=MistralDecoderLayer, attention=MistralAttention, mlp=MistralMLP
)
