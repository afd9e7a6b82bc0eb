"""Phi (1, 1.5 and 2) on vLLM: plain blocks where it is native, else its Transformers backend."""

from __future__ import annotations

from nnterp.core.architectures import PHI as ARCHITECTURE
from nnterp.vllm import PlainLayer, backend

RENAME, ENVOYS = backend(
    ARCHITECTURE, PlainLayer, layer="phi.PhiLayer", attention="phi.PhiAttention", mlp="phi.PhiMLP"
)
