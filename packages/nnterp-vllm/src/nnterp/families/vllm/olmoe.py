"""OLMoE on vLLM: fused blocks."""

from __future__ import annotations

from vllm.model_executor.models.olmoe import OlmoeAttention, OlmoeDecoderLayer, OlmoeMoE

from nnterp.core.architectures import OLMOE as ARCHITECTURE
from nnterp.vllm import FusedLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    FusedLayer,
    layer=OlmoeDecoderLayer,
    attention=OlmoeAttention,
    mixture=OlmoeMoE,
)
