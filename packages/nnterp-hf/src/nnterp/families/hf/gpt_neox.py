"""GPT-NeoX on transformers."""

from __future__ import annotations

from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXAttention,
    GPTNeoXLayer,
    GPTNeoXMLP,
)

from nnterp.core.architectures import GPT_NEOX as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=GPTNeoXLayer, attention=GPTNeoXAttention, mlp=GPTNeoXMLP
)
