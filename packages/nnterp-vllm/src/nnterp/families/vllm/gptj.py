"""GPT-J on vLLM: plain blocks."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.gpt_j import GPTJMLP, GPTJAttention, GPTJBlock

from nnterp.core.architectures import GPTJ as ARCHITECTURE
from nnterp.vllm import PlainLayer, declare, only

RENAME, ENVOYS = declare(
    ARCHITECTURE, PlainLayer, layer=GPTJBlock, attention=GPTJAttention, mlp=GPTJMLP
)


def settings(config: Any) -> dict[str, dict[str, Any]]:
    """No option, but what vLLM leaves out is refused before vLLM ends without words.

    Raises:
        ValueError: the checkpoint's head is tied.
    """
    only(config, tie_word_embeddings=False)
    return {}
