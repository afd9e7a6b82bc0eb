"""Qwen3 on vLLM: fused blocks."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP

from nnterp.core.architectures import QWEN3 as ARCHITECTURE
from nnterp.families.vllm import qwen2
from nnterp.vllm import FusedLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE, FusedLayer, layer=Qwen3DecoderLayer, attention=Qwen3Attention, mlp=Qwen3MLP
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint has biases, or as for Qwen2.
    """
    qwen2.check(model)
    only(model, attention_bias=False)
