"""vLLM's calling conventions: how a block carries the stream, how an attention is called.

vLLM runs every prompt of a step as one flat run of tokens, ``[tokens, hidden]``; a block is
served its own request's rows of it. A *fused* block carries the stream as two halves,
``(hidden, residual)``, so that one kernel can add them and take the next norm; a *plain*
block carries the stream whole.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from nnterp.core import _layouts as layouts
from nnterp.core import tracing
from nnterp.core.architectures import Architecture
from nnterp.core.protocols import StandardAttention, StandardLayer, StandardMlp
from nnterp.core.tracing import (
    Argument,
    Batched,
    Derived,
    First,
    Halves,
    Heads,
    InPlace,
    Item,
    Lens,
    Site,
    beside,
    own,
    under,
    value,
)

_DECODE = (
    "on a decode step vLLM's queries are this step's alone while the keys are in its cache, so "
    "there is no pattern to recompute; read it on the prefill"
)
_READ_ONLY = (
    "vLLM computes it inside a kernel, so it is recomputed from the queries and keys; edit the "
    "queries, keys or head outputs instead"
)
_PARALLEL = "the two sublayers of a parallel block read the same stream; there is none between"


class FusedLayer(tracing.Layer, StandardLayer):
    """A block called with, and returning, the stream in two halves."""

    layer_input: layouts.Residual = value(
        Site(own("input"), Halves(Argument("hidden_states"), Argument("residual")) | Batched())
    )
    layer_mid: layouts.Residual = value(
        lambda host: (
            Site(
                beside(lambda h: h.architecture.mlp_norm, "input"),
                Halves(Argument(0), Argument(1)) | Batched(),
            )
            if host.architecture.block == "sequential"
            else _PARALLEL
        )
    )
    layer_output: layouts.Residual = value(
        Site(own("output"), Halves(Item(0), Item(1)) | Batched())
    )


class PlainLayer(tracing.Layer, StandardLayer):
    """A block called with the whole stream and returning it."""

    layer_input: layouts.Residual = value(
        Site(own("input"), Argument("hidden_states") | Batched())
    )
    layer_mid: layouts.Residual = value(
        lambda host: (
            Site(
                beside(lambda h: h.architecture.mlp_norm, "input"),
                Argument(0) | Batched() | InPlace(),
            )
            if host.architecture.block == "sequential"
            else _PARALLEL
        )
    )
    layer_output: layouts.Residual = value(Site(own("output"), First() | Batched()))


def _scores(raw: Any, host: Any) -> Tensor:
    facts, config = host.architecture.attention, host.config
    return tracing.scores(
        _QUERIES.get(raw, host),
        _KEYS.get(raw, host),
        scale=facts.scale(config, host.index),
        softcap=facts.softcap(config),
        window=facts.window(config, host.index),
    )


def _pattern(raw: Any, host: Any) -> Tensor:
    return tracing.pattern(_scores(raw, host))


def _kernel(host: Any) -> Any:
    return host.get("attn")._module


_QUERIES: Lens = Argument(0) | Heads(lambda host: _kernel(host).num_heads)
_KEYS: Lens = Argument(1) | Heads(lambda host: _kernel(host).num_kv_heads)
_VALUES: Lens = Argument(2) | Heads(lambda host: _kernel(host).num_kv_heads)
_OUTPUTS: Lens = Heads(lambda host: _kernel(host).num_heads, inside=True)


class Attention(tracing.Attention, StandardAttention):
    """An attention around vLLM's attention layer, its child ``attn``."""

    attention_output: layouts.Residual = value(
        Site(beside(lambda host: host.architecture.attention_adds, "output"), First() | Batched())
    )
    attention_queries: layouts.Queries = value(Site(under("attn", "input"), _QUERIES))
    attention_keys: layouts.Keys = value(Site(under("attn", "input"), _KEYS))
    attention_values: layouts.Values = value(Site(under("attn", "input"), _VALUES))
    attention_scores: layouts.Pattern = value(
        Site(under("attn", "input"), Derived(_scores, _READ_ONLY), decode=_DECODE)
    )
    attention_probabilities: layouts.Pattern = value(
        Site(under("attn", "input"), Derived(_pattern, _READ_ONLY), decode=_DECODE)
    )
    attention_head_outputs: layouts.HeadOutputs = value(Site(under("attn", "output"), _OUTPUTS))


class Mlp(tracing.Mlp, StandardMlp):
    """A dense feed-forward."""

    mlp_output: layouts.Residual = value(
        Site(beside(lambda host: host.architecture.mlp_adds, "output"), First() | Batched())
    )
    mlp_neurons: layouts.Neurons = value(
        Site(
            lambda host: f"{host.get(host.architecture.down_projection).path}.input",
            Argument(0) | Batched(),
        )
    )


def declare(
    architecture: Architecture,
    convention: type[tracing.Layer],
    *,
    layer: type[Module],
    attention: type[Module],
    mlp: type[Module],
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A plain family: ``RENAME`` and ``ENVOYS`` from an architecture, vLLM's calling
    convention for its blocks, and the three classes."""
    rename: dict[Any, Any] = {
        path: name
        for name in ("embed_tokens", "layers", "norm", "lm_head")
        if (path := getattr(architecture, name)) != name
    }
    for name, module in (("self_attn", attention), ("mlp", mlp)):
        if getattr(architecture, name) != name:
            rename[module] = name
    envoys = {
        module: type(base.__name__, (base,), {"architecture": architecture, "__module__": __name__})
        for module, base in ((layer, convention), (attention, Attention), (mlp, Mlp))
    }
    return rename, envoys
