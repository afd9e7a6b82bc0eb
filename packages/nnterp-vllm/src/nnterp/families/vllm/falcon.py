"""Falcon on vLLM: plain blocks; its sublayers leave their biases to the block."""

from __future__ import annotations

from vllm.model_executor.models.falcon import FalconAttention, FalconDecoderLayer, FalconMLP

from nnterp.core.architectures import FALCON as ARCHITECTURE
from nnterp.vllm import BiasedAttention, BiasedMlp, PlainLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    PlainLayer,
    layer=FalconDecoderLayer,
    attention=FalconAttention,
    mlp=FalconMLP,
    attention_convention=BiasedAttention,
    mlp_convention=BiasedMlp,
)
