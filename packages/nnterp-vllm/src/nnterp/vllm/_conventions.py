"""vLLM's calling conventions: how a block carries the stream, how an attention is called.

vLLM runs every prompt of a step as one flat run of tokens, ``[tokens, hidden]``; a block is
served its own request's rows of it. A *fused* block carries the stream as two halves,
``(hidden, residual)``, so that one kernel can add them and take the next norm; a *plain*
block carries the stream whole.
"""

from __future__ import annotations

from collections.abc import Callable
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
    Scaled,
    Site,
    Summed,
    beside,
    bound,
    multiplied,
    own,
    renames,
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
_SHARDED = (
    "under tensor parallelism each rank's attention has some of the heads only; read it with "
    "tensor_parallel_size=1"
)
_PARALLEL = "the two sublayers of a parallel block read the same stream; there is none between"


def _between(inner: Lens) -> Callable[[Any], Site | str]:
    """Where the stream between the sublayers is, seen through ``inner``."""

    def site(host: Any) -> Site | str:
        if host.facts.block == "parallel":
            return _PARALLEL
        return Site(beside(lambda h: h.facts.mid_enters, "input"), inner)

    return site


class FusedLayer(tracing.Layer, StandardLayer):
    """A block called with, and returning, the stream in two halves."""

    layer_input: layouts.Residual = value(
        Site(own("input"), Halves(Argument("hidden_states"), Argument("residual")) | Batched())
    )
    layer_mid: layouts.Residual = value(_between(Halves(Argument(0), Argument(1)) | Batched()))
    layer_output: layouts.Residual = value(
        Site(own("output"), Halves(Item(0), Item(1)) | Batched())
    )


class PlainLayer(tracing.Layer, StandardLayer):
    """A block called with the whole stream and returning it, alone or first of a pair."""

    layer_input: layouts.Residual = value(Site(own("input"), Argument("hidden_states") | Batched()))
    layer_mid: layouts.Residual = value(_between(Argument(0) | Batched() | InPlace()))
    layer_output: layouts.Residual = value(Site(own("output"), First() | Batched()))


def _kernel(host: Any) -> Any:
    return host.get("attn")._module


def _interior(site: Callable[[Any], Site]) -> Callable[[Any], Site | str]:
    """``site``, unless each rank's attention has some of the heads only."""

    def resolve(host: Any) -> Site | str:
        return _SHARDED if host.root.tensor_parallel_size > 1 else site(host)

    return resolve


def _scale(host: Any) -> float:
    return float(host.facts.attention.scale(host.config, host.index))


_QUERIES: Lens = Argument(0) | Heads(lambda host: _kernel(host).num_heads)
_KEYS: Lens = Argument(1) | Heads(lambda host: _kernel(host).num_kv_heads)
_VALUES: Lens = Argument(2) | Heads(lambda host: _kernel(host).num_kv_heads)
_OUTPUTS: Lens = Heads(lambda host: _kernel(host).num_heads, inside=True)


def _queries(host: Any) -> Lens:
    # vLLM's kernel scales; where the architecture's queries come scaled, they are seen so.
    return _QUERIES | Scaled(_scale) if host.facts.attention.scaled_queries else _QUERIES


def _scores(raw: Any, host: Any) -> Tensor:
    facts, config = host.facts.attention, host.config
    return tracing.scores(
        _QUERIES.get(raw, host),
        _KEYS.get(raw, host),
        scale=_scale(host),
        softcap=facts.softcap(config),
        # The layer's own: vLLM gives Cohere-2 one position more than its config says.
        window=_kernel(host).sliding_window,
        slopes=facts.slopes(config),
    )


def _pattern(raw: Any, host: Any) -> Tensor:
    return tracing.pattern(_scores(raw, host))


class Attention(tracing.Attention, StandardAttention):
    """An attention around vLLM's attention layer, its child ``attn``."""

    attention_output: layouts.Residual = value(
        lambda host: Site(
            beside(lambda h: h.facts.attention_adds, "output"),
            multiplied(host, First() | Batched()),
        )
    )
    attention_queries: layouts.Queries = value(
        _interior(lambda host: Site(under("attn", "input"), _queries(host)))
    )
    attention_keys: layouts.Keys = value(
        _interior(lambda host: Site(under("attn", "input"), _KEYS))
    )
    attention_values: layouts.Values = value(
        _interior(lambda host: Site(under("attn", "input"), _VALUES))
    )
    attention_scores: layouts.Pattern = value(
        _interior(
            lambda host: Site(under("attn", "input"), Derived(_scores, _READ_ONLY), decode=_DECODE)
        )
    )
    attention_probabilities: layouts.Pattern = value(
        _interior(
            lambda host: Site(under("attn", "input"), Derived(_pattern, _READ_ONLY), decode=_DECODE)
        )
    )
    attention_head_outputs: layouts.HeadOutputs = value(
        _interior(lambda host: Site(under("attn", "output"), _OUTPUTS))
    )


class Mlp(tracing.Mlp, StandardMlp):
    """A dense feed-forward."""

    mlp_output: layouts.Residual = value(
        lambda host: Site(
            beside(lambda h: h.facts.mlp_adds, "output"), multiplied(host, First() | Batched())
        )
    )
    mlp_neurons: layouts.Neurons = value(
        Site(under(lambda host: host.facts.down_projection, "input"), Argument(0) | Batched())
    )


def _biased(adds: Callable[[Any], str]) -> Callable[[Any], Site | str]:
    """A contribution given as ``(output, bias)``, which the block adds up.

    In a parallel block the ranks' outputs are summed after both, so each is a part.
    """

    def resolve(host: Any) -> Site | str:
        if host.root.tensor_parallel_size > 1 and host.facts.block == "parallel":
            return _SHARDED
        return Site(beside(adds, "output"), Summed() | Batched())

    return resolve


class BiasedAttention(Attention):
    """An attention that gives its output and its bias apart."""

    attention_output: layouts.Residual = value(_biased(lambda host: host.facts.attention_adds))


class BiasedMlp(Mlp):
    """A feed-forward that gives its output and its bias apart."""

    mlp_output: layouts.Residual = value(_biased(lambda host: host.facts.mlp_adds))


class MlpOnBlock(tracing.OnBlock, Mlp):
    """A feed-forward whose two linears lie on the block."""


def declare(
    architecture: Architecture,
    convention: type[tracing.Layer],
    *,
    layer: type[Module],
    attention: type[Module],
    mlp: type[Module] | None = None,
    attention_convention: type[Attention] = Attention,
    mlp_convention: type[Mlp] = Mlp,
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A plain family: ``RENAME`` and ``ENVOYS`` from an architecture, vLLM's calling
    convention for its blocks, and its classes.

    Args:
        architecture: its facts.
        convention: :class:`FusedLayer` or :class:`PlainLayer`.
        layer, attention, mlp: vLLM's classes; no ``mlp`` where it lies on the block.
        attention_convention, mlp_convention: how the sublayers are called, where that is
            particular.
    """
    on_block = {"mlp": bound(MlpOnBlock, architecture)} if mlp is None else {}
    envoys: dict[Any, Any] = {
        layer: bound(convention, architecture, on_block=on_block),
        attention: bound(attention_convention, architecture),
    }
    if mlp is not None:
        envoys[mlp] = bound(mlp_convention, architecture)
    return renames(architecture, attention, mlp), envoys


# -- vLLM's Transformers backend -------------------------------------------------


def _on_backend(site: Callable[[Any], Site | str] | Site) -> Callable[[Any], Site | str]:
    """``site`` on a module of transformers' own, which the backend runs; else why not.

    The backend's families go by path, so that one serves every architecture; a class of
    vLLM's own at that path calls its block otherwise.
    """

    def resolve(host: Any) -> Site | str:
        module = type(host._module)
        if not any(c.__module__.startswith("transformers.") for c in module.__mro__):
            return (
                f"vLLM runs this model with {module.__module__}.{module.__name__}, which no "
                f"family describes; the family that was found describes its Transformers backend"
            )
        return site if isinstance(site, Site) else site(host)

    return resolve


class BackendLayer(tracing.Layer, StandardLayer):
    """A block of transformers' that vLLM runs: the stream is ``[1, tokens, hidden]``."""

    layer_input: layouts.Residual = value(
        _on_backend(Site(own("input"), Argument("hidden_states")))
    )
    layer_mid: layouts.Residual = value(_on_backend(_between(Argument(0) | InPlace())))
    layer_output: layouts.Residual = value(_on_backend(Site(own("output"), First())))


class BackendAttention(Attention):
    """An attention of transformers' around vLLM's attention layer."""

    attention_output: layouts.Residual = value(
        _on_backend(
            lambda host: Site(
                beside(lambda h: h.facts.attention_adds, "output"), multiplied(host, First())
            )
        )
    )


class BackendMlp(Mlp):
    """A feed-forward of transformers'."""

    mlp_output: layouts.Residual = value(
        _on_backend(
            lambda host: Site(
                beside(lambda h: h.facts.mlp_adds, "output"), multiplied(host, First())
            )
        )
    )
    mlp_neurons: layouts.Neurons = value(
        _on_backend(Site(under(lambda host: host.facts.down_projection, "input"), Argument(0)))
    )


def backend(architecture: Architecture) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """``RENAME`` and ``ENVOYS`` of any architecture on vLLM's Transformers backend.

    The backend holds transformers' own modules under ``model``, whatever they are under in
    the checkpoint.
    """

    def path(name: str) -> str:
        return "model." + name.split(".", 1)[1]

    rename = {
        path(architecture.embed_tokens): "embed_tokens",
        path(architecture.layers): "layers",
        path(architecture.norm): "norm",
    }
    blocks = f"{path(architecture.layers)}.*"
    for name in ("self_attn", "mlp"):
        native = getattr(architecture, name)
        if native not in (None, name):
            rename[native] = name
    envoys: dict[Any, Any] = {
        blocks: bound(BackendLayer, architecture),
        f"{blocks}.{architecture.self_attn}": bound(BackendAttention, architecture),
        f"{blocks}.{architecture.mlp}": bound(BackendMlp, architecture),
    }
    return rename, envoys
