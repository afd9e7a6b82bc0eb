"""DeepSeek-V3 on transformers; its cache holds latents, from which each step makes keys and values.

So keys and values that are written are those of this step's attention alone.
"""

from __future__ import annotations

from typing import ClassVar

from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3MLP,
    DeepseekV3MoE,
)

from nnterp.core.architectures import DEEPSEEK_V3 as ARCHITECTURE
from nnterp.hf import Attention, Call, declare


class LatentInterior(Attention):
    """Keys and values are written for this step's attention: later ones make them anew."""

    call: ClassVar[Call] = Call(cached=False)


RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=DeepseekV3DecoderLayer,
    attention=DeepseekV3Attention,
    mlp=DeepseekV3MLP,
    mixture=DeepseekV3MoE,
    interior=LatentInterior,
)
