"""vLLM's calling conventions: how a block carries the stream, how an attention is called.

vLLM runs every prompt of a step as one flat run of tokens, ``[tokens, hidden]``; a block is
served its own request's rows of it. A *fused* block carries the stream as two halves,
``(hidden, residual)``, so that one kernel can add them and take the next norm; a *plain*
block carries the stream whole.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from vllm.platforms import current_platform

from nnterp.core import _layouts as layouts
from nnterp.core import tracing
from nnterp.core.architectures import Architecture
from nnterp.core.protocols import StandardAttention, StandardLayer, StandardMlp
from nnterp.core.tracing import (
    UNSHARED,
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
    opened,
    operations,
    own,
    reading,
    renames,
    unavailable,
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
_SHARED = (
    "a write under taps lands in the graph's own tensor, which may be another module's input too; "
    "edit the stream, or what the sublayer adds, instead"
)
_NO_KERNEL = (
    "this vLLM release's Transformers backend keeps its attention layers outside the module tree; "
    "read attention_output, or use vLLM 0.32"
)
_SHARDED = (
    "under tensor parallelism each rank's attention has some of the heads only; read it with "
    "tensor_parallel_size=1"
)
_PARTIAL = (
    "under tensor parallelism each rank gives a part of it, summed only with the rest; "
    "read it with tensor_parallel_size=1"
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
    return host.get(host.kernel)._module


def _interior(
    side: str,
    lens: Lens | Callable[[Any], Lens],
    *,
    read_only: str | None = None,
    decode: str | None = None,
) -> Callable[[Any], Site | str]:
    """What the attention layer takes or gives, seen through ``lens``, unless each rank has some
    of the heads only, or the layer is out of reach."""

    def resolve(host: Any) -> Site | str:
        if host.root.tensor_parallel_size > 1:
            return _SHARDED
        if host.kernel.split(".")[0] not in host._module._modules:
            return _NO_KERNEL
        seen = lens if isinstance(lens, Lens) else lens(host)
        if isinstance(seen, Derived) and (ahead := tracing.reads_ahead(host.config)) is not None:
            return ahead
        return Site(under(host.kernel, side), seen, read_only=read_only, decode=decode)

    return resolve


def _scale(host: Any) -> float:
    return float(host.facts.attention.scale(host.config, host.index))


_QUERIES: Lens = Argument(0) | Heads(lambda host: _kernel(host).num_heads)
_KEYS: Lens = Argument(1) | Heads(lambda host: _kernel(host).num_kv_heads)
_VALUES: Lens = Argument(2) | Heads(lambda host: _kernel(host).num_kv_heads)
_OUTPUTS: Lens = Heads(lambda host: _kernel(host).num_heads, inside=True)


def _queries(host: Any) -> Lens:
    # vLLM's kernel scales; where the architecture's queries come scaled, they are seen so.
    seen = _QUERIES | Scaled(_scale) if host.facts.attention.scaled_queries else _QUERIES
    channels: Lens = host.channels
    return seen | channels


def _keys(host: Any) -> Lens:
    keys: Lens = host.kernel_keys
    channels: Lens = host.channels
    return keys | channels


def _scores(raw: Any, host: Any) -> Tensor:
    facts, config = host.facts.attention, host.config
    return tracing.scores(
        _QUERIES.get(raw, host),
        host.kernel_keys.get(raw, host),
        scale=_scale(host),
        softcap=facts.softcap(config),
        window=host.window,
        chunk=getattr(_kernel(host), "attention_chunk_size", None),
        slopes=facts.slopes(config),
    )


def _pattern(raw: Any, host: Any) -> Tensor:
    name = host.facts.attention.sinks
    sinks = None if name is None else getattr(host._module, name)
    return tracing.pattern(_scores(raw, host), sinks)


def _summed_later(host: Any) -> str | None:
    """Why a contribution is not served: parallel sublayers are summed over the ranks at once."""
    sharded = host.root.tensor_parallel_size > 1
    return _PARTIAL if sharded and host.facts.block == "parallel" else None


def _read_alone(site: Site | Callable[[Any], Site]) -> Callable[[Any], Site]:
    """The input of a sublayer, which under taps is read-only."""

    def resolve(host: Any) -> Site:
        found = site if isinstance(site, Site) else site(host)
        return replace(found, read_only=_SHARED) if host.root.taps else found

    return resolve


class Attention(tracing.Attention, StandardAttention):
    """An attention around vLLM's attention layer."""

    kernel: ClassVar[str] = "attn"
    """That layer's path under it."""

    kernel_keys: ClassVar[Lens] = _KEYS
    """The keys in what that layer takes."""

    channels: ClassVar[Lens] = Lens()
    """The channels of its queries and keys in transformers' order."""

    @property
    def window(self) -> int | None:
        """The number of positions a query sees, or ``None`` where it sees all before it."""
        # The layer's own: vLLM gives Cohere-2 one position more than its config says.
        found: int | None = _kernel(self).sliding_window
        return found

    attention_input: layouts.Residual = value(
        _read_alone(Site(own("input"), Argument("hidden_states") | Batched()))
    )
    attention_output: layouts.Residual = value(
        lambda host: (
            _summed_later(host)
            or Site(
                beside(lambda h: h.facts.attention_adds, "output"),
                multiplied(host, First() | Batched()),
            )
        )
    )
    attention_queries: layouts.Queries = value(_interior("input", _queries))
    attention_keys: layouts.Keys = value(_interior("input", _keys))
    attention_values: layouts.Values = value(_interior("input", _VALUES))
    attention_scores: layouts.Pattern = value(
        _interior("input", Derived(_scores, _READ_ONLY), decode=_DECODE)
    )
    attention_probabilities: layouts.Pattern = value(
        _interior("input", Derived(_pattern, _READ_ONLY), decode=_DECODE)
    )
    attention_head_outputs: layouts.HeadOutputs = value(_interior("output", _OUTPUTS))


class Mlp(tracing.Mlp, StandardMlp):
    """A dense feed-forward."""

    mlp_input: layouts.Residual = value(
        _read_alone(lambda host: Site(reading(host), Argument(0) | Batched()))
    )
    mlp_output: layouts.Residual = value(
        lambda host: (
            _summed_later(host)
            or Site(
                beside(lambda h: h.facts.mlp_adds, "output"),
                multiplied(host, First() | Batched()),
            )
        )
    )
    mlp_neurons: layouts.Neurons = value(
        Site(under(lambda host: host.facts.down_projection, "input"), Argument(0) | Batched())
    )


class Rotary(Lens):
    """Rotated channels, the last ones of each head, in another order than the engine has them.

    Rotary turns pairs of channels; a pair lies side by side, or its second half a row's half
    further on.

    Args:
        width: host to the number of rotated channels.
        halves: whether the value's pairs lie in two halves, and the engine's side by side.
    """

    def __init__(self, width: Callable[[Any], int], *, halves: bool) -> None:
        self.width, self.halves = width, halves

    def _order(self, like: Tensor, host: Any, halves: bool) -> Tensor:
        width = self.width(host)
        shape = (-1, 2) if halves else (2, -1)
        kept = torch.arange(like.shape[-1] - width, device=like.device)
        turned = torch.arange(width, device=like.device).view(shape).T.flatten()
        return torch.cat([kept, turned + len(kept)])

    def get(self, raw: Tensor, host: Any) -> Tensor:
        return raw[..., self._order(raw, host, self.halves)]

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        return new[..., self._order(new, host, not self.halves)]


class Padded(Lens):
    """Heads that the engine fills up with zeros to the width of its queries and keys."""

    def get(self, raw: Tensor, host: Any) -> Tensor:
        return raw[..., : host.head_dim]

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        return torch.nn.functional.pad(new, (0, raw.shape[-1] - new.shape[-1]))


_LATENT = (
    "vLLM's latent attention makes it from latents inside its kernel, and caches those, so it is "
    "computed once more; with VLLM_MLA_DISABLE=1, set before the process makes its first engine, "
    "vLLM makes and caches it whole, and it can be written"
)
_QUERIES_ONLY = (
    "vLLM computes it inside a kernel, so it is recomputed from the queries and latents; edit the "
    "queries or head outputs instead"
)
_PACKED = (
    "vLLM's latent attention for AMX keeps no weights but in a packed form, so there is nothing to "
    "compute it with; load with attention_backend='CPU_MLA', or set VLLM_MLA_DISABLE=1 before the "
    "process makes its first engine"
)


class _Expanded(Lens):
    """The keys or values that a kernel makes of latents, by its own projection."""

    def __init__(self, part: int) -> None:
        self.part = part

    def get(self, raw: Any, host: Any) -> Tensor:
        kernel, interleaver = _kernel(host), host.interleaver
        latents, turned = Argument(1).get(raw, host), Argument(2).get(raw, host)
        kept, interleaver.interleaving = interleaver.interleaving, False
        try:
            found = kernel.kv_b_proj(latents)[0].unflatten(-1, (kernel.num_heads, -1))
        finally:
            interleaver.interleaving = kept
        plain, values = found.split([kernel.qk_nope_head_dim, kernel.v_head_dim], -1)
        keys = torch.cat([plain, turned.expand(-1, kernel.num_heads, -1)], -1)
        return (keys, values)[self.part].transpose(0, 1).unsqueeze(0)


def _of_latents(site: Callable[[Any], Site | str]) -> Callable[[Any], Site | str]:
    """``site``, unless the kernel gave away the weights that make keys and values."""

    def resolve(host: Any) -> Site | str:
        found = site(host)
        if isinstance(found, str) or not getattr(_kernel(host), "is_amx_bmm_enabled", False):
            return found
        return _PACKED

    return resolve


class LatentAttention(Attention):
    """An attention whose kernel takes latents and makes keys and values of them."""

    kernel: ClassVar[str] = "mla_attn.mla_attn"
    kernel_keys: ClassVar[Lens] = _Expanded(0)

    @property
    def window(self) -> int | None:
        """The number of positions a query sees, or ``None`` where it sees all before it."""
        return self.facts.attention.window(self.config, self.index)

    attention_keys: layouts.Keys = value(_of_latents(_interior("input", _keys, read_only=_LATENT)))
    attention_values: layouts.Values = value(
        _of_latents(_interior("input", _Expanded(1), read_only=_LATENT))
    )
    attention_scores: layouts.Pattern = value(
        _of_latents(_interior("input", Derived(_scores, _QUERIES_ONLY), decode=_DECODE))
    )
    attention_probabilities: layouts.Pattern = value(
        _of_latents(_interior("input", Derived(_pattern, _QUERIES_ONLY), decode=_DECODE))
    )


class ExpandedAttention(Attention):
    """An attention on latents that are expanded to keys and values before it."""

    attention_values: layouts.Values = value(_interior("input", _VALUES | Padded()))
    attention_head_outputs: layouts.HeadOutputs = value(_interior("output", _OUTPUTS | Padded()))


def rotated(base: type[Attention], rotary: Rotary) -> type[Attention]:
    """``base`` with its queries' and keys' channels in transformers' order."""
    members = {"channels": rotary, "__doc__": base.__doc__, "__module__": base.__module__}
    return type(base.__name__, (base,), members)


def _biased(adds: Callable[[Any], str]) -> Callable[[Any], Site | str]:
    """A contribution given as ``(output, bias)``, which the block adds up."""

    return lambda host: _summed_later(host) or Site(beside(adds, "output"), Summed() | Batched())


class BiasedAttention(Attention):
    """An attention that gives its output and its bias apart."""

    attention_output: layouts.Residual = value(_biased(lambda host: host.facts.attention_adds))


class BiasedMlp(Mlp):
    """A feed-forward that gives its output and its bias apart."""

    mlp_output: layouts.Residual = value(_biased(lambda host: host.facts.mlp_adds))


class MlpOnBlock(tracing.OnBlock, Mlp):
    """A feed-forward whose two linears lie on the block."""


_FUSED = (
    "vLLM computes the experts, weighs and adds up what they give in one fused kernel, so their "
    "outputs are nowhere apart; read routed_output, or use the transformers engine"
)
_ROUTED = (
    "vLLM computes it inside a kernel, so it is computed once more from the router's logits; edit "
    "router_logits instead"
)
_REBALANCED = (
    "under expert-parallel load balancing vLLM's router gives the places of copies of the "
    "experts; load without enable_eplb"
)
_ROUTING_KERNEL = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
_INSIDE = (
    "this vLLM release's kernel for experts on the CPU routes inside itself; read router_logits, "
    "or use vLLM 0.32"
)
_SUMMED = "self_apply_routed_output_transform_0"


def _routing(logits: Tensor, host: Any) -> tuple[Tensor, Tensor]:
    """Weights and indices by vLLM's own router, ``[tokens, top_k]``, the largest weight first."""
    experts = host.get("experts")._module
    # The routers here look at the logits alone; what they route is asked for its length.
    tokens = logits.new_empty(logits.shape[0], host.root.hidden_size)
    weights, indices = experts.router._select_experts(hidden_states=tokens, router_logits=logits)
    # Some mixtures scale what the experts give rather than the weights.
    weights = weights * experts.routed_scaling_factor
    order = weights.argsort(-1, descending=True)
    return weights.gather(-1, order), indices.long().gather(-1, order)


def _opened(host: Any) -> None:
    """Serve the mixture's sum in parts, whichever of its values is asked for first."""
    if host.mixture.shared is not None:
        opened(host.get("experts"))


def _routed(part: int) -> Callable[[Any], Site | str]:
    def get(raw: Any, host: Any) -> Tensor:
        return _routing(First().get(raw, host), host)[part].unsqueeze(0)

    def resolve(host: Any) -> Site | str:
        if host.get("experts")._module.router.eplb_state is not None:
            return _REBALANCED
        if current_platform.is_cpu() and find_spec(_ROUTING_KERNEL) is not None:
            return _INSIDE
        return Site(under(host.routing, "output"), Derived(get, _ROUTED), prepare=_opened)

    return resolve


def _shared(host: Any) -> Site | str:
    name = host.mixture.shared
    if name is None:
        return UNSHARED
    if host.root.tensor_parallel_size > 1:
        return _PARTIAL
    return Site(under(name, "output"), multiplied(host, Batched()), prepare=_opened)


def _summed(host: Any) -> Site | str:
    """The routed experts' sum, where the mixture adds a shared expert's output to it."""
    if host.mixture.shared is None:
        return Site(own("output"), multiplied(host, First() | Batched()))
    if host.root.tensor_parallel_size > 1:
        return _PARTIAL
    experts = type(host.get("experts")._module)
    if _SUMMED not in operations(experts.forward):
        return (
            f"{experts.__name__}.forward has no operation {_SUMMED!r} in this vLLM, so "
            f"the routed part of its output cannot be reached; read mlp_output"
        )
    return Site(
        under("experts", f"source.{_SUMMED}.output"),
        multiplied(host, Batched()),
        prepare=_opened,
    )


class Mixture(tracing.Mixture, Mlp):
    """A mixture of experts: a router of its own, and all the experts in one kernel.

    The values that add up to its output have its multiplier on them.
    """

    routing: ClassVar[str] = "gate"

    mlp_neurons: layouts.Neurons = tracing.Mixture.mlp_neurons
    router_logits: layouts.RouterLogits = value(
        lambda host: Site(under(host.routing, "output"), First() | Batched(), prepare=_opened)
    )
    expert_weights: layouts.ExpertWeights = value(_routed(0))
    expert_indices: layouts.ExpertIndices = value(_routed(1))
    expert_outputs: layouts.ExpertOutputs = unavailable(_FUSED)
    routed_output: layouts.Residual = value(_summed)
    shared_expert_output: layouts.Residual = value(_shared)


def declare(
    architecture: Architecture,
    convention: type[tracing.Layer],
    *,
    layer: type[Module],
    attention: type[Module] | dict[type[Module], type[Attention]],
    mlp: type[Module] | None = None,
    mixture: type[Module] | None = None,
    router: str = "gate",
    attention_convention: type[Attention] = Attention,
    mlp_convention: type[Mlp] = Mlp,
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A plain family: ``RENAME`` and ``ENVOYS`` from an architecture, vLLM's calling
    convention for its blocks, and its classes.

    Args:
        architecture: its facts.
        convention: :class:`FusedLayer` or :class:`PlainLayer`.
        layer, attention, mlp: vLLM's classes; no ``mlp`` where it lies on the block. Where
            vLLM chooses among several attentions, the classes and how each is called.
        mixture: the class of a sparse block's MLP; the dense ones, if any, are found by path,
            since a mixture's shared expert may have their class.
        router: the router's name under the mixture.
        attention_convention, mlp_convention: how the sublayers are called, where that is
            particular.
    """
    bare = mlp is None and mixture is None
    on_block = {"mlp": bound(MlpOnBlock, architecture)} if bare else {}
    envoys: dict[Any, Any] = {
        layer: bound(convention, architecture, on_block=on_block),
    }
    if not isinstance(attention, dict):
        attention = {attention: attention_convention}
    for module, host in attention.items():
        envoys[module] = bound(host, architecture)
    if mixture is not None:
        envoys[mixture] = bound(Mixture, architecture, routing=router)
        envoys[f"{architecture.layers}.*.{architecture.mlp}"] = bound(mlp_convention, architecture)
    elif mlp is not None:
        envoys[mlp] = bound(mlp_convention, architecture)
    rename: dict[Any, Any] = {}
    for module in attention:
        rename |= renames(architecture, module, mixture or mlp)
    if mixture is not None and mlp is not None and architecture.mlp != "mlp":
        rename[architecture.mlp] = "mlp"
    return rename, envoys


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

    attention_input: layouts.Residual = value(
        _on_backend(Site(own("input"), Argument("hidden_states")))
    )
    attention_output: layouts.Residual = value(
        _on_backend(
            lambda host: Site(
                beside(lambda h: h.facts.attention_adds, "output"), multiplied(host, First())
            )
        )
    )


class BackendMlp(Mlp):
    """A feed-forward of transformers'."""

    mlp_input: layouts.Residual = value(_on_backend(lambda host: Site(reading(host), Argument(0))))
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


_MODELS = "vllm.model_executor.models"


def backend(
    architecture: Architecture, convention: type[tracing.Layer] | None = None, **native: str
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """``RENAME`` and ``ENVOYS`` of any architecture on vLLM's Transformers backend.

    The backend holds transformers' own modules under ``model``, whatever they are under in
    the checkpoint.

    Args:
        architecture: its facts.
        convention: how vLLM's own implementation calls its blocks, where releases have one.
        **native: that implementation's classes for :func:`declare`, by their names under
            vLLM's models: ``mlp="arcee.ArceeMLP"``. A release without them has the backend.
    """

    def path(name: str) -> str:
        return "model." + name.split(".", 1)[1]

    rename = {
        path(architecture.embed_tokens): "embed_tokens",
        path(architecture.layers): "layers",
    }
    if architecture.norm is not None:
        rename[path(architecture.norm)] = "norm"
    blocks = f"{path(architecture.layers)}.*"
    for name in ("self_attn", "mlp"):
        spelt = getattr(architecture, name)
        if spelt not in (None, name):
            rename[spelt] = name
    envoys: dict[Any, Any] = {
        blocks: bound(BackendLayer, architecture),
        f"{blocks}.{architecture.self_attn}": bound(BackendAttention, architecture),
        f"{blocks}.{architecture.mlp}": bound(BackendMlp, architecture),
    }
    if convention is None:
        return rename, envoys
    try:
        classes = {role: _native(name) for role, name in native.items()}
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_MODELS):
            raise
        return rename, envoys
    own_rename, own_envoys = declare(architecture, convention, **classes)
    return rename | own_rename, envoys | own_envoys


def _native(name: str) -> Any:
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(f"{_MODELS}.{module}"), cls)
