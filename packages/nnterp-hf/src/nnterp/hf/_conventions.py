"""How transformers calls blocks and sublayers: one convention, read off the architecture."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.nn import Module

from nnterp.core import _layouts as layouts
from nnterp.core import tracing
from nnterp.core.architectures import Architecture
from nnterp.core.protocols import StandardAttention, StandardLayer, StandardMlp
from nnterp.core.tracing import (
    Argument,
    First,
    InPlace,
    Lens,
    Site,
    beside,
    bound,
    multiplied,
    own,
    reading,
    renames,
    under,
    value,
)

from . import _interior
from ._mixture import Mixture, Router
from ._rows import Flattened

PARALLEL = "the two sublayers of a parallel block read the same stream; there is none between"
IN_PLACE = InPlace()


def _stream_between(host: Any) -> Site | str:
    if host.facts.block == "parallel":
        return PARALLEL
    return Site(beside(lambda h: h.facts.mid_enters, "input"), Argument(0) | _rows(host) | IN_PLACE)


def _rows(host: Any) -> Lens:
    return Flattened() if host.facts.mlp is None else Lens()


class Layer(tracing.Layer, StandardLayer):
    """A decoder block: called with the stream, returns it, alone or first of a tuple."""

    layer_input: layouts.Residual = value(Site(own("input"), Argument("hidden_states")))
    layer_mid: layouts.Residual = value(_stream_between)
    layer_output: layouts.Residual = value(Site(own("output"), First()))


class Attention(tracing.Attention, StandardAttention):
    """An attention that makes one call with its queries, keys and values."""

    call: ClassVar[_interior.Call] = _interior.SHARED

    attention_input: layouts.Residual = value(Site(own("input"), Argument("hidden_states")))
    attention_output: layouts.Residual = value(
        lambda host: Site(
            beside(lambda h: h.facts.attention_adds, "output"), multiplied(host, First())
        )
    )
    attention_queries: layouts.Queries = value(_interior.queries)
    attention_keys: layouts.Keys = value(_interior.keys)
    attention_values: layouts.Values = value(_interior.values)
    attention_scores: layouts.Pattern = value(_interior.scores)
    attention_probabilities: layouts.Pattern = value(_interior.pattern)
    attention_head_outputs: layouts.HeadOutputs = value(_interior.head_outputs)


class Mlp(tracing.Mlp, StandardMlp):
    """A dense feed-forward."""

    mlp_input: layouts.Residual = value(lambda host: Site(reading(host), Argument(0) | _rows(host)))
    mlp_output: layouts.Residual = value(
        lambda host: Site(
            beside(lambda h: h.facts.mlp_adds, "output"), multiplied(host, First() | _rows(host))
        )
    )
    mlp_neurons: layouts.Neurons = value(
        lambda host: Site(
            under(lambda h: h.facts.down_projection, "input"), Argument(0) | _rows(host)
        )
    )


class MlpOnBlock(tracing.OnBlock, Mlp):
    """A feed-forward whose two linears lie on the block."""


def declare(
    architecture: Architecture,
    *,
    layer: type[Module],
    attention: type[Module],
    mlp: type[Module] | None = None,
    mixture: type[Module] | None = None,
    interior: type[Attention] = Attention,
    routing: type[Mixture] | Router = Mixture,
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A plain family: ``RENAME`` and ``ENVOYS`` from an architecture and its classes.

    Args:
        architecture: its facts.
        layer, attention, mlp: transformers' classes; no ``mlp`` where it lies on the block.
        mixture: the class of a sparse block's MLP; the dense ones, if any, are found by path,
            since a mixture's shared expert may have their class.
        interior: how the attention is opened, where it is not the shared call.
        routing: how a mixture is opened, or calls its router, where that is particular.
    """
    bare = mlp is None and mixture is None
    on_block = {"mlp": bound(MlpOnBlock, architecture)} if bare else {}
    envoys: dict[Any, Any] = {
        layer: bound(Layer, architecture, on_block=on_block),
        attention: bound(interior, architecture),
    }
    if mixture is not None:
        if isinstance(routing, Router):
            envoys[mixture] = bound(Mixture, architecture, routing=routing)
        else:
            envoys[mixture] = bound(routing, architecture)
        envoys[f"{architecture.layers}.*.{architecture.mlp}"] = bound(Mlp, architecture)
    elif mlp is not None:
        envoys[mlp] = bound(Mlp, architecture)
    rename = renames(architecture, attention, mixture or mlp)
    if mixture is not None and mlp is not None and architecture.mlp != "mlp":
        rename[architecture.mlp] = "mlp"
    return rename, envoys
