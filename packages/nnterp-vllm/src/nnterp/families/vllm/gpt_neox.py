"""GPT-NeoX on vLLM: plain blocks where it is native, else its Transformers backend."""

from __future__ import annotations

from nnterp.core.architectures import GPT_NEOX as ARCHITECTURE
from nnterp.vllm import PlainLayer, backend

RENAME, ENVOYS = backend(
    ARCHITECTURE,
    PlainLayer,
    layer="gpt_neox.GPTNeoXLayer",
    attention="gpt_neox.GPTNeoXAttention",
    mlp="gpt_neox.GPTNeoXMLP",
)
RENAME["embed_out"] = "lm_head"
