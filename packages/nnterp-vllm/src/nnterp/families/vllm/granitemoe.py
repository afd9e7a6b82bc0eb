"""GraniteMoE on vLLM: plain blocks."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.granitemoe import (
    GraniteMoeAttention,
    GraniteMoeDecoderLayer,
    GraniteMoeMoE,
)

from nnterp.core.architectures import GRANITEMOE as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    PlainLayer,
    layer=GraniteMoeDecoderLayer,
    attention=GraniteMoeAttention,
    mixture=GraniteMoeMoE,
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint's attention has biases, or the experts another activation.
    """
    only(model, attention_bias=False, hidden_act="silu")
