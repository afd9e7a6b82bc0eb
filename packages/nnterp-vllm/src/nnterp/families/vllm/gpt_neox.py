"""GPT-NeoX on vLLM: plain blocks where it is native, else its Transformers backend."""

from __future__ import annotations

from nnterp.core.architectures import GPT_NEOX as ARCHITECTURE
from nnterp.vllm import PlainLayer, backend, declare

RENAME, ENVOYS = backend(ARCHITECTURE)
try:
    from vllm.model_executor.models.gpt_neox import GPTNeoXAttention, GPTNeoXLayer, GPTNeoXMLP
except ModuleNotFoundError:
    pass  # the newer releases have none of their own
else:
    rename, envoys = declare(
        ARCHITECTURE, PlainLayer, layer=GPTNeoXLayer, attention=GPTNeoXAttention, mlp=GPTNeoXMLP
    )
    RENAME |= rename | {"embed_out": "lm_head"}
    ENVOYS |= envoys
