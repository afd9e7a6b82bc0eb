"""GPT-J on vLLM: plain blocks."""

from __future__ import annotations

from vllm.model_executor.models.gpt_j import GPTJMLP, GPTJAttention, GPTJBlock

from nnterp.core.architectures import GPTJ as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare

RENAME, ENVOYS = declare(
    ARCHITECTURE, PlainLayer, layer=GPTJBlock, attention=GPTJAttention, mlp=GPTJMLP
)
