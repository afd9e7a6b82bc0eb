"""Llama 4's text model on vLLM: fused blocks; its rotary turns channels in halves."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.llama4 import Llama4Attention, Llama4DecoderLayer, Llama4MoE

from nnterp.core.architectures import LLAMA4_TEXT as ARCHITECTURE
from nnterp.vllm import Attention, FusedLayer, Rotary, declare, only, rotated

# The weights of the blocks without rotary are reordered like the others'.
_ROTARY = Rotary(lambda host: host.qk_head_dim, halves=False)
RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=Llama4DecoderLayer,
    attention=Llama4Attention,
    attention_convention=rotated(Attention, _ROTARY),
    mlp=LlamaMLP,
    mixture=Llama4MoE,
    router="router",
)


def settings(config: Any) -> dict[str, dict[str, Any]]:
    """Whether far queries are scaled: the config's word, for which vLLM has a rule of its own."""
    scaled = bool(config.attn_temperature_tuning)
    return {"override_generation_config": {"attn_temperature_tuning": scaled}}


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint has another activation, or chunks elsewhere than its rotary.
    """
    kinds = ["full_attention", "chunked_attention"]
    layer_types = [kinds[bool(rotary)] for rotary in model.text_config.no_rope_layers]
    only(model, hidden_act="silu", layer_types=layer_types)
