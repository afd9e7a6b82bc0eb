"""Phi (1, 1.5 and 2) on vLLM: plain blocks where it is native, else its Transformers backend."""

from __future__ import annotations

from nnterp.core.architectures import PHI as ARCHITECTURE
from nnterp.vllm import PlainLayer, backend, declare

RENAME, ENVOYS = backend(ARCHITECTURE)
try:
    from vllm.model_executor.models.phi import PhiAttention, PhiLayer, PhiMLP
except ModuleNotFoundError:
    pass  # the newer releases have none of their own
else:
    ENVOYS |= declare(ARCHITECTURE, PlainLayer, layer=PhiLayer, attention=PhiAttention, mlp=PhiMLP)[
        1
    ]
