"""PhiMoE on vLLM: plain blocks."""

from __future__ import annotations

from dataclasses import replace

from vllm.model_executor.models.phimoe import PhiMoE, PhiMoEAttention, PhiMoEDecoderLayer

from nnterp.core.architectures import PHIMOE
from nnterp.vllm import PlainLayer, declare

ARCHITECTURE = replace(PHIMOE, mlp="block_sparse_moe")
RENAME, ENVOYS = declare(
    ARCHITECTURE,
    PlainLayer,
    layer=PhiMoEDecoderLayer,
    attention=PhiMoEAttention,
    mixture=PhiMoE,
)
