"""The standard vocabulary: every value, stated once.

Descriptors, ``support()``, reprs, protocols, the docs' tables and the ids of the
conformance tests are made from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from . import _layouts as layouts
from ._layouts import Layout


@dataclass(frozen=True, slots=True)
class Term:
    """One value of the vocabulary.

    Attributes:
        name: the attribute it is read and written by.
        hosts: the modules it is on; ``("model",)`` or ``("layer",)``, or names under a layer.
        layout: its named axes.
        meaning: what it is, in one sentence.
        writable: whether assigning it, or editing it in place, reaches the model. An
            engine may serve a writable term read-only, and says so.
        computed: whether it is derived from another value and exists nowhere in the model.
        gradients: whether it is part of the autograd graph on transformers.
    """

    name: str
    hosts: tuple[str, ...]
    layout: Layout
    meaning: str
    writable: bool = True
    computed: bool = False
    gradients: bool = True

    def keys(self) -> tuple[str, ...]:
        """The term's keys in ``support()``, relative to its model or its layer."""
        return tuple(
            self.name if host in ("model", "layer") else f"{host}.{self.name}"
            for host in self.hosts
        )


MODULES: Mapping[str, str] = MappingProxyType(
    {
        "embed_tokens": "model",
        "layers": "model",
        "norm": "model",
        "lm_head": "model",
        "self_attn": "layer",
        "mlp": "layer",
        "linear_attn": "layer",
    }
)
"""The standard module names, and where each one is."""

_MODEL = ("model",)
_LAYER = ("layer",)
_ATTENTION = ("self_attn",)
_MIXER = ("self_attn", "linear_attn")
_MLP = ("mlp",)

_TERMS = (
    Term(
        "input_ids",
        _MODEL,
        layouts.TOKENS,
        "token ids the model was called with",
        gradients=False,
    ),
    Term(
        "attention_mask",
        _MODEL,
        layouts.TOKENS,
        "zeros are padding, ones are the prompt's own tokens",
        gradients=False,
    ),
    Term(
        "input_size",
        _MODEL,
        layouts.SIZES,
        "the number of rows and of tokens of this step",
        writable=False,
        computed=True,
        gradients=False,
    ),
    Term(
        "token_embeddings",
        _MODEL,
        layouts.RESIDUAL,
        "the embedding table's rows, before any scale, norm or position",
    ),
    Term(
        "final_norm_output",
        _MODEL,
        layouts.RESIDUAL,
        "the final norm's output, every position of the step",
    ),
    Term(
        "lm_head_output",
        _MODEL,
        layouts.LOGITS,
        "the raw projection on the vocabulary, before any softcap or scale",
    ),
    Term(
        "logits",
        _MODEL,
        layouts.LOGITS,
        "what the model returns, softcap and scale applied",
    ),
    Term(
        "next_token_probs",
        _MODEL,
        layouts.PROBABILITIES,
        "softmax of logits[:, -1]",
        writable=False,
        computed=True,
    ),
    Term("layer_input", _LAYER, layouts.RESIDUAL, "the residual stream entering the block"),
    Term(
        "layer_mid",
        _LAYER,
        layouts.RESIDUAL,
        "the residual stream between the two sublayers of a sequential block",
    ),
    Term("layer_output", _LAYER, layouts.RESIDUAL, "the residual stream leaving the block"),
    Term(
        "attention_input",
        _MIXER,
        layouts.RESIDUAL,
        "what the attention reads: the residual stream, after the norm before it if it has one",
    ),
    Term(
        "attention_output",
        _MIXER,
        layouts.RESIDUAL,
        "what the attention adds to the residual stream",
    ),
    Term(
        "attention_queries",
        _ATTENTION,
        layouts.QUERIES,
        "queries as they enter the attention, rotary applied, this step's tokens",
    ),
    Term(
        "attention_keys",
        _ATTENTION,
        layouts.KEYS,
        "keys as they enter the attention, rotary applied, not repeated for the groups, "
        "this step's tokens",
    ),
    Term(
        "attention_values",
        _ATTENTION,
        layouts.VALUES,
        "values as they enter the attention, not repeated for the groups, this step's tokens",
    ),
    Term(
        "attention_scores",
        _ATTENTION,
        layouts.PATTERN,
        "scaled, capped and masked scores: what enters the softmax; masked entries are -inf",
    ),
    Term(
        "attention_probabilities",
        _ATTENTION,
        layouts.PATTERN,
        "the attention pattern; rows sum to 1, to less where there is a sink",
    ),
    Term(
        "attention_head_outputs",
        _ATTENTION,
        layouts.HEAD_OUTPUTS,
        "pattern times values for each head, before the output projection",
    ),
    Term(
        "mlp_input",
        _MLP,
        layouts.RESIDUAL,
        "what the MLP reads: the residual stream, after the norm before it if it has one",
    ),
    Term("mlp_output", _MLP, layouts.RESIDUAL, "what the MLP adds to the residual stream"),
    Term("mlp_neurons", _MLP, layouts.NEURONS, "what enters the MLP's down projection"),
    Term("router_logits", _MLP, layouts.ROUTER, "the router's logits, before scoring"),
    Term("expert_weights", _MLP, layouts.EXPERT_WEIGHTS, "the weights of the experts used"),
    Term(
        "expert_indices",
        _MLP,
        layouts.EXPERT_INDICES,
        "the indices of the experts used",
        gradients=False,
    ),
    Term(
        "expert_outputs",
        _MLP,
        layouts.EXPERT_OUTPUTS,
        "the outputs of the experts used, unweighted",
    ),
    Term("routed_output", _MLP, layouts.RESIDUAL, "the routed experts' part of mlp_output"),
    Term(
        "shared_expert_output",
        _MLP,
        layouts.RESIDUAL,
        "the shared experts' part of mlp_output",
    ),
)

VOCABULARY: Mapping[str, Term] = MappingProxyType({term.name: term for term in _TERMS})
"""Every standard value by name."""

MIXTURE: frozenset[str] = frozenset(
    {
        "router_logits",
        "expert_weights",
        "expert_indices",
        "expert_outputs",
        "routed_output",
        "shared_expert_output",
    }
)
"""The values that only a mixture of experts has."""

SIZES: tuple[str, ...] = (
    "num_layers",
    "hidden_size",
    "vocab_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "qk_head_dim",
    "intermediate_size",
)
"""The sizes readable outside a trace."""


def terms(host: str) -> tuple[Term, ...]:
    """The values on ``host``: ``"model"``, ``"layer"``, ``"self_attn"``, ``"mlp"``, …"""
    return tuple(term for term in _TERMS if host in term.hosts)
