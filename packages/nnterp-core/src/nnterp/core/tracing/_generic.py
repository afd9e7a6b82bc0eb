"""A family for models that nobody described: what can be verified on the loaded model.

One forward is watched from outside: what enters and leaves each block and its modules. The
stream is whatever chains from block to block and gives the logits at the end; a contribution
is a module's output that makes the identity true on every block. What is found is served; the
rest is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from .. import _layouts as layouts
from ..architectures import Architecture
from ._hosts import Attention, Layer, Mlp, Sublayer
from ._lenses import Argument, Batched, First, Halves, Item, Lens
from ._values import Site, beside, own, unavailable, value

Where: TypeAlias = "int | str"
"""A position or a name among a call's arguments, or a position in what it returns."""

UNVERIFIED = "nothing is verified on this model yet: call model.verify()"
NOT_SERVED = (
    "the generic family serves the residual stream and what the sublayers add to it; for more, "
    "describe the model's family"
)
NO_LENS = "the norm and the head do not give the last logits: this model scales or caps them"
WHOLE = -1
"""The position of a return value that is no tuple."""


@dataclass
class Verified:
    """What one watched forward showed.

    Attributes:
        enters, leaves: where the stream, or its two halves, are in a block's arguments and in
            what it returns.
        attention_adds, mlp_adds: the modules under a block that add to the stream, or ``None``.
        flat: whether the stream has no batch axis.
        lens: whether the final norm and the head give the logits of the last stream.
        errors: the largest error of each check, relative to its row.
    """

    enters: tuple[Where, ...]
    leaves: tuple[int, ...]
    attention_adds: str | None
    mlp_adds: str | None
    flat: bool
    lens: bool
    errors: dict[str, float]


@dataclass
class _Seen:
    enters: dict[Where, Tensor] = field(default_factory=dict)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    adds: dict[str, Tensor] = field(default_factory=dict)


class Watch:
    """Hooks on every block of a model for one forward, whatever the engine."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.width = model.hidden_size
        self.blocks = [layer._module for layer in model.layers]
        self.seen = [_Seen() for _ in self.blocks]
        self.hooks: list[Any] = []
        for block, seen in zip(self.blocks, self.seen, strict=True):
            self.hooks.append(
                block.register_forward_pre_hook(self._entering(seen), with_kwargs=True)
            )
            self.hooks.append(block.register_forward_hook(self._leaving(seen)))
            for name, child in block.named_children():
                self.hooks.append(child.register_forward_hook(self._adding(seen, name)))

    def _stream(self, found: Any) -> bool:
        return (
            isinstance(found, Tensor)
            and found.is_floating_point()
            and found.dim() in (2, 3)
            and found.shape[-1] == self.width
        )

    def _entering(self, seen: _Seen) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named: list[tuple[Where, Any]] = [*enumerate(args), *kwargs.items()]
            seen.enters = {at: x.detach().clone() for at, x in named if self._stream(x)}

        return hook

    def _leaving(self, seen: _Seen) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            parts = output if isinstance(output, (tuple, list)) else None
            named = [(WHOLE, output)] if parts is None else list(enumerate(parts))
            seen.leaves = {at: x.detach().clone() for at, x in named if self._stream(x)}

        return hook

    def _adding(self, seen: _Seen, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if self._stream(first):
                seen.adds[name] = first.detach().clone()

        return hook

    def verified(self, logits: Tensor, bound: float) -> Verified | None:
        """What the forward showed, or ``None`` where no stream chains through the blocks."""
        for hook in self.hooks:
            hook.remove()
        second_best = None
        for enters, leaves, error in self._streams(bound):
            last = _sum(self.seen[-1].leaves, leaves)
            lens = _row_error(self.model._project(last)[..., -1:, :], logits)
            adds, identity = self._contributions(enters, leaves, bound)
            errors = {"stream": error, **identity}
            if lens <= bound:
                errors["project_on_vocab"] = lens
            found = Verified(
                enters, leaves, adds[0], adds[1], last.dim() == 2, lens <= bound, errors
            )
            # Half of a stream chains as well as the whole; only the whole gives the logits. A
            # model that scales or caps its logits shows its stream by the identity alone.
            if found.lens:
                return found
            if identity and second_best is None:
                second_best = found
        return second_best

    def _streams(self, bound: float) -> Iterator[tuple[tuple[Where, ...], tuple[int, ...], float]]:
        """Every way in which what leaves a block is what enters the next, whole or in halves."""
        inner = self.seen[-1]
        for size in (1, 2):
            for leaves in combinations(inner.leaves, size):
                for enters in combinations(inner.enters, size):
                    pairs = list(zip(self.seen, self.seen[1:], strict=False))
                    if not all(
                        set(leaves) <= set(one.leaves) and set(enters) <= set(two.enters)
                        for one, two in pairs
                    ):
                        continue
                    error = max(
                        (
                            _row_error(_sum(one.leaves, leaves), _sum(two.enters, enters))
                            for one, two in pairs
                        ),
                        default=0.0,
                    )
                    # What a block passes on unchanged chains too; the stream moves.
                    moved = _row_error(_sum(inner.leaves, leaves), _sum(inner.enters, enters))
                    if error <= bound < moved:
                        yield enters, leaves, error

    def _contributions(
        self, enters: tuple[Where, ...], leaves: tuple[int, ...], bound: float
    ) -> tuple[tuple[str | None, str | None], dict[str, float]]:
        # The first block of a fused model has no second half yet.
        if not any(at in self.seen[0].enters for at in enters):
            return (None, None), {}
        names = [name for name in self.seen[0].adds if all(name in s.adds for s in self.seen)]
        for first, second in combinations(names, 2):
            errors = {}
            for i, seen in enumerate(self.seen):
                here = [at for at in enters if at in seen.enters]
                parts = _sum(seen.enters, here) + seen.adds[first] + seen.adds[second]
                errors[f"layers.{i}"] = _row_error(parts, _sum(seen.leaves, leaves))
            if max(errors.values()) <= bound:
                return (first, second), errors
        return (None, None), {}


def _sum(found: dict[Any, Tensor], parts: Any) -> Tensor:
    tensors = [found[part] for part in parts]
    return tensors[0] if len(tensors) == 1 else tensors[0] + tensors[1]


def _row_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().float(), expected.detach().float()
    if found.numel() != expected.numel():
        return float("inf")
    expected = expected.reshape(found.shape)
    scale = expected.abs().amax(-1).clamp_min(1e-30)
    return float(((found - expected).abs().amax(-1) / scale).max())


def _found(host: Any) -> Verified | None:
    found: Verified | None = host.root.__dict__.get("_verified")
    return found


def _batched(found: Verified, lens: Lens) -> Lens:
    return lens | Batched() if found.flat else lens


class GenericLayer(Layer):
    """A block of which the stream was found on the loaded model."""

    architecture: ClassVar[Architecture] = Architecture(model_type="generic")

    def _enters(self) -> Site | str:
        found = _found(self)
        if found is None:
            return UNVERIFIED
        parts = [Argument(at) for at in found.enters]
        lens = parts[0] if len(parts) == 1 else Halves(parts[0], parts[1])
        return Site(own("input"), _batched(found, lens))

    def _leaves(self) -> Site | str:
        found = _found(self)
        if found is None:
            return UNVERIFIED
        parts = [Lens() if at == WHOLE else Item(at) for at in found.leaves]
        lens = parts[0] if len(parts) == 1 else Halves(parts[0], parts[1])
        return Site(own("output"), _batched(found, lens))

    layer_input: layouts.Residual = value(_enters)
    layer_mid: layouts.Residual = unavailable(NOT_SERVED)
    layer_output: layouts.Residual = value(_leaves)


def _adds(host: Sublayer, name: str | None) -> Site | str:
    found = _found(host)
    if found is None:
        return UNVERIFIED
    if name is None:
        return (
            "no two modules of the block add up to what it adds to the stream, so what this one "
            "adds is not known"
        )
    return Site(beside(lambda _: name, "output"), _batched(found, First()))


class GenericAttention(Attention):
    """An attention of which only what it adds was found."""

    architecture: ClassVar[Architecture] = GenericLayer.architecture

    attention_input: layouts.Residual = unavailable(NOT_SERVED)
    attention_output: layouts.Residual = value(
        lambda host: _adds(host, getattr(_found(host), "attention_adds", None))
    )
    attention_queries: layouts.Queries = unavailable(NOT_SERVED)
    attention_keys: layouts.Keys = unavailable(NOT_SERVED)
    attention_values: layouts.Values = unavailable(NOT_SERVED)
    attention_scores: layouts.Pattern = unavailable(NOT_SERVED)
    attention_probabilities: layouts.Pattern = unavailable(NOT_SERVED)
    attention_head_outputs: layouts.HeadOutputs = unavailable(NOT_SERVED)


class GenericMlp(Mlp):
    """A feed-forward of which only what it adds was found."""

    architecture: ClassVar[Architecture] = GenericLayer.architecture

    mlp_input: layouts.Residual = unavailable(NOT_SERVED)
    mlp_output: layouts.Residual = value(
        lambda host: _adds(host, getattr(_found(host), "mlp_adds", None))
    )
    mlp_neurons: layouts.Neurons = unavailable(NOT_SERVED)


_SPELLINGS = {
    "layers": ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers"),
    "embed_tokens": (
        "model.embed_tokens",
        "transformer.wte",
        "gpt_neox.embed_in",
        "model.decoder.embed_tokens",
        "transformer.word_embeddings",
    ),
    "norm": (
        "model.norm",
        "model.final_layernorm",
        "transformer.ln_f",
        "gpt_neox.final_layer_norm",
        "model.decoder.final_layer_norm",
    ),
    "self_attn": ("attn", "attention", "self_attention"),
    "mlp": ("feed_forward", "ffn", "block_sparse_moe"),
}


def generic() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """``RENAME`` and ``ENVOYS`` of the generic family: the usual spellings, by path."""
    rename = {path: name for name, paths in _SPELLINGS.items() for path in paths}
    envoys = {
        "layers.*": GenericLayer,
        "layers.*.self_attn": GenericAttention,
        "layers.*.mlp": GenericMlp,
    }
    return rename, envoys


def adopt(model: Any, found: Verified) -> None:
    """Let ``model`` serve what was found on it."""
    model.__dict__["_verified"] = found
    model.__dict__.pop("_sites", None)
    for layer in model.layers:
        for host in (layer, getattr(layer, "self_attn", None), getattr(layer, "mlp", None)):
            if host is not None:
                host.__dict__.pop("_sites", None)


def watch_and_adopt(model: Any, bound: float) -> Verified | None:
    """Run inside a block: watch its forward, and let the model there serve what was found."""
    watch = Watch(model)
    with torch.no_grad():
        found = watch.verified(model.logits[:, -1:], bound)
    if found is not None:
        adopt(model, found)
    return found
