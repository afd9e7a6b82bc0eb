"""GraniteMoE on transformers."""

from __future__ import annotations

from transformers.models.granitemoe.modeling_granitemoe import (
    GraniteMoeAttention,
    GraniteMoeDecoderLayer,
    GraniteMoeMoE,
)

from nnterp.core.architectures import GRANITEMOE as ARCHITECTURE
from nnterp.hf import Router, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=GraniteMoeDecoderLayer,
    attention=GraniteMoeAttention,
    mixture=GraniteMoeMoE,
    routing=Router("router", weights=1, indices=0),
)
