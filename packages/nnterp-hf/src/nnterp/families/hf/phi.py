"""Phi (1, 1.5 and 2) on transformers."""

from __future__ import annotations

from transformers.models.phi.modeling_phi import PhiAttention, PhiDecoderLayer, PhiMLP

from nnterp.core.architectures import PHI as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(ARCHITECTURE, layer=PhiDecoderLayer, attention=PhiAttention, mlp=PhiMLP)
