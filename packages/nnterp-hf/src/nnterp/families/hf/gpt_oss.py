"""GPT-OSS on transformers; its eager attention joins the sinks to the scores."""

from __future__ import annotations

from typing import ClassVar

from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssAttention,
    GptOssDecoderLayer,
    GptOssMLP,
)

from nnterp.core.architectures import GPT_OSS as ARCHITECTURE
from nnterp.core.tracing import Argument, Item
from nnterp.hf import Attention, Call, Router, declare


class GptOssInterior(Attention):
    """The scores are read before a sink is beside them, the pattern after it is gone."""

    call: ClassVar[Call] = Call(softmax="torch_cat_0", scores=Argument(0) | Item(0))


RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=GptOssDecoderLayer,
    attention=GptOssAttention,
    mixture=GptOssMLP,
    routing=Router("router"),
    interior=GptOssInterior,
)
