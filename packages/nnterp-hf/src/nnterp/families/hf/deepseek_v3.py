"""DeepSeek-V3 on transformers, whose attention is called as DeepSeek-V2's is."""

from __future__ import annotations

from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3MLP,
    DeepseekV3MoE,
)

from nnterp.core.architectures import DEEPSEEK_V3 as ARCHITECTURE
from nnterp.families.hf.deepseek_v2 import LatentInterior
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=DeepseekV3DecoderLayer,
    attention=DeepseekV3Attention,
    mlp=DeepseekV3MLP,
    mixture=DeepseekV3MoE,
    interior=LatentInterior,
)
