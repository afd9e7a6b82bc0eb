"""Cohere on transformers."""

from __future__ import annotations

from transformers.models.cohere.modeling_cohere import (
    CohereAttention,
    CohereDecoderLayer,
    CohereMLP,
)

from nnterp.core.architectures import COHERE as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=CohereDecoderLayer, attention=CohereAttention, mlp=CohereMLP
)
