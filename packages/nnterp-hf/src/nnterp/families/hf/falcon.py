"""Falcon on transformers; its attention has two branches of its own, with ALiBi and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.models.falcon.modeling_falcon import (
    FalconAttention,
    FalconDecoderLayer,
    FalconMLP,
)

from nnterp.core import tracing
from nnterp.core.architectures import FALCON as ARCHITECTURE
from nnterp.core.tracing import Argument, Derived, Item, Lens, Site, value
from nnterp.hf import (
    Attention,
    Masked,
    declare,
    head_inputs,
    instead_of,
    operation,
    recomputed_scores,
)


class Ungrouped(Lens):
    """Keys or values that the forward repeats for the groups, one for each group."""

    def get(self, raw: Tensor, host: Any) -> Tensor:
        return raw[:, :: raw.shape[1] // host.num_kv_heads]

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        return new.repeat_interleave(raw.shape[1] // new.shape[1], dim=1)


def _branch(rotary: str, alibi: str, lens: Lens, alibi_lens: Lens) -> Callable[[Any], Site | str]:
    def resolve(host: Any) -> Site | str:
        found = operation(alibi, alibi_lens) if host.config.alibi else operation(rotary, lens)
        return found(host)

    return resolve


def _inside(
    rotary: str, alibi: str, lens: Lens, recompute: Callable[[Any, Any], Tensor]
) -> Callable[[Any], Site | str]:
    """Scores or pattern: an operation under ``eager``, recomputed under ``sdpa``."""

    def resolve(host: Any) -> Site | str:
        implementation = host.root.attn_implementation
        if implementation == "eager":
            return operation(alibi if host.config.alibi else rotary, lens)(host)
        if (ahead := tracing.reads_ahead(host.config)) is not None:
            return ahead
        call = f"torch_nn_functional_scaled_dot_product_attention_{int(host.config.alibi)}.input"
        return operation(call, Derived(recompute, instead_of(implementation)))(host)

    return resolve


def _scores(raw: Any, host: Any) -> Tensor:
    return recomputed_scores(raw[0][0], raw[0][1], host)


def _pattern(raw: Any, host: Any) -> Tensor:
    return tracing.pattern(_scores(raw, host)).nan_to_num(0.0)


class FalconInterior(Attention):
    """Its values are read where they enter the cache, after the queries and keys are rotated."""

    attention_queries = value(
        _branch("apply_rotary_pos_emb_0.output", "query_layer_0.output", Item(0), Lens())
    )
    attention_keys = value(
        _branch(
            "apply_rotary_pos_emb_0.output",
            "key_layer_0.output",
            Item(1) | Ungrouped(),
            Ungrouped(),
        )
    )
    attention_values = value(
        _branch(
            "layer_past_update_0.input",
            "value_layer_0.output",
            Argument(1) | Ungrouped(),
            Ungrouped(),
        )
    )
    attention_scores = value(
        _inside("F_softmax_0.input", "F_softmax_1.input", Argument(0) | Masked(), _scores)
    )
    attention_probabilities = value(
        _inside("F_softmax_0.output", "self_attention_dropout_0.output", Lens(), _pattern)
    )
    attention_head_outputs = value(head_inputs("dense"))


RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=FalconDecoderLayer,
    attention=FalconAttention,
    mlp=FalconMLP,
    interior=FalconInterior,
)
