"""StarCoder2 on transformers."""

from __future__ import annotations

from transformers.models.starcoder2.modeling_starcoder2 import (
    Starcoder2Attention,
    Starcoder2DecoderLayer,
    Starcoder2MLP,
)

from nnterp.core.architectures import STARCODER2 as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=Starcoder2DecoderLayer, attention=Starcoder2Attention, mlp=Starcoder2MLP
)
