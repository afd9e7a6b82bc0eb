"""GPT-2 on transformers."""

from __future__ import annotations

from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block

from nnterp.core.architectures import GPT2 as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(ARCHITECTURE, layer=GPT2Block, attention=GPT2Attention, mlp=GPT2MLP)
