"""OPT on vLLM: plain blocks whose feed-forward lies on the block."""

from __future__ import annotations

from vllm.model_executor.models.opt import OPTAttention, OPTDecoderLayer

from nnterp.core.architectures import OPT as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare

RENAME, ENVOYS = declare(ARCHITECTURE, PlainLayer, layer=OPTDecoderLayer, attention=OPTAttention)
