"""OLMo-2 on transformers."""

from __future__ import annotations

from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2DecoderLayer, Olmo2MLP

from nnterp.core.architectures import OLMO2 as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=Olmo2DecoderLayer, attention=Olmo2Attention, mlp=Olmo2MLP
)
