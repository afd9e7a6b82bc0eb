"""Arcee on transformers."""

from __future__ import annotations

from transformers.models.arcee.modeling_arcee import ArceeAttention, ArceeDecoderLayer, ArceeMLP

from nnterp.core.architectures import ARCEE as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=ArceeDecoderLayer, attention=ArceeAttention, mlp=ArceeMLP
)
