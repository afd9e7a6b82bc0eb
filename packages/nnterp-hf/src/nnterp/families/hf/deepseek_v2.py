"""DeepSeek-V2 on transformers, whose cache holds latents: each step makes keys and values anew."""

from __future__ import annotations

from typing import ClassVar

from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2DecoderLayer,
    DeepseekV2MLP,
    DeepseekV2Moe,
)

from nnterp.core.architectures import DEEPSEEK_V2 as ARCHITECTURE
from nnterp.hf import Attention, Call, declare


class LatentInterior(Attention):
    """Keys and values that are written stay so in the later steps."""

    call: ClassVar[Call] = Call(expansion="expand_kv")


RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=DeepseekV2DecoderLayer,
    attention=DeepseekV2Attention,
    mlp=DeepseekV2MLP,
    mixture=DeepseekV2Moe,
    interior=LatentInterior,
)
