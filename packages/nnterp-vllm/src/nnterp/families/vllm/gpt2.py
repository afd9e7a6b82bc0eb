"""GPT-2 on vLLM: plain blocks."""

from __future__ import annotations

from vllm.model_executor.models.gpt2 import GPT2MLP, GPT2Attention, GPT2Block

from nnterp.core.architectures import GPT2 as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, PlainLayer, layer=GPT2Block, attention=GPT2Attention, mlp=GPT2MLP
)
