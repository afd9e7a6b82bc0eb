"""DeepSeek-V3 on transformers; its cache holds latents, from which each step makes keys and values.

So keys and values that are written are those of this step's attention alone.
"""

from __future__ import annotations

from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3MLP,
    DeepseekV3MoE,
)

from nnterp.core.architectures import DEEPSEEK_V3 as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=DeepseekV3DecoderLayer,
    attention=DeepseekV3Attention,
    mlp=DeepseekV3MLP,
    mixture=DeepseekV3MoE,
)
