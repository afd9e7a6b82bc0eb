"""The inside of an attention on transformers: operations of its forward, by their names.

An attention that follows transformers' interface makes one call with its queries, keys and
values; nnsight serves that call's arguments and result as locations. Under the ``eager``
implementation the softmax inside the call is served too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from nnsight.intervention.source import (
    SourceNotAvailable,
    compiled,
    decorator_chain,
    install_source,
    instrument,
    make_op,
)
from torch import Tensor

from nnterp.core import tracing
from nnterp.core.tracing import Argument, Derived, First, Lens, Site, own

CALL = "attention_interface_1"
# transformers' implementations that take a softcap and apply none.
NO_SOFTCAP = frozenset({"sdpa"})
SOFTMAX = "nn_functional_softmax_0"
DROPOUT = "nn_functional_dropout_0"


def _operations(function: Any) -> tuple[str, ...]:
    try:
        return compiled(decorator_chain(function)[0]).names
    except SourceNotAvailable:
        return ()


def _eager(host: Any) -> Any:
    """The eager attention function of the host's modeling file, or ``None``."""
    modeling = sys.modules[type(host._module).__module__]
    return getattr(modeling, "eager_attention_forward", None)


def _refused(host: Any) -> str | None:
    """Why the call cannot be found, or ``None``."""
    if CALL in _operations(type(host._module).forward):
        return None
    import transformers

    return (
        f"{type(host._module).__name__}.forward makes no call {CALL!r} in transformers "
        f"{transformers.__version__}, so its inside cannot be reached; read attention_output"
    )


def _open(host: Any) -> None:
    """Serve the operations of the attention's forward."""
    install_source(host)


def _open_eager(host: Any) -> None:
    """Serve the operations inside the eager call as well."""
    install_source(host)
    base, interleaver = f"{host.path}.source.{CALL}", host.interleaver
    # nnsight asks the running call for its function; here it is known beforehand, so that
    # several blocks of one trace can look inside the same call.
    if interleaver.sourced.get(base) is None:
        interleaver.sourced[base] = instrument(
            _eager(host),
            make_op(lambda: (interleaver, base) if interleaver.interleaving else (None, None)),
        )


class _StepTokens(Lens):
    """Keys or values of this step, of the call's, which hold the cache's positions too.

    A write also lands in the cache, which holds the same storage: later steps see it.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def _count(self, raw: Any) -> int:
        count: int = raw[0][1].shape[2]
        return count

    def get(self, raw: Any, host: Any) -> Tensor:
        whole: Tensor = raw[0][self.index]
        return whole[:, :, -self._count(raw) :]

    def put(self, raw: Any, new: Tensor, host: Any) -> Any:
        (args, kwargs), count = raw, self._count(raw)
        whole = args[self.index]
        past = whole[:, :, :-count]
        with torch.no_grad():
            whole.detach()[:, :, -count:].copy_(new)
        new = torch.cat([past, new], 2)
        return (*args[: self.index], new, *args[self.index + 1 :]), kwargs


class _Masked(Lens):
    """Scores whose masked entries, the dtype's minimum in transformers, read as ``-inf``."""

    def get(self, raw: Tensor, host: Any) -> Tensor:
        return raw.masked_fill(raw <= torch.finfo(raw.dtype).min / 2, float("-inf"))


def _call_scores(raw: Any, host: Any) -> Tensor:
    """The call's scores, from its queries and keys."""
    args, _ = raw
    facts, config = host.architecture.attention, host.config
    found = tracing.scores(
        args[1],
        args[2],
        scale=facts.scale(config, host.index),
        softcap=None if host.root.attn_implementation in NO_SOFTCAP else facts.softcap(config),
        window=facts.window(config, host.index),
    )
    pads = host.root.padding(tracing.running(), found.shape[-1])
    if pads is not None:
        columns = torch.arange(found.shape[-1], device=found.device)
        found = found.masked_fill(columns < pads.view(-1, 1, 1, 1), float("-inf"))
    return found


def _call_pattern(raw: Any, host: Any) -> Tensor:
    # A row of padding sees nothing at all; its pattern is zero rather than undefined.
    return tracing.pattern(_call_scores(raw, host)).nan_to_num(0.0)


def queries(host: Any) -> Site | str:
    """``[batch, heads, seq, qk_head_dim]``."""
    return _refused(host) or Site(own(f"source.{CALL}.input"), Argument(1), prepare=_open)


def keys(host: Any) -> Site | str:
    """``[batch, kv_heads, seq, qk_head_dim]``."""
    return _refused(host) or Site(own(f"source.{CALL}.input"), _StepTokens(2), prepare=_open)


def values(host: Any) -> Site | str:
    """``[batch, kv_heads, seq, head_dim]``."""
    return _refused(host) or Site(own(f"source.{CALL}.input"), _StepTokens(3), prepare=_open)


def head_outputs(host: Any) -> Site | str:
    """``[batch, seq, heads, head_dim]``."""
    return _refused(host) or Site(own(f"source.{CALL}.output"), First(), prepare=_open)


def _inside(host: Any, operation: str, side: str, lens: Lens, recompute: Any) -> Site | str:
    refused = _refused(host)
    if refused:
        return refused
    implementation = host.root.attn_implementation
    if implementation != "eager":
        return Site(
            own(f"source.{CALL}.input"),
            Derived(
                recompute,
                f"it is recomputed, since the attention runs as {implementation!r}; edit the "
                f"queries, keys or head outputs, or load with attn_implementation='eager'",
            ),
            prepare=_open,
        )
    function = _eager(host)
    if function is None or operation not in _operations(function):
        return (
            f"the eager attention of {type(host._module).__name__} has no operation {operation!r}"
        )
    at = own(f"source.{CALL}.source.{operation}.{side}")
    return Site(at, lens, prepare=_open_eager)


def scores(host: Any) -> Site | str:
    """``[batch, heads, query, key]``, masked entries ``-inf``."""
    return _inside(host, SOFTMAX, "input", Argument(0) | _Masked(), _call_scores)


def pattern(host: Any) -> Site | str:
    """``[batch, heads, query, key]``."""
    return _inside(host, DROPOUT, "output", Lens(), _call_pattern)
