"""DeepSeek-V2 on transformers; its cache holds latents, from which each step makes keys and values.

So keys and values that are written are those of this step's attention alone.
"""

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
    """Keys and values are written for this step's attention: later ones make them anew."""

    call: ClassVar[Call] = Call(cached=False)


RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=DeepseekV2DecoderLayer,
    attention=DeepseekV2Attention,
    mlp=DeepseekV2MLP,
    mixture=DeepseekV2Moe,
    interior=LatentInterior,
)
