"""OPT on transformers; its feed-forward lies on the block."""

from __future__ import annotations

from transformers.models.opt.modeling_opt import OPTAttention, OPTDecoderLayer

from nnterp.core.architectures import OPT as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(ARCHITECTURE, layer=OPTDecoderLayer, attention=OPTAttention)
