"""StarCoder2 on vLLM: through its Transformers backend."""

from __future__ import annotations

from nnterp.core.architectures import STARCODER2 as ARCHITECTURE
from nnterp.vllm import backend

RENAME, ENVOYS = backend(ARCHITECTURE)
