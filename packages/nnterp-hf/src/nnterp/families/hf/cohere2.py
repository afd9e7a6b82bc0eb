"""Cohere-2 on transformers."""

from __future__ import annotations

from transformers.models.cohere2.modeling_cohere2 import (
    Cohere2Attention,
    Cohere2DecoderLayer,
    Cohere2MLP,
)

from nnterp.core.architectures import COHERE2 as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=Cohere2DecoderLayer, attention=Cohere2Attention, mlp=Cohere2MLP
)
