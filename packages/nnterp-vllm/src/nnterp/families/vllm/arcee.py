"""Arcee on vLLM: fused blocks where it is native, else its Transformers backend."""

from __future__ import annotations

from vllm.model_executor.models.llama import LlamaAttention

from nnterp.core.architectures import ARCEE as ARCHITECTURE
from nnterp.vllm import FusedLayer, backend, declare

RENAME, ENVOYS = backend(ARCHITECTURE)
try:
    from vllm.model_executor.models.arcee import ArceeDecoderLayer, ArceeMLP
except ModuleNotFoundError:
    pass  # the newer releases have none of their own
else:
    ENVOYS |= declare(
        ARCHITECTURE, FusedLayer, layer=ArceeDecoderLayer, attention=LlamaAttention, mlp=ArceeMLP
    )[1]
