"""Granite on transformers."""

from __future__ import annotations

from transformers.models.granite.modeling_granite import (
    GraniteAttention,
    GraniteDecoderLayer,
    GraniteMLP,
)

from nnterp.core.architectures import GRANITE as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=GraniteDecoderLayer, attention=GraniteAttention, mlp=GraniteMLP
)
