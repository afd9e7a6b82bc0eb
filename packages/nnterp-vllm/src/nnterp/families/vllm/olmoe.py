"""OLMoE on vLLM: fused blocks."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.olmoe import OlmoeAttention, OlmoeDecoderLayer, OlmoeMoE

from nnterp.core.architectures import OLMOE as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=OlmoeDecoderLayer,
    attention=OlmoeAttention,
    mixture=OlmoeMoE,
)


def check(model: Any) -> None:
    """Refuse what vLLM leaves out.

    Raises:
        ValueError: the checkpoint clips queries, keys and values, or norms the experts' weights.
    """
    only(model, clip_qkv=None, norm_topk_prob=False)
