"""Mixtral on transformers."""

from __future__ import annotations

from transformers.models.mixtral.modeling_mixtral import (
    MixtralAttention,
    MixtralDecoderLayer,
    MixtralSparseMoeBlock,
)

from nnterp.core.architectures import MIXTRAL as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=MixtralDecoderLayer,
    attention=MixtralAttention,
    mixture=MixtralSparseMoeBlock,
)
