"""Facts about architectures, stated once and read by every engine.

A row says what an architecture computes: which module's output each sublayer adds to the
residual stream, where the stream lies between the sublayers, what scales and caps the
scores and the logits. Names are those of the checkpoint's own modules, which engines keep.
How an engine *calls* a block is the engine's own business and is not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from ._errors import UnsupportedFamily

Config: TypeAlias = Any
"""A transformers config: sizes and multipliers as attributes."""


def num_kv_heads(config: Config) -> int:
    """Key and value heads; as many as query heads where the config names none."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: Config) -> int:
    """The width of a head; the hidden size shared out where the config names none."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _inverse_root_head_dim(config: Config, layer: int) -> float:
    return 1.0 / math.sqrt(head_dim(config))


def _no_window(config: Config, layer: int) -> int | None:
    return None


def _window(config: Config, layer: int) -> int | None:
    """The config's window, on the sliding layers where it tells them apart."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _chunk(config: Config, layer: int) -> int | None:
    """The config's chunk, on the chunked layers."""
    chunked = config.layer_types[layer] == "chunked_attention"
    return config.attention_chunk_size if chunked else None


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What turns queries and keys into the pattern.

    Attributes:
        scale: (config, layer) to the factor on queries times keys.
        scaled_queries: whether the queries enter the attention with that factor on them.
        window: (config, layer) to the number of positions a query sees, itself included,
            or ``None`` where it sees all before it.
        chunk: (config, layer) to the number of positions of the chunks of which a query sees
            its own alone, or ``None``.
        softcap: config to ``c`` of ``c * tanh(scores / c)``, or ``None``.
        slopes: config to each head's slope of ALiBi, which times the key's position is
            added to the scores, or ``None``.
        sinks: the attention's parameter with a score for each head that enters the softmax
            beside the keys' and has no value, or ``None``.
    """

    scale: Callable[[Config, int], float] = _inverse_root_head_dim
    scaled_queries: bool = False
    window: Callable[[Config, int], int | None] = _no_window
    chunk: Callable[[Config, int], int | None] = _no_window
    softcap: Callable[[Config], float | None] = lambda config: None
    slopes: Callable[[Config], list[float] | None] = lambda config: None
    sinks: str | None = None


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture of experts, where a block has one for its MLP.

    Attributes:
        top_k: config to the number of experts that a token is given to.
        intermediate_size: config to the width of one expert.
        shared: the module under the MLP that every token is given to beside them, or ``None``.
        shared_gate: the module under the MLP whose output's sigmoid scales what ``shared``
            gives, or ``None``.
        weighted_input: whether the weights scale what enters the experts, so that an expert
            has no unweighted output.
    """

    top_k: Callable[[Config], int] = lambda config: int(config.num_experts_per_tok)
    intermediate_size: Callable[[Config], int] = lambda config: int(config.moe_intermediate_size)
    shared: str | None = None
    shared_gate: str | None = None
    weighted_input: bool = False


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture's facts.

    Attributes:
        model_type: transformers' name of it.
        embed_tokens, layers, norm, lm_head: paths of the standard modules under the model;
            ``norm`` is ``None`` where the stream goes to the head as it is.
        before_head: modules between the norm and the head.
        self_attn: name of the attention under a block.
        mlp: name of the MLP under a block, or ``None`` where its linears lie on the block.
        block: whether the MLP reads the stream after the attention's addition or beside it.
        attention_adds, mlp_adds: the module under a block whose output is added to the
            stream: the sublayer itself, its output projection, or the norm after it.
        residual_multiplier: config to the factor on both, or ``None``.
        mlp_reads: the module under a block that what the MLP reads enters, or ``None`` where
            it enters the MLP itself.
        mid_enters: the module that the stream between the two sublayers enters first.
        stream_norms: norms that the stream itself passes after the attention's and after the
            MLP's addition, or ``None``.
        down_projection: the module under the MLP that the neurons enter.
        attention: how scores are made.
        mixture: what the MLP of a sparse block is, or ``None`` where every block is dense.
        logits: config and raw projection to logits, or ``None`` where they are the same.
        intermediate_size: config to the MLP's width.
        num_kv_heads: config to the number of key and value heads.
        head_dim, qk_head_dim: config to the width of a value head, and of a query or key head.
        learned_positions: config to the number of learned positions, or ``None`` where
            positions are not a table.
        variant: config to the facts that it changes.
    """

    model_type: str
    embed_tokens: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str | None = "model.norm"
    before_head: tuple[str, ...] = ()
    lm_head: str = "lm_head"
    self_attn: str = "self_attn"
    mlp: str | None = "mlp"
    block: Literal["sequential", "parallel"] = "sequential"
    attention_adds: str = "self_attn"
    mlp_adds: str = "mlp"
    mlp_reads: str | None = None
    residual_multiplier: Callable[[Config], float] | None = None
    mid_enters: str = "post_attention_layernorm"
    stream_norms: tuple[str, str] | None = None
    down_projection: str = "down_proj"
    attention: Attention = Attention()
    mixture: Mixture | None = None
    logits: Callable[[Config, Any], Any] | None = None
    intermediate_size: Callable[[Config], int] = lambda config: int(config.intermediate_size)
    num_kv_heads: Callable[[Config], int] = num_kv_heads
    head_dim: Callable[[Config], int] = head_dim
    qk_head_dim: Callable[[Config], int] = head_dim
    learned_positions: Callable[[Config], int] | None = None
    variant: Callable[[Config], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.block not in ("sequential", "parallel"):
            raise ValueError(f"block is 'sequential' or 'parallel', not {self.block!r}")

    def of(self, config: Config) -> Architecture:
        """The facts for one config."""
        return self if self.variant is None else replace(self, **self.variant(config))


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head (Press et al., 2022): powers of ``2 ** (-8 / heads)``.

    Where ``heads`` is no power of two, the slopes of the power below it, then every other one
    of the power above it.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return slopes + extra


def _softcapped(config: Config, projected: Any) -> Any:
    cap = config.final_logit_softcapping
    return projected if cap is None else (projected / cap).tanh() * cap


def _inner(config: Config) -> int:
    return int(getattr(config, "n_inner", None) or 4 * config.hidden_size)


def _gpt2_scale(config: Config, layer: int) -> float:
    scale = _inverse_root_head_dim(config, layer) if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


LLAMA = Architecture(model_type="llama")

MISTRAL = replace(LLAMA, model_type="mistral", attention=Attention(window=_window))

QWEN2 = replace(MISTRAL, model_type="qwen2")

QWEN3 = replace(MISTRAL, model_type="qwen3")

ARCEE = replace(LLAMA, model_type="arcee")

STARCODER2 = replace(MISTRAL, model_type="starcoder2", down_projection="c_proj")

PHI = replace(
    LLAMA,
    model_type="phi",
    norm="model.final_layernorm",
    block="parallel",
    down_projection="fc2",
)

OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    attention_adds="post_attention_layernorm",
    mlp_adds="post_feedforward_layernorm",
    mid_enters="mlp",
)

GRANITE = replace(
    LLAMA,
    model_type="granite",
    residual_multiplier=lambda config: float(config.residual_multiplier),
    attention=Attention(scale=lambda config, layer: float(config.attention_multiplier)),
    logits=lambda config, projected: projected / config.logits_scaling,
)

COHERE = replace(
    LLAMA,
    model_type="cohere",
    block="parallel",
    logits=lambda config, projected: projected * config.logit_scale,
)

COHERE2 = replace(COHERE, model_type="cohere2", attention=Attention(window=_window))

GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    attention_adds="post_attention_layernorm",
    mlp_adds="post_feedforward_layernorm",
    mid_enters="pre_feedforward_layernorm",
    attention=Attention(
        scale=lambda config, layer: 1.0 / math.sqrt(config.query_pre_attn_scalar),
        window=_window,
        softcap=lambda config: config.attn_logit_softcapping,
    ),
    logits=_softcapped,
)

GPT2 = Architecture(
    model_type="gpt2",
    embed_tokens="transformer.wte",
    layers="transformer.h",
    norm="transformer.ln_f",
    self_attn="attn",
    attention_adds="attn",
    mid_enters="ln_2",
    down_projection="c_proj",
    attention=Attention(scale=_gpt2_scale),
    intermediate_size=_inner,
    learned_positions=lambda config: int(config.n_positions),
)

GPTJ = replace(
    GPT2,
    model_type="gptj",
    block="parallel",
    down_projection="fc_out",
    attention=Attention(),
    learned_positions=None,
)

GPT_NEOX = Architecture(
    model_type="gpt_neox",
    embed_tokens="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    norm="gpt_neox.final_layer_norm",
    self_attn="attention",
    attention_adds="attention",
    down_projection="dense_4h_to_h",
    variant=lambda config: {"block": "parallel"} if config.use_parallel_residual else {},
)


def _opt_variant(config: Config) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if not config.do_layer_norm_before:
        facts |= {
            "mid_enters": "fc1",
            "stream_norms": ("self_attn_layer_norm", "final_layer_norm"),
        }
    if not config.do_layer_norm_before or config._remove_final_layer_norm:
        facts["norm"] = None
    if config.word_embed_proj_dim != config.hidden_size:
        facts["before_head"] = ("model.decoder.project_out",)
    return facts


OPT = Architecture(
    model_type="opt",
    embed_tokens="model.decoder.embed_tokens",
    layers="model.decoder.layers",
    norm="model.decoder.final_layer_norm",
    mlp=None,
    mlp_adds="fc2",
    mlp_reads="fc1",
    mid_enters="final_layer_norm",
    down_projection="fc2",
    attention=Attention(scaled_queries=True),
    intermediate_size=lambda config: int(config.ffn_dim),
    learned_positions=lambda config: int(config.max_position_embeddings),
    variant=_opt_variant,
)


def _bloom_variant(config: Config) -> dict[str, Any]:
    if config.apply_residual_connection_post_layernorm:
        raise UnsupportedFamily(
            "with apply_residual_connection_post_layernorm the block adds to the normed stream, "
            "which no standard value describes"
        )
    return {}


BLOOM = Architecture(
    model_type="bloom",
    embed_tokens="transformer.word_embeddings",
    layers="transformer.h",
    norm="transformer.ln_f",
    self_attn="self_attention",
    attention_adds="self_attention.dense",
    mlp_adds="mlp.dense_4h_to_h",
    down_projection="dense_4h_to_h",
    attention=Attention(slopes=lambda config: alibi_slopes(config.num_attention_heads)),
    intermediate_size=lambda config: 4 * int(config.hidden_size),
    variant=_bloom_variant,
)


def _falcon_kv_heads(config: Config) -> int:
    if config.new_decoder_architecture or not config.multi_query:
        return int(config.num_kv_heads)
    return 1


def _falcon_slopes(config: Config) -> list[float] | None:
    if not config.alibi:
        return None
    # The slopes are added before the scores are scaled, so they are scaled with them.
    scale = _inverse_root_head_dim(config, 0)
    return [slope * scale for slope in alibi_slopes(config.num_attention_heads)]


FALCON = replace(
    BLOOM,
    model_type="falcon",
    attention_adds="self_attention",
    mlp_adds="mlp",
    attention=Attention(slopes=_falcon_slopes),
    intermediate_size=lambda config: int(config.ffn_hidden_size),
    num_kv_heads=_falcon_kv_heads,
    variant=lambda config: (
        {"block": "parallel"} if config.new_decoder_architecture or config.parallel_attn else {}
    ),
)

_EXPERT_MLP = Mixture(intermediate_size=lambda config: int(config.intermediate_size))

MIXTRAL = replace(MISTRAL, model_type="mixtral", mixture=_EXPERT_MLP)

QWEN3_MOE = replace(QWEN3, model_type="qwen3_moe", mixture=Mixture())

QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    mixture=Mixture(shared="shared_expert", shared_gate="shared_expert_gate"),
)

OLMOE = replace(LLAMA, model_type="olmoe", mixture=_EXPERT_MLP)

GRANITEMOE = replace(GRANITE, model_type="granitemoe", mlp="block_sparse_moe", mixture=_EXPERT_MLP)

PHIMOE = replace(MISTRAL, model_type="phimoe", mixture=_EXPERT_MLP)

GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    attention=Attention(window=_window, sinks="sinks"),
    mixture=_EXPERT_MLP,
)


def _latent_scale(config: Config, layer: int) -> float:
    rope = config.rope_parameters
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    if rope.get("rope_type", "default") == "default" or not rope.get("mscale_all_dim", 0):
        return scale
    factor = float(rope["factor"])
    stretch = 1.0 if factor <= 1 else 0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0
    return scale * stretch * stretch


DEEPSEEK_V2 = replace(
    LLAMA,
    model_type="deepseek_v2",
    attention=Attention(scale=_latent_scale),
    mixture=Mixture(shared="shared_experts"),
    num_kv_heads=lambda config: int(config.num_attention_heads),
    head_dim=lambda config: int(config.v_head_dim),
    qk_head_dim=lambda config: int(config.qk_nope_head_dim + config.qk_rope_head_dim),
)

DEEPSEEK_V3 = replace(DEEPSEEK_V2, model_type="deepseek_v3")

LLAMA4_TEXT = replace(
    LLAMA,
    model_type="llama4_text",
    mlp="feed_forward",
    attention=Attention(chunk=_chunk),
    mixture=Mixture(
        intermediate_size=lambda config: int(config.intermediate_size),
        shared="shared_expert",
        weighted_input=True,
    ),
    intermediate_size=lambda config: int(config.intermediate_size_mlp),
)
