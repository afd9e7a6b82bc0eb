"""The inside of an attention on transformers: operations of its forward, by their names.

An attention that follows transformers' interface makes one call with its queries, keys and
values; nnsight serves that call's arguments and result as locations. Under the ``eager``
implementation the softmax inside the call is served too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from nnsight.intervention.source import instrument, make_op
from torch import Tensor

from nnterp.core import Unavailable, tracing
from nnterp.core.tracing import Argument, Derived, First, Lens, Site, opened, operations, own, under

# transformers' implementations that take a softcap and apply none.
NO_SOFTCAP = frozenset({"sdpa"})

_FIRST = Argument(0)


def _shared_function(host: Any) -> Any:
    modeling = sys.modules[type(host._module).__module__]
    return getattr(modeling, "eager_attention_forward", None)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The call in an attention's forward that takes queries, keys and values.

    Attributes:
        name: its operation's name.
        first: the position of the queries among its arguments; keys and values follow.
        heads_first: whether it gives ``[batch, heads, seq, head_dim]``.
        function: host to the function that it calls under ``eager``.
        softmax, dropout: the operations in there that take the scores and give the pattern.
        scores: where the scores are in what ``softmax`` takes.
        expansion: the attention's method that makes the keys and values of all positions in every
            step, where the cache holds what they are made of; without it the cache holds them.
    """

    name: str = "attention_interface_1"
    first: int = 1
    heads_first: bool = False
    function: Callable[[Any], Any] = _shared_function
    softmax: str = "nn_functional_softmax_0"
    dropout: str = "nn_functional_dropout_0"
    scores: Lens = _FIRST
    expansion: str | None = None


SHARED = Call()
"""transformers' own attention interface."""


def refused(host: Any, name: str, function: Any = None) -> str | None:
    """Why an operation of the host's forward, or of a function that it calls, cannot be found,
    or ``None``."""
    module = type(host._module)
    if name in operations(function or module.forward):
        return None
    import transformers

    called = f"{module.__name__}.forward" if function is None else function.__name__
    return (
        f"{called} has no operation {name!r} in transformers "
        f"{transformers.__version__}, so its inside cannot be reached; read what the sublayer "
        f"adds to the stream"
    )


def _refused(host: Any) -> str | None:
    return refused(host, host.call.name)


def _expansion(host: Any) -> str | None:
    """The operation that makes keys and values of what the cache holds, where those are not it."""
    return None if host.call.expansion is None else f"self_{host.call.expansion}_0"


def _open_eager(host: Any) -> None:
    """Serve the operations inside the eager call as well."""
    opened(host)
    base, interleaver = f"{host.path}.source.{host.call.name}", host.interleaver
    # nnsight asks the running call for its function; here it is known beforehand, so that
    # several blocks of one trace can look inside the same call.
    if interleaver.sourced.get(base) is None:
        interleaver.sourced[base] = instrument(
            host.call.function(host),
            make_op(lambda: (interleaver, base) if interleaver.interleaving else (None, None)),
        )


class _Written:
    """An attention's expansion in which what a block wrote stays written.

    Attributes:
        expand: the attention's own, which gives keys and values, ``[batch, heads, all, width]``.
        kept: the written ones by place, 0 for keys, and rows, as they were in that step.
    """

    def __init__(self, expand: Callable[..., Any]) -> None:
        self.expand = expand
        self.kept: dict[tuple[int, int, int], Tensor] = {}

    def __call__(self, *latents: Tensor) -> tuple[Tensor, ...]:
        found = list(self.expand(*latents))
        for (place, start, stop), written in self.kept.items():
            found[place] = found[place].clone()
            found[place][start:stop, :, : written.shape[2]] = written
        return tuple(found)


def _keep(host: Any, place: int, whole: Tensor) -> None:
    """Have the later steps of this run take ``whole`` for the positions that it has.

    Raises:
        Unavailable: the batch has more rows than prompts, and they may change places.
    """
    interleaver, mediator = host.interleaver, tracing.running()
    batcher = interleaver.batcher
    start, rows = 0, whole.shape[0]
    if batcher is not None:
        if mediator is not None and batcher.batching and mediator.batch_group is not None:
            start, rows = mediator.batch_group
        elif batcher.pads:
            rows = len(batcher.pads)
    if rows != whole.shape[0]:
        raise Unavailable(
            "with beams, or several sequences for a prompt, the rows of a step are not those of "
            "the next, and the cache holds no keys and values to write: edit the queries or head "
            "outputs instead"
        )
    # nnsight calls what is here in place of the function, in this run alone.
    at = f"{host.path}.source.{_expansion(host)}"
    entry = interleaver.sourced.get(at)
    if entry is None or not isinstance(entry[0], _Written):
        own = getattr(host._module, host.call.expansion) if entry is None else entry[0]
        entry = interleaver.sourced[at] = (_Written(own), None)
    entry[0].kept[place, start, start + rows] = whole


class StepTokens(Lens):
    """Keys or values of this step, of the call's, which hold the cache's positions too.

    A write also lands in the cache, which holds the same storage, or in what is made of what it
    holds: later steps see it.

    Args:
        offset: 1 for the keys and 2 for the values, from the queries on.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def _find(self, raw: Any, host: Any) -> tuple[int, int]:
        first: int = host.call.first
        return first + self.offset, raw[0][first].shape[2]

    def get(self, raw: Any, host: Any) -> Tensor:
        index, count = self._find(raw, host)
        whole: Tensor = raw[0][index]
        return whole[:, :, -count:]

    def put(self, raw: Any, new: Tensor, host: Any) -> Any:
        (args, kwargs), (index, count) = raw, self._find(raw, host)
        whole = args[index]
        past = whole[:, :, :-count]
        cached = _expansion(host) is None
        if cached:
            with torch.no_grad():
                whole.detach()[:, :, -count:].copy_(new)
            if not (torch.is_grad_enabled() and (new.requires_grad or whole.requires_grad)):
                # The same storage, so that another invoke's write lands in the cache as well.
                return raw
        written = torch.cat([past, new], 2)
        if not cached:
            _keep(host, self.offset - 1, written)
        return (*args[:index], written, *args[index + 1 :]), kwargs


class _CallQueries(Lens):
    def get(self, raw: Any, host: Any) -> Tensor:
        queries: Tensor = Argument(host.call.first).get(raw, host)
        return queries

    def put(self, raw: Any, new: Tensor, host: Any) -> Any:
        return Argument(host.call.first).put(raw, new, host)


class _HeadsFirst(Lens):
    def get(self, raw: Tensor, host: Any) -> Tensor:
        return raw.transpose(1, 2)

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        return new.transpose(1, 2)


class Masked(Lens):
    """Scores whose masked entries, the dtype's minimum in transformers, read as ``-inf``."""

    def get(self, raw: Tensor, host: Any) -> Tensor:
        return raw.masked_fill(raw <= torch.finfo(raw.dtype).min / 2, float("-inf"))

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        # A row of padding sees nothing, and has no softmax when all of it is -inf.
        return new.clamp_min(torch.finfo(raw.dtype).min)


def _call_scores(raw: Any, host: Any) -> Tensor:
    """The call's scores, from its queries and keys."""
    args, first = raw[0], host.call.first
    return recomputed_scores(args[first], args[first + 1], host)


def recomputed_scores(queries: Tensor, keys: Tensor, host: Any) -> Tensor:
    """Scores from queries and from all keys so far, padding masked."""
    facts, config, root = host.facts.attention, host.config, host.root
    starts = root.starts(tracing.running(), keys.shape[2]) or [0]
    start = torch.tensor(starts, device=keys.device).view(-1, 1, 1, 1)
    found = tracing.scores(
        queries,
        keys,
        scale=1.0 if facts.scaled_queries else facts.scale(config, host.index),
        softcap=None if root.attn_implementation in NO_SOFTCAP else facts.softcap(config),
        window=facts.window(config, host.index),
        chunk=facts.chunk(config, host.index),
        start=start,
        slopes=facts.slopes(config),
    )
    if min(starts) < 0:
        columns = torch.arange(found.shape[-1], device=found.device)
        front = (-start).clamp_min(0)
        slopes = facts.slopes(config)
        if slopes is not None:
            # A key's position counts from its own prompt's first token.
            found = found - torch.tensor(slopes, device=found.device).view(1, -1, 1, 1) * front
        found = found.masked_fill(columns < front, float("-inf"))
    return found


def _call_pattern(raw: Any, host: Any) -> Tensor:
    # A row of padding sees nothing at all; its pattern is zero rather than undefined.
    name = host.facts.attention.sinks
    sinks = None if name is None else getattr(host._module, name)
    return tracing.pattern(_call_scores(raw, host), sinks).nan_to_num(0.0)


def _at(side: str) -> Callable[[Any], str]:
    return lambda host: f"{host.path}.source.{host.call.name}.{side}"


def queries(host: Any) -> Site | str:
    """``[batch, heads, seq, qk_head_dim]``."""
    return _refused(host) or Site(_at("input"), _CallQueries(), prepare=opened)


def _cached(host: Any, offset: int) -> Site | str:
    operation = _expansion(host)
    # Where an edit would be gone by the next step, there is none.
    lost = None if operation is None else refused(host, operation)
    return _refused(host) or Site(_at("input"), StepTokens(offset), read_only=lost, prepare=opened)


def keys(host: Any) -> Site | str:
    """``[batch, kv_heads, seq, qk_head_dim]``."""
    return _cached(host, 1)


def values(host: Any) -> Site | str:
    """``[batch, kv_heads, seq, head_dim]``."""
    return _cached(host, 2)


def head_outputs(host: Any) -> Site | str:
    """``[batch, seq, heads, head_dim]``."""
    lens = First() | _HeadsFirst() if host.call.heads_first else First()
    return _refused(host) or Site(_at("output"), lens, prepare=opened)


def instead_of(implementation: str) -> str:
    """Why scores and pattern cannot be written under an implementation."""
    return (
        f"it is recomputed, since the attention runs as {implementation!r}; edit the queries, "
        f"keys or head outputs, or load with attn_implementation='eager'"
    )


def _inside(host: Any, operation: str, side: str, lens: Lens, recompute: Any) -> Site | str:
    reason = _refused(host)
    if reason:
        return reason
    implementation = host.root.attn_implementation
    if implementation != "eager":
        if (ahead := tracing.reads_ahead(host.config)) is not None:
            return ahead
        return Site(_at("input"), Derived(recompute, instead_of(implementation)), prepare=opened)
    function = host.call.function(host)
    if function is None or operation not in operations(function):
        return (
            f"the eager attention of {type(host._module).__name__} has no operation {operation!r}"
        )
    return Site(_at(f"source.{operation}.{side}"), lens, prepare=_open_eager)


def scores(host: Any) -> Site | str:
    """``[batch, heads, query, key]``, masked entries ``-inf``."""
    lens = host.call.scores | Masked()
    return _inside(host, host.call.softmax, "input", lens, _call_scores)


def pattern(host: Any) -> Site | str:
    """``[batch, heads, query, key]``."""
    return _inside(host, host.call.dropout, "output", Lens(), _call_pattern)


def operation(location: str, lens: Lens) -> Callable[[Any], Site | str]:
    """A value at an operation of the attention's own forward: ``"F_softmax_0.input"``."""
    name, side = location.rsplit(".", 1)

    def resolve(host: Any) -> Site | str:
        return refused(host, name) or Site(own(f"source.{name}.{side}"), lens, prepare=opened)

    return resolve


class _Merged(Lens):
    """Heads one after the other, ``[batch, seq, heads * width]``, apart."""

    def get(self, raw: Tensor, host: Any) -> Tensor:
        return raw.view(*raw.shape[:-1], host.num_heads, -1)

    def put(self, raw: Tensor, new: Tensor, host: Any) -> Tensor:
        return new.flatten(-2)


def head_inputs(projection: str) -> Site:
    """The head outputs where they enter the output projection, a module under the attention."""
    return Site(under(projection, "input"), Argument(0) | _Merged())
