"""GraniteMoE on transformers."""

from __future__ import annotations

import transformers
from packaging.version import Version
from transformers.models.granitemoe.modeling_granitemoe import (
    GraniteMoeAttention,
    GraniteMoeDecoderLayer,
    GraniteMoeMoE,
)

from nnterp.core.architectures import GRANITEMOE as ARCHITECTURE
from nnterp.hf import Router, declare

# Before 5.21 the indices came first, and the logits last.
_INDICES = 0 if Version(transformers.__version__) < Version("5.21") else 2

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=GraniteMoeDecoderLayer,
    attention=GraniteMoeAttention,
    mixture=GraniteMoeMoE,
    routing=Router("router", weights=1, indices=_INDICES),
)
