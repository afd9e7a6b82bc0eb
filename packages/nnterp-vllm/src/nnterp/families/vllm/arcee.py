"""Arcee on vLLM: fused blocks where it is native, else its Transformers backend."""

from __future__ import annotations

from nnterp.core.architectures import ARCEE as ARCHITECTURE
from nnterp.vllm import FusedLayer, backend

NATIVE = {"layer": "arcee.ArceeDecoderLayer", "mlp": "arcee.ArceeMLP"}
RENAME, ENVOYS = backend(ARCHITECTURE, FusedLayer, attention="llama.LlamaAttention", **NATIVE)
