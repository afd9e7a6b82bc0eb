"""Mixtures of experts on transformers: a router, the experts, at times a shared one.

They run on flattened tokens, ``[batch * seq, ...]``. The router scores them and gives weights
and indices, which the experts take; the mixture adds what the shared expert gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from nnsight.intervention.source import instrument, make_op
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from nnterp.core import _layouts as layouts
from nnterp.core import tracing
from nnterp.core.protocols import StandardMlp
from nnterp.core.tracing import (
    UNSHARED,
    WEIGHTED_INPUT,
    Argument,
    First,
    Item,
    Lens,
    Site,
    beside,
    multiplied,
    opened,
    own,
    under,
    value,
)

from ._interior import refused
from ._rows import Flattened

_CALL = "experts_forward_1"
_APART = f"source.{_CALL}.apart"


@dataclass(frozen=True)
class Router:
    """How a mixture calls its router.

    Attributes:
        name: the router's name under the mixture.
        weights, indices: their positions in what it returns.
    """

    name: str = "gate"
    weights: int = 1
    indices: int = 2


@dataclass(frozen=True)
class _Kernel:
    """An implementation of the experts that has their outputs apart.

    Attributes:
        down: the operation that gives them, a row for each token and expert.
        order: the operation whose second result is the order of those rows, if they are sorted.
    """

    down: str
    order: str | None = None


_KERNELS = {
    "batched_mm": _Kernel("_batched_linear_1"),
    "grouped_mm": _Kernel("_grouped_linear_1", order="torch_sort_0"),
}


def _opened(host: Any) -> None:
    """Serve the operations of the mixture, whichever of its values is asked for first."""
    opened(host.get(host.routing.name))
    if host.mixture.shared is not None:
        opened(host)
    if not isinstance(type(host).expert_outputs.site(host), str):
        _serve_outputs(host)


def _scores(host: Any) -> Site | str:
    router = host.get(host.routing.name)
    return refused(router, "router_logits_0") or Site(
        under(host.routing.name, "source.router_logits_0.output"), Flattened(), prepare=_opened
    )


class Experts(Lens):
    """Indices of experts; a write of one that there is not is refused."""

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        # An adapter holds the experts that it adapts.
        modules = host.get("experts")._module.modules()
        count = next(one.num_experts for one in modules if hasattr(one, "num_experts"))
        if bool(((new < 0) | (new >= count)).any()):
            # The kernels leave what such a row gives to chance.
            raise ValueError(f"expert_indices are below {count}; this write has another")
        return new


def routed_by(lens: Lens) -> Callable[[Any], Site | str]:
    """A value in what the router gives, where the experts take it from."""
    return lambda host: Site(under(host.routing.name, "output"), lens, prepare=_opened)


def mixture_operation(location: str) -> Callable[[Any], Site | str]:
    """A part of the output at an operation of the mixture's own forward: ``"sum_0.output"``."""
    name = location.rsplit(".", 1)[0]

    def resolve(host: Any) -> Site | str:
        return refused(host, name) or Site(
            own(f"source.{location}"), multiplied(host, Flattened()), prepare=_opened
        )

    return resolve


def _weights(host: Any) -> Site | str:
    return routed_by(Item(host.routing.weights) | Flattened())(host)


def _indices(host: Any) -> Site | str:
    return routed_by(Item(host.routing.indices) | Experts() | Flattened())(host)


def _shared(host: Any) -> Site | str:
    facts = host.mixture
    if facts.shared is None:
        return UNSHARED
    if facts.shared_gate is not None:
        return mixture_operation("shared_expert_output_1.output")(host)
    return Site(under(facts.shared, "output"), multiplied(host, Flattened()), prepare=_opened)


def _implementation(host: Any) -> str:
    found: str = host.get("experts")._module.config._experts_implementation
    return found


def _outputs(host: Any) -> Site | str:
    if host.mixture.weighted_input:
        return WEIGHTED_INPUT
    experts = host.get("experts")
    if not hasattr(experts._module, "config"):
        return (
            f"an adapter wraps the experts in its {type(experts._module).__name__}, which does not "
            f"have them apart; read routed_output"
        )
    implementation = _implementation(host)
    kernel = _KERNELS.get(implementation)
    if kernel is None:
        return (
            f"the experts run as {implementation!r}, which weighs and adds up one expert's "
            f"outputs before it computes the next's; load with experts_implementation="
            f"'grouped_mm' or 'batched_mm', or read routed_output"
        )
    if getattr(experts._module, "_is_expert_parallel", False):
        return "each rank has some of the experts only; load without expert parallelism"
    needed = (kernel.down,) if kernel.order is None else (kernel.order, kernel.down)
    for name in needed:
        reason = refused(experts, _CALL) or refused(
            experts, name, ALL_EXPERTS_FUNCTIONS[implementation]
        )
        if reason:
            return reason
    return Site(under("experts", _APART), multiplied(host, Flattened(axes=2)), prepare=_opened)


def _serve_outputs(host: Any) -> None:
    """Serve the experts' outputs as ``[tokens, top_k, hidden]`` inside the experts' call."""
    experts = host.get("experts")
    opened(experts)
    base, interleaver = f"{experts.path}.source.{_CALL}", experts.interleaver
    if interleaver.sourced.get(base) is not None:
        return
    implementation = _implementation(host)
    kernel, top_k = _KERNELS[implementation], host.mixture.top_k(host.config)
    plain = make_op(lambda: (interleaver, base) if interleaver.interleaving else (None, None))
    order: list[Tensor] = []

    def op(location: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(location, function, *args, **kwargs)
        if not interleaver.interleaving:
            return result
        if location == f"source.{kernel.order}":
            order[:] = [result[1]]
        elif location == f"source.{kernel.down}":
            return _apart(interleaver, f"{experts.path}.{_APART}", result, top_k, order)
        return result

    interleaver.sourced[base] = instrument(ALL_EXPERTS_FUNCTIONS[implementation], op)


def _apart(interleaver: Any, at: str, rows: Tensor, top_k: int, order: list[Tensor]) -> Tensor:
    """``rows``, or what a block makes of them token by token."""
    found = rows
    if order:
        found = torch.empty_like(rows).index_copy(0, order[0], rows)
    found = found.view(-1, top_k, *found.shape[1:])
    new: Tensor = interleaver.handle(at, found)
    if new is found:
        return rows
    new = new.flatten(0, 1)
    return new[order[0]] if order else new


class Mixture(tracing.Mixture, StandardMlp):
    """A mixture of experts; the values that add up to its output have its multiplier on them."""

    routing: ClassVar[Router] = Router()

    mlp_input: layouts.Residual = value(Site(own("input"), Argument(0)))
    mlp_output: layouts.Residual = value(
        lambda host: Site(
            beside(lambda h: h.facts.mlp_adds, "output"), multiplied(host, First() | Flattened())
        )
    )
    router_logits: layouts.RouterLogits = value(_scores)
    expert_weights: layouts.ExpertWeights = value(_weights)
    expert_indices: layouts.ExpertIndices = value(_indices)
    expert_outputs: layouts.ExpertOutputs = value(_outputs)
    routed_output: layouts.Residual = value(
        lambda host: Site(
            under("experts", "output"), multiplied(host, Flattened()), prepare=_opened
        )
    )
    shared_expert_output: layouts.Residual = value(_shared)
