"""DeepSeek-V2 on transformers; its cache holds latents, from which each step makes keys and values.

So keys and values that are written are those of this step's attention alone.
"""

from __future__ import annotations

from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2DecoderLayer,
    DeepseekV2MLP,
    DeepseekV2Moe,
)

from nnterp.core.architectures import DEEPSEEK_V2 as ARCHITECTURE
from nnterp.hf import declare

RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=DeepseekV2DecoderLayer,
    attention=DeepseekV2Attention,
    mlp=DeepseekV2MLP,
    mixture=DeepseekV2Moe,
)
