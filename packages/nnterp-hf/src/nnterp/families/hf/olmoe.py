"""OLMoE on transformers."""

from __future__ import annotations

from transformers.models.olmoe.modeling_olmoe import (
    OlmoeAttention,
    OlmoeDecoderLayer,
    OlmoeSparseMoeBlock,
)

from nnterp.core.architectures import OLMOE as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=OlmoeDecoderLayer,
    attention=OlmoeAttention,
    mixture=OlmoeSparseMoeBlock,
)
