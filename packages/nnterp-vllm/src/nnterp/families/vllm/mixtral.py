"""Mixtral on vLLM: fused blocks."""

from __future__ import annotations

from dataclasses import replace

from vllm.model_executor.models.mixtral import MixtralAttention, MixtralDecoderLayer, MixtralMoE

from nnterp.core.architectures import MIXTRAL
from nnterp.vllm import FusedLayer, declare

ARCHITECTURE = replace(MIXTRAL, mlp="block_sparse_moe")
RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=MixtralDecoderLayer,
    attention=MixtralAttention,
    mixture=MixtralMoE,
)
