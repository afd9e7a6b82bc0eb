"""Falcon on vLLM: plain blocks; its sublayers leave their biases to the block."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.falcon import FalconAttention, FalconDecoderLayer, FalconMLP

from nnterp.core.architectures import FALCON as ARCHITECTURE
from nnterp.vllm import BiasedAttention, BiasedMlp, PlainLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    PlainLayer,
    layer=FalconDecoderLayer,
    attention=FalconAttention,
    mlp=FalconMLP,
    attention_convention=BiasedAttention,
    mlp_convention=BiasedMlp,
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint has another activation.
    """
    only(model, activation="gelu")
