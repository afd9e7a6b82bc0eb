"""How transformers calls blocks and sublayers: one convention, read off the architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from nnterp.core import _layouts as layouts
from nnterp.core import tracing
from nnterp.core.architectures import Architecture
from nnterp.core.protocols import StandardAttention, StandardLayer, StandardMlp
from nnterp.core.tracing import Argument, First, InPlace, Lens, Scaled, Site, beside, own, value

from . import _interior


def _stream_between(host: Any) -> Site | str:
    norm = host.architecture.mlp_norm
    if host.architecture.block == "parallel" or norm is None:
        return "the two sublayers of a parallel block read the same stream; there is none between"
    return Site(beside(lambda h: norm, "input"), Argument(0) | InPlace())


class Layer(tracing.Layer, StandardLayer):
    """A decoder block: called with the stream, returns it, alone or first of a tuple."""

    layer_input: layouts.Residual = value(Site(own("input"), Argument("hidden_states")))
    layer_mid: layouts.Residual = value(_stream_between)
    layer_output: layouts.Residual = value(Site(own("output"), First()))


class Attention(tracing.Attention, StandardAttention):
    """An attention on transformers' shared attention call."""

    attention_output: layouts.Residual = value(
        Site(beside(lambda host: host.architecture.attention_adds, "output"), First())
    )
    attention_queries: layouts.Queries = value(_interior.queries)
    attention_keys: layouts.Keys = value(_interior.keys)
    attention_values: layouts.Values = value(_interior.values)
    attention_scores: layouts.Pattern = value(_interior.scores)
    attention_probabilities: layouts.Pattern = value(_interior.pattern)
    attention_head_outputs: layouts.HeadOutputs = value(_interior.head_outputs)


class Mlp(tracing.Mlp, StandardMlp):
    """A dense feed-forward."""

    mlp_output: layouts.Residual = value(
        Site(beside(lambda host: host.architecture.mlp_adds, "output"), First())
    )
    mlp_neurons: layouts.Neurons = value(
        Site(lambda host: f"{host.get(host.architecture.down_projection).path}.input", Argument(0))
    )


def embedding_rows(factor: Callable[[Any], Any] | None) -> Lens:
    """The embedding module's output as the table's rows; ``factor`` takes its scale off."""
    return Lens() if factor is None else Scaled(factor)


def declare(
    architecture: Architecture,
    *,
    layer: type[Module],
    attention: type[Module],
    mlp: type[Module],
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A plain family: ``RENAME`` and ``ENVOYS`` from an architecture and its three classes."""
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
        for module, base in ((layer, Layer), (attention, Attention), (mlp, Mlp))
    }
    return rename, envoys
