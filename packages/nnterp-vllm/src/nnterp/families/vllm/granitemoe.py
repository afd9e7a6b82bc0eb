"""GraniteMoE on vLLM: plain blocks."""

from __future__ import annotations

from vllm.model_executor.models.granitemoe import (
    GraniteMoeAttention,
    GraniteMoeDecoderLayer,
    GraniteMoeMoE,
)

from nnterp.core.architectures import GRANITEMOE as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    PlainLayer,
    layer=GraniteMoeDecoderLayer,
    attention=GraniteMoeAttention,
    mixture=GraniteMoeMoE,
)
