"""Mixtral on vLLM: fused blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.model_executor.models.mixtral import MixtralAttention, MixtralDecoderLayer, MixtralMoE

from nnterp.core.architectures import MIXTRAL
from nnterp.vllm import FusedLayer, declare, only

ARCHITECTURE = replace(MIXTRAL, mlp="block_sparse_moe")
RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=MixtralDecoderLayer,
    attention=MixtralAttention,
    mixture=MixtralMoE,
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint has another activation.
    """
    only(model, hidden_act="silu")
