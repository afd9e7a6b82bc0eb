"""GPT-J on transformers; its attention has a call of its own."""

from __future__ import annotations

from typing import ClassVar

from transformers.models.gptj.modeling_gptj import GPTJMLP, GPTJAttention, GPTJBlock

from nnterp.core.architectures import GPTJ as ARCHITECTURE
from nnterp.hf import Attention, Call, declare


class GPTJInterior(Attention):
    """Queries, keys and values enter ``_attn``, which gives the heads first."""

    call: ClassVar[Call] = Call(
        name="self__attn_0",
        first=0,
        heads_first=True,
        function=lambda host: host._module._attn,
        dropout="self_attn_dropout_0",
    )


RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=GPTJBlock, attention=GPTJAttention, mlp=GPTJMLP, interior=GPTJInterior
)
