"""Settings of a config that vLLM leaves out, so that it would compute another model."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nnterp.core.testing import RECIPES, build
from nnterp.vllm import StandardizedVLLM


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("cohere", "attention_bias", True),
        ("cohere", "hidden_act", "gelu"),
        ("cohere", "tie_word_embeddings", False),
        ("cohere2", "attention_bias", True),
        ("cohere2", "hidden_act", "gelu"),
        ("cohere2", "tie_word_embeddings", False),
        ("deepseek_v2", "attention_bias", True),
        ("deepseek_v2", "mlp_bias", True),
        ("deepseek_v2", "tie_word_embeddings", True),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "rope_interleave", False),
        ("deepseek_v3", "tie_word_embeddings", True),
        ("falcon", "activation", "relu"),
        ("gpt2", "reorder_and_upcast_attn", True),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "scale_attn_weights", False),
        ("gpt_oss", "attention_bias", False),
        ("gpt_oss", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("gpt_oss", "rms_norm_eps", 1e-6),
        ("gpt_oss", "swiglu_alpha", 1.0),
        ("gpt_oss", "swiglu_limit", 5.0),
        ("gpt_oss", "tie_word_embeddings", True),
        ("gptj", "tie_word_embeddings", True),
        ("granitemoe", "attention_bias", True),
        ("granitemoe", "hidden_act", "gelu"),
        ("llama4_text", "hidden_act", "gelu"),
        ("llama4_text", "layer_types", ["full_attention", "chunked_attention", "full_attention"]),
        ("mixtral", "hidden_act", "gelu"),
        ("olmoe", "attention_bias", True),
        ("olmoe", "clip_qkv", 1.0),
        ("olmoe", "hidden_act", "gelu"),
        ("olmoe", "norm_topk_prob", True),
        ("olmoe", "rms_norm_eps", 1e-6),
        ("olmoe", "tie_word_embeddings", True),
        ("phimoe", "attention_bias", False),
        ("phimoe", "hidden_act", "gelu"),
        ("phimoe", "router_jitter_noise", 0.2),
        ("phimoe", "tie_word_embeddings", True),
        ("qwen2_moe", "qkv_bias", False),
        ("qwen3", "attention_bias", True),
        ("qwen3_moe", "attention_bias", True),
    ],
)
def test_settings_that_vllm_leaves_out(name, setting, value):
    """A checkpoint that vLLM computes as if it were another one is refused, with the setting."""
    _refused(name, setting, {setting: value})


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe", "qwen3"])
def test_windows_in_some_blocks(name):
    """So is one with windows in some blocks, where vLLM's own word against it is passed by."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    _refused(name, "layer_types", {"layer_types": types, **windows})


def test_groups_of_a_greedy_choice():
    """So is one whose experts are chosen one by one, where vLLM chooses their groups first."""
    groups = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1}
    _refused("deepseek_v2", "topk_method", {"topk_method": "greedy", **groups})


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("deepseek_v2", "attention_factor", 0.8),
        ("deepseek_v2", "rope_type", "dynamic"),
        ("deepseek_v2", "truncate", False),
        ("deepseek_v3", "attention_factor", 1.0),
        ("deepseek_v3", "rope_type", "dynamic"),
        ("deepseek_v3", "truncate", False),
        ("gpt_oss", "attention_factor", 0.8),
        ("gpt_oss", "mscale", 0.7),
        ("gpt_oss", "rope_type", "dynamic"),
    ],
)
def test_rotary_that_vllm_leaves_out(name, setting, value):
    """So is one whose rotary settings vLLM overwrites or passes by."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0}
    yarn |= {"beta_slow": 1.0, "original_max_position_embeddings": 64}
    rotary = {"rope_parameters": {**yarn, setting: value}}
    _refused(name, setting, {setting: value}, rotary)


def _refused(name, setting, config, written=None):
    recipe = RECIPES[name]
    changed = replace(
        recipe, name=f"{name}_{setting}", config={**recipe.config, **(written or config)}
    )
    named = re.escape(f"{setting}={config[setting]!r}")
    with pytest.raises(ValueError, match=rf"{named}.*engine='hf'"):
        StandardizedVLLM(str(build(changed)), dtype="float32", dispatch=True)
