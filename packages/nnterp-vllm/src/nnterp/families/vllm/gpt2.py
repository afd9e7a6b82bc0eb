"""GPT-2 on vLLM: plain blocks."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.gpt2 import GPT2MLP, GPT2Attention, GPT2Block

from nnterp.core.architectures import GPT2 as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE, PlainLayer, layer=GPT2Block, attention=GPT2Attention, mlp=GPT2MLP
)


def settings(config: Any) -> dict[str, dict[str, Any]]:
    """No option, but what vLLM leaves out is refused before vLLM ends without words.

    Raises:
        ValueError: the checkpoint scales scores otherwise than by the head's width, or upcasts.
    """
    only(
        config,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        reorder_and_upcast_attn=False,
    )
    return {}
