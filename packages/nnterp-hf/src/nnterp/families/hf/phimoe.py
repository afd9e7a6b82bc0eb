"""PhiMoE on transformers."""

from __future__ import annotations

from transformers.models.phimoe.modeling_phimoe import (
    PhimoeAttention,
    PhimoeDecoderLayer,
    PhimoeSparseMoeBlock,
)

from nnterp.core.architectures import PHIMOE as ARCHITECTURE
from nnterp.hf import Router, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=PhimoeDecoderLayer,
    attention=PhimoeAttention,
    mixture=PhimoeSparseMoeBlock,
    routing=Router("router"),
)
