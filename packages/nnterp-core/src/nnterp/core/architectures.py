"""Facts about architectures, stated once and read by every engine.

A row says what an architecture computes: which module's output each sublayer adds to the
residual stream, where the stream lies between the sublayers, what scales and caps the
scores and the logits. Names are those of the checkpoint's own modules, which engines keep.
How an engine *calls* a block is the engine's own business and is not here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

Config: TypeAlias = Any
"""A transformers config: sizes and multipliers as attributes."""


def _inverse_root_head_dim(config: Config, layer: int) -> float:
    return float(head_dim(config)) ** -0.5


def _never(config: Config, layer: int) -> int | None:
    return None


def _windows_by_layer_type(config: Config, layer: int) -> int | None:
    return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What turns queries and keys into the pattern.

    Attributes:
        scale: (config, layer) to the factor on queries times keys.
        window: (config, layer) to the number of positions a query sees, itself included,
            or ``None`` where it sees all before it.
        softcap: config to ``c`` of ``c * tanh(scores / c)``, or ``None``.
    """

    scale: Callable[[Config, int], float] = _inverse_root_head_dim
    window: Callable[[Config, int], int | None] = _never
    softcap: Callable[[Config], float | None] = lambda config: None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture's facts.

    Attributes:
        model_type: transformers' name of it.
        embed_tokens, layers, norm, lm_head: paths of the standard modules under the model.
        self_attn, mlp: names of the two sublayers under a block.
        block: whether the MLP reads the stream after the attention's addition or beside it.
        attention_adds, mlp_adds: the module under a block whose output is added to the
            stream: the sublayer itself, or the norm after it.
        mlp_norm: the module that the stream between the two sublayers enters.
        down_projection: the module under the MLP that the neurons enter.
        attention: how scores are made.
        logits: config and raw projection to logits, or ``None`` where they are the same.
        intermediate_size: config to the MLP's width.
        learned_positions: config to the number of learned positions, or ``None`` where
            positions are not a table.
    """

    model_type: str
    embed_tokens: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    self_attn: str = "self_attn"
    mlp: str = "mlp"
    block: Literal["sequential", "parallel"] = "sequential"
    attention_adds: str = "self_attn"
    mlp_adds: str = "mlp"
    mlp_norm: str | None = "post_attention_layernorm"
    down_projection: str = "down_proj"
    attention: Attention = Attention()
    logits: Callable[[Config, Any], Any] | None = None
    intermediate_size: Callable[[Config], int] = lambda config: int(config.intermediate_size)
    learned_positions: Callable[[Config], int] | None = None


def _softcapped(config: Config, projected: Any) -> Any:
    cap = config.final_logit_softcapping
    return projected if cap is None else (projected / cap).tanh() * cap


def _gpt2_scale(config: Config, layer: int) -> float:
    scale = _inverse_root_head_dim(config, layer) if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


LLAMA = Architecture(model_type="llama")

GPT2 = Architecture(
    model_type="gpt2",
    embed_tokens="transformer.wte",
    layers="transformer.h",
    norm="transformer.ln_f",
    self_attn="attn",
    attention_adds="attn",
    mlp_norm="ln_2",
    down_projection="c_proj",
    attention=Attention(scale=_gpt2_scale),
    intermediate_size=lambda config: config.n_inner or 4 * config.hidden_size,
    learned_positions=lambda config: int(config.n_positions),
)

GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    attention_adds="post_attention_layernorm",
    mlp_adds="post_feedforward_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    attention=Attention(
        scale=lambda config, layer: float(config.query_pre_attn_scalar) ** -0.5,
        window=_windows_by_layer_type,
        softcap=lambda config: config.attn_logit_softcapping,
    ),
    logits=_softcapped,
)


def num_kv_heads(config: Config) -> int:
    """Key and value heads; as many as query heads where the config names none."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: Config) -> int:
    """The width of a head; the hidden size shared out where the config names none."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
