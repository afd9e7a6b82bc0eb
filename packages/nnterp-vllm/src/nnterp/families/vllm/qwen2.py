"""Qwen2 on vLLM: fused blocks."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP

from nnterp.core.architectures import QWEN2 as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE, FusedLayer, layer=Qwen2DecoderLayer, attention=Qwen2Attention, mlp=Qwen2MLP
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: some of the checkpoint's blocks have a window and some have none.
    """
    types = model.text_config.layer_types
    if len(set(types)) > 1:
        only(model, layer_types=["full_attention"] * len(types))
