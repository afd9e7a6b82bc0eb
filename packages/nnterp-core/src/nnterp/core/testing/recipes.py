"""The recipes of the small checkpoints: what each shows, and where transformers computes what.

Data alone: whoever lists them needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from packaging.version import Version

BOS, EOS, PAD = 0, 1, 2
VOCAB_SIZE = 304
MAX_POSITIONS = 256

_TRANSFORMERS = Version(importlib.metadata.version("transformers"))


@dataclass(frozen=True)
class MixtureReference:
    """Where plain transformers computes the values of a mixture of experts.

    A block is sparse that has the experts. Paths start at the block.

    Attributes:
        router: the router, whose first linear map gives the logits.
        experts: the experts, which take tokens, indices and weights by position.
        weights: the position of the weights in what the router gives.
        indices: the position of the indices.
        shared: the expert that every token is given to, or None.
        shared_gate: the projection whose sigmoid scales what ``shared`` gives, or None.
        weighted_input: whether an expert is given its token times the weight, the sigmoid of the
            logit; the router then gives something else than weights and indices.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    weights: int = 1
    indices: int = 2
    shared: str | None = None
    shared_gate: str | None = None
    weighted_input: bool = False


@dataclass(frozen=True)
class Reference:
    """Where plain transformers computes each value of one architecture.

    It is written from transformers' source alone, so that it checks every other table. Paths of
    the model start at the model, the others at the block.

    Attributes:
        blocks: the list of blocks.
        embedding: the embedding table.
        embedding_scale: the table's attribute that holds a factor it applies to its own rows.
        final_norm: the norm after the last block, or None where there is none.
        head: the projection to the vocabulary.
        attention: the attention.
        projection: the attention's output projection, whose input is the heads' outputs.
        attention_added: the module whose output is added to the residual stream.
        mlp_added: likewise for the feed-forward.
        mlp_entered: the module whose input is what the feed-forward reads.
        multiplier: the block's attribute that holds a factor on both contributions.
        middle: where the stream between the two sublayers is: the input or the output of a
            module; None in a parallel block, which has none.
        down: the feed-forward's last projection, whose input is the neurons. A block that has
            a mixture instead has no neurons.
        mixture: what the feed-forward of a sparse block is, or None where every block is dense.
        keys_expanded: whether keys and values are repeated for the groups before the cache.
        normed_output: whether ``layer_output`` is a norm's output, so that the
            contributions do not sum to it.
        latent: whether the cache holds latents, which the attention expands to keys and values.
        sinks: whether each head has a score of no key, which takes its share of the pattern.
    """

    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    embedding_scale: str | None = None
    final_norm: str | None = "model.norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    projection: str = "self_attn.o_proj"
    attention_added: str = "self_attn"
    mlp_added: str = "mlp"
    mlp_entered: str = "mlp"
    multiplier: str | None = None
    middle: tuple[Literal["input", "output"], str] | None = ("input", "post_attention_layernorm")
    down: str = "mlp.down_proj"
    keys_expanded: bool = False
    normed_output: bool = False
    sinks: bool = False
    latent: bool = False
    mixture: MixtureReference | None = None


# Compared by identity: the mappings inside have no hash, and a recipe is a good cache key.
@dataclass(frozen=True, eq=False)
class Recipe:
    """One small checkpoint.

    Attributes:
        name: the recipe's name, unique.
        model_type: transformers' model type.
        config: the configuration's fields.
        architecture: the class name that config.json gets, where transformers' own is not wanted.
        json: fields that config.json gets besides those that transformers writes.
        window: the shortest attention window among the blocks, or None.
        embedding_std: the spread of the embedding's weights. Small where they are the head's too,
            so that a token does not simply predict itself.
        reference: where plain transformers computes each value.
        tags: what the recipe shows.
        note: what else one must know.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    architecture: str | None = None
    json: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    embedding_std: float = 0.4
    reference: Reference = field(default_factory=Reference)
    tags: frozenset[str] = frozenset()
    note: str = ""

    def __repr__(self) -> str:
        return f"Recipe({self.name!r})"


_TOKENS = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
# Llama's spelling; three blocks, four heads on two key heads.
_LLAMA = _TOKENS | {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
# The same where head_dim is the type's own: 32, and not 96 / 4.
_OWN_HEAD_DIM = _LLAMA | {"hidden_size": 96, "head_dim": 32}
# GPT-2's spelling; one key head for each head.
_GPT = _TOKENS | {
    "n_embd": 128,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "n_inner": 160,
}
_SLIDING_FIRST = ["sliding_attention", "full_attention", "sliding_attention"]

_NEOX = _TOKENS | {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
_OPT = _TOKENS | {
    "hidden_size": 128,
    "ffn_dim": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
# The feed-forward keeps its default width, 512: vLLM builds no other.
_FALCON = _TOKENS | {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "new_decoder_architecture": False,
}
_FALCON_SEQUENTIAL = _FALCON | {"multi_query": False, "parallel_attn": False, "num_kv_heads": 4}
_COHERE = _LLAMA | {"logit_scale": 0.5, "tie_word_embeddings": True}

_GPT2_REFERENCE = Reference(
    blocks="transformer.h",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    attention="attn",
    projection="attn.c_proj",
    attention_added="attn",
    middle=("input", "ln_2"),
    down="mlp.c_proj",
)
_NEOX_REFERENCE = Reference(
    blocks="gpt_neox.layers",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    attention="attention",
    projection="attention.dense",
    attention_added="attention",
    down="mlp.dense_4h_to_h",
)
_OPT_REFERENCE = Reference(
    blocks="model.decoder.layers",
    embedding="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
    projection="self_attn.out_proj",
    mlp_added="fc2",
    mlp_entered="fc1",
    middle=("input", "final_layer_norm"),
    down="fc2",
)
_FALCON_REFERENCE = Reference(
    blocks="transformer.h",
    embedding="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    attention="self_attention",
    projection="self_attention.dense",
    attention_added="self_attention",
    down="mlp.dense_4h_to_h",
)


# Four experts, two of them for each token.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


# vLLM's latent attention on the CPU is of one size: 512 and 64.
_LATENT = _LLAMA | {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_LATENT_REFERENCE = Reference(latent=True, mixture=MixtureReference(shared="mlp.shared_experts"))


def _recipes(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


RECIPES: dict[str, Recipe] = _recipes(
    Recipe(
        name="llama",
        model_type="llama",
        config=_OWN_HEAD_DIM
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
        tags=frozenset({"bias", "groups", "head_dim"}),
    ),
    Recipe(
        name="gpt2",
        model_type="gpt2",
        config=_GPT,
        embedding_std=0.2,
        reference=_GPT2_REFERENCE,
        tags=frozenset({"bias", "learned_positions", "tied"}),
    ),
    Recipe(
        name="gemma2",
        model_type="gemma2",
        config=_OWN_HEAD_DIM
        | {
            "tie_word_embeddings": True,
            "layer_types": _SLIDING_FIRST,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        window=8,
        embedding_std=0.15,
        reference=Reference(
            embedding_scale="embed_scale",
            attention_added="post_attention_layernorm",
            mlp_added="post_feedforward_layernorm",
            middle=("input", "pre_feedforward_layernorm"),
        ),
        tags=frozenset({"groups", "head_dim", "sandwich", "softcap", "tied", "window"}),
    ),
    Recipe(
        name="mistral",
        model_type="mistral",
        config=_OWN_HEAD_DIM | {"sliding_window": 8},
        window=8,
        tags=frozenset({"groups", "head_dim", "window"}),
    ),
    Recipe(
        name="qwen2",
        model_type="qwen2",
        config=_LLAMA,
        tags=frozenset({"bias", "groups"}),
    ),
    Recipe(
        name="qwen3",
        model_type="qwen3",
        config=_OWN_HEAD_DIM,
        tags=frozenset({"groups", "head_dim", "qk_norm"}),
    ),
    Recipe(
        name="gptj",
        model_type="gptj",
        config=_GPT | {"rotary_dim": 16, "tie_word_embeddings": False},
        reference=replace(
            _GPT2_REFERENCE, projection="attn.out_proj", middle=None, down="mlp.fc_out"
        ),
        tags=frozenset({"bias", "head_bias", "parallel", "partial_rotary"}),
    ),
    Recipe(
        name="gpt_neox",
        model_type="gpt_neox",
        config=_NEOX,
        reference=replace(_NEOX_REFERENCE, middle=None),
        tags=frozenset({"bias", "parallel", "partial_rotary"}),
    ),
    Recipe(
        name="gpt_neox_seq",
        model_type="gpt_neox",
        config=_NEOX | {"use_parallel_residual": False},
        reference=_NEOX_REFERENCE,
        tags=frozenset({"bias", "partial_rotary"}),
    ),
    Recipe(
        name="opt",
        model_type="opt",
        config=_OPT | {"word_embed_proj_dim": 128},
        embedding_std=0.2,
        reference=_OPT_REFERENCE,
        tags=frozenset({"bias", "learned_positions", "tied"}),
    ),
    Recipe(
        name="opt_postln",
        model_type="opt",
        config=_OPT | {"word_embed_proj_dim": 64, "do_layer_norm_before": False},
        embedding_std=0.2,
        reference=replace(
            _OPT_REFERENCE,
            final_norm=None,
            middle=("output", "self_attn_layer_norm"),
            normed_output=True,
        ),
        tags=frozenset({"bias", "learned_positions", "post_norm", "tied"}),
        note=(
            "No final norm; the contributions sum to what a norm makes layer_output of. Embeddings "
            "are narrower than the stream, with a projection before and after the blocks."
        ),
    ),
    Recipe(
        name="falcon",
        model_type="falcon",
        config=_FALCON | {"multi_query": True, "parallel_attn": True, "num_kv_heads": 1},
        embedding_std=0.2,
        reference=replace(_FALCON_REFERENCE, middle=None),
        tags=frozenset({"groups", "parallel", "tied"}),
    ),
    Recipe(
        name="falcon_new",
        model_type="falcon",
        config=_FALCON
        | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2, "num_kv_heads": 2},
        embedding_std=0.2,
        reference=replace(_FALCON_REFERENCE, middle=None, keys_expanded=True),
        tags=frozenset({"groups", "parallel", "tied"}),
    ),
    Recipe(
        name="falcon_seq",
        model_type="falcon",
        config=_FALCON_SEQUENTIAL,
        embedding_std=0.2,
        reference=_FALCON_REFERENCE,
        tags=frozenset({"tied"}),
    ),
    Recipe(
        name="falcon_seq_bias",
        model_type="falcon",
        config=_FALCON_SEQUENTIAL | {"bias": True},
        embedding_std=0.2,
        reference=_FALCON_REFERENCE,
        tags=frozenset({"bias", "tied"}),
    ),
    Recipe(
        name="falcon_alibi",
        model_type="falcon",
        config=_FALCON_SEQUENTIAL | {"bias": True, "alibi": True},
        embedding_std=0.2,
        reference=_FALCON_REFERENCE,
        tags=frozenset({"alibi", "bias", "tied"}),
        note=(
            "transformers' eager attention adds the ALiBi term twice, its sdpa attention once: the "
            "patch falcon_alibi_once makes the oracle add it once."
        ),
    ),
    Recipe(
        name="bloom",
        model_type="bloom",
        config=_TOKENS
        | {"hidden_size": 128, "n_layer": 3, "n_head": 4, "seq_length": MAX_POSITIONS},
        embedding_std=0.2,
        reference=Reference(
            blocks="transformer.h",
            embedding="transformer.word_embeddings",
            final_norm="transformer.ln_f",
            attention="self_attention",
            projection="self_attention.dense",
            attention_added="self_attention.dense",
            mlp_added="mlp.dense_4h_to_h",
            down="mlp.dense_4h_to_h",
        ),
        tags=frozenset({"alibi", "bias", "embedding_norm", "tied"}),
        note="The residual is added inside both sublayers.",
    ),
    Recipe(
        name="olmo2",
        model_type="olmo2",
        config=_LLAMA,
        reference=Reference(
            attention_added="post_attention_layernorm",
            mlp_added="post_feedforward_layernorm",
            middle=("input", "mlp"),
        ),
        tags=frozenset({"groups", "post_norm", "qk_norm"}),
    ),
    Recipe(
        name="granite",
        model_type="granite",
        config=_LLAMA
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.7,
        },
        reference=Reference(multiplier="residual_multiplier"),
        tags=frozenset({"groups", "multipliers"}),
    ),
    Recipe(
        name="cohere",
        model_type="cohere",
        config=_COHERE | {"use_qk_norm": True},
        embedding_std=0.2,
        reference=Reference(middle=None),
        tags=frozenset({"groups", "logit_scale", "parallel", "qk_norm", "tied"}),
    ),
    Recipe(
        name="cohere2",
        model_type="cohere2",
        config=_COHERE | {"layer_types": _SLIDING_FIRST, "sliding_window": MAX_POSITIONS},
        window=MAX_POSITIONS,
        embedding_std=0.2,
        reference=Reference(middle=None),
        tags=frozenset({"groups", "logit_scale", "no_rotary", "parallel", "tied", "window"}),
        note="The window is longer than every prompt.",
    ),
    Recipe(
        name="cohere2_window",
        model_type="cohere2",
        config=_COHERE | {"layer_types": _SLIDING_FIRST, "sliding_window": 8},
        window=8,
        embedding_std=0.2,
        reference=Reference(middle=None),
        tags=frozenset({"groups", "logit_scale", "no_rotary", "parallel", "tied", "window"}),
    ),
    Recipe(
        name="arcee",
        model_type="arcee",
        config=_OWN_HEAD_DIM | {"attention_bias": True, "mlp_bias": True},
        tags=frozenset({"bias", "groups", "head_dim"}),
    ),
    Recipe(
        name="phi",
        model_type="phi",
        # The feed-forward is as wide as the one that vLLM's own implementation builds.
        config=_LLAMA | {"num_key_value_heads": 4, "intermediate_size": 512},
        reference=Reference(
            final_norm="model.final_layernorm",
            projection="self_attn.dense",
            middle=None,
            down="mlp.fc2",
        ),
        tags=frozenset({"bias", "head_bias", "parallel", "partial_rotary"}),
    ),
    Recipe(
        name="starcoder2",
        model_type="starcoder2",
        config=_LLAMA | {"sliding_window": 8},
        window=8,
        reference=Reference(down="mlp.c_proj"),
        tags=frozenset({"bias", "groups", "window"}),
    ),
    Recipe(
        name="mixtral",
        model_type="mixtral",
        config=_OWN_HEAD_DIM | {"num_local_experts": 4, "num_experts_per_tok": 2},
        reference=Reference(mixture=MixtureReference()),
        tags=frozenset({"groups", "head_dim", "mixture"}),
    ),
    Recipe(
        name="qwen3_moe",
        model_type="qwen3_moe",
        config=_OWN_HEAD_DIM | _EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True},
        reference=Reference(mixture=MixtureReference()),
        tags=frozenset({"dense_block", "groups", "head_dim", "mixture", "qk_norm"}),
    ),
    Recipe(
        name="qwen2_moe",
        model_type="qwen2_moe",
        config=_LLAMA
        | _EXPERTS
        | {"shared_expert_intermediate_size": 96, "mlp_only_layers": [0], "norm_topk_prob": False},
        reference=Reference(
            mixture=MixtureReference(
                shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"
            )
        ),
        tags=frozenset({"bias", "dense_block", "groups", "mixture", "shared_expert"}),
    ),
    Recipe(
        name="olmoe",
        model_type="olmoe",
        config=_LLAMA | _EXPERTS,
        reference=Reference(mixture=MixtureReference()),
        tags=frozenset({"groups", "mixture", "qk_norm"}),
    ),
    Recipe(
        name="granitemoe",
        model_type="granitemoe",
        config=_LLAMA
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.7,
        },
        reference=Reference(
            multiplier="residual_multiplier",
            mlp_added="block_sparse_moe",
            mlp_entered="block_sparse_moe",
            mixture=MixtureReference(
                router="block_sparse_moe.router",
                experts="block_sparse_moe.experts",
                weights=1,
                # Before 5.21 the indices came first, and the logits last.
                indices=0 if Version("5.21") > _TRANSFORMERS else 2,
            ),
        ),
        tags=frozenset({"groups", "mixture", "multipliers"}),
    ),
    Recipe(
        name="phimoe",
        model_type="phimoe",
        config=_LLAMA
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
        # vLLM spells it so, and always has the attention's biases.
        architecture="PhiMoEForCausalLM",
        reference=Reference(mixture=MixtureReference(router="mlp.router")),
        tags=frozenset({"bias", "groups", "mixture"}),
    ),
    Recipe(
        name="gpt_oss",
        model_type="gpt_oss",
        config=_OWN_HEAD_DIM
        | {
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            # vLLM takes the even blocks for the sliding ones, whatever stands here.
            "layer_types": _SLIDING_FIRST,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
        window=8,
        reference=Reference(sinks=True, mixture=MixtureReference(router="mlp.router")),
        tags=frozenset({"bias", "groups", "head_dim", "mixture", "sink", "window"}),
    ),
    Recipe(
        name="deepseek_v2",
        model_type="deepseek_v2",
        config=_LATENT
        | {
            "n_routed_experts": 4,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
        reference=_LATENT_REFERENCE,
        tags=frozenset({"dense_block", "latent", "mixture", "shared_expert"}),
    ),
    Recipe(
        name="deepseek_v3",
        model_type="deepseek_v3",
        config=_LATENT
        | {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "routed_scaling_factor": 1.5,
        },
        # The released checkpoints have them, vLLM reads them, and transformers knows neither.
        json={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        reference=_LATENT_REFERENCE,
        tags=frozenset({"dense_block", "latent", "mixture", "shared_expert"}),
    ),
    Recipe(
        name="llama4_text",
        model_type="llama4_text",
        # vLLM's chunks are a multiple of its cache's blocks, of 128 tokens.
        config=_OWN_HEAD_DIM
        | {
            "intermediate_size": 64,
            "intermediate_size_mlp": 160,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 0],
            "attention_chunk_size": 128,
        },
        reference=Reference(
            mlp_added="feed_forward",
            mlp_entered="feed_forward",
            down="feed_forward.down_proj",
            mixture=MixtureReference(
                router="feed_forward.router",
                experts="feed_forward.experts",
                shared="feed_forward.shared_expert",
                weighted_input=True,
            ),
        ),
        tags=frozenset({"chunk", "dense_block", "groups", "mixture", "qk_norm", "shared_expert"}),
        note="The chunk is longer than most prompts.",
    ),
)
