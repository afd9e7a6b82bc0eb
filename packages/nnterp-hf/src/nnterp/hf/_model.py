"""``StandardizedTransformer``: transformers, renamed to the standard vocabulary."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import nnsight
import torch
from nnsight.intervention.batching import Batcher
from nnsight.intervention.interleaver import Mediator, OutOfOrderError
from nnsight.intervention.tracer import InterleavingTracer, ScanningTracer
from nnsight.modeling.quantization import resolve_load_kwargs
from nnsight.modeling.transformers import TransformersModel
from nnsight.tracing.tracer import _saves, mark, push_result
from torch import Tensor
from torch._dynamo.eval_frame import OptimizedModule
from torch._guards import detect_fake_mode
from torch.nn import Module

from nnterp.core import Unavailable
from nnterp.core import _layouts as layouts
from nnterp.core.protocols import StandardModel
from nnterp.core.tracing import (
    KEEP,
    Apart,
    Argument,
    Block,
    Derived,
    Field,
    First,
    OutOfOrder,
    Scaled,
    Site,
    Standardized,
    checked_length,
    checked_path,
    container_envoys,
    has_tokenizer,
    is_chat,
    model_type_of,
    own,
    quantised_by,
    released,
    running,
    under,
    value,
)

from ._interior import NO_SOFTCAP


class RowBatcher(Batcher):
    """nnsight's batcher, which also knows the padding and leaves unedited values alone.

    Attributes:
        width: how many tokens the batch's rows have, padding included; 0 without a mask.
        pads: how many of them are padding, in front, row by row.
    """

    width: int = 0
    pads: Sequence[int] = ()

    def assemble(self, fn: Any) -> tuple[Any, Any]:
        args, kwargs = super().assemble(fn)
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return args, kwargs
        self.width = mask.shape[1]
        if detect_fake_mode() is not None:
            # A scan's tensors hold nothing; what the prompts lack is padding.
            self.pads = [
                0 if ids is None else self.width - len(ids)
                for inputs, kwargs in self.invokes
                for ids in self.envoy.prompts(*inputs)
                or [None] * self.envoy._batch_size(*inputs, **kwargs)
            ]
            return args, kwargs
        self.pads = (mask.cumsum(1) == 0).sum(1).tolist()
        if not mask[:, -1].all():
            raise ValueError(
                "a row ends in padding: values are laid out for padding in front, where the last "
                "position is every prompt's own; set the tokenizer's padding_side to 'left'"
            )
        return args, kwargs

    def widen(self, full: Any, group: Any, edited: Any) -> Any:
        if edited is KEEP:
            return full
        called = isinstance(edited, tuple) and len(edited) == 2 and isinstance(edited[1], dict)
        masked = called and edited[1].get("attention_mask") is not None
        if masked and full[1].get("attention_mask") is None:
            full = full[0], {**full[1], "attention_mask": _ones(full[1])}
        return super().widen(full, group, edited)

    def _widen_tensor(self, full: Tensor, group: Any, edited: Tensor) -> Tensor:
        if detect_fake_mode() is None and full.shape[0] == self.total:
            own = full.narrow(0, *group)
            if edited.shape == own.shape and edited.is_set_to(own):
                # Beside what was written: the very object, which a cache may hold too.
                return full
        widened: Tensor = super()._widen_tensor(full, group, edited)
        return widened


class ListingTracer(InterleavingTracer):
    """A tracer that gives a name saved by several invokes as a list, in invoke order."""

    def execute(self, code: Any) -> None:
        envoy = self.envoy
        frame = self.info.frame
        super().execute(code)
        found: dict[str, list[Any]] = {}
        for mediator in envoy.__dict__.pop("_blocks_run", ()):
            for name in mediator.lcls.written:
                if name in mediator.lcls and id(mediator.lcls[name]) in _saves():
                    found.setdefault(name, []).append(mediator.lcls[name])
        several = {
            name: mark(values)
            for name, values in found.items()
            if len(values) > 1 and any(one is not values[0] for one in values)
        }
        push_result(frame, several)


def _embeddings(host: Any) -> Site | str:
    if host.unembedded:
        return str(host.unembedded)
    at = under("embed_tokens", "output")
    # The Gemmas scale inside the embedding module; the table's rows are before it.
    if _embed_scale(host) is None:
        return Site(at)
    return Site(at, Scaled(lambda host: 1.0 / _embed_scale(host).to(host.dtype)))


def _embed_scale(host: Any) -> Any:
    # An adapter holds the module that it adapts.
    modules = host.get("embed_tokens")._module.modules()
    return next((one.embed_scale for one in modules if hasattr(one, "embed_scale")), None)


def _mask(host: Any) -> Site | str:
    return Site(own("input"), _Mask("attention_mask"))


def _ones(kwargs: dict[str, Any]) -> Tensor:
    """The mask that a generation without padding leaves out."""
    ids: Tensor = kwargs["input_ids"]
    # Since 5.24 transformers calls it cache.
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    past = 0 if cache is None else int(cache.get_seq_length())
    return ids.new_ones(ids.shape[0], past + ids.shape[1])


class _Mask(Argument):
    """The keyword argument ``attention_mask``, all ones where the model is called without."""

    def get(self, raw: Any, host: Any) -> Any:
        mask = raw[1].get("attention_mask")
        return _ones(raw[1]) if mask is None else mask

    def put(self, raw: Any, new: Any, host: Any) -> Any:
        return raw[0], {**raw[1], "attention_mask": new}


class _Ids(Argument):
    """The ids that the model was called with, unless it was called with embeddings."""

    def get(self, raw: Any, host: Any) -> Any:
        if raw[1].get("input_ids") is None and not raw[0]:
            raise Unavailable("the model was called with embeddings; there are no input_ids")
        return super().get(raw, host)


def _own_size(raw: Any, host: Any) -> tuple[int, int]:
    ids = raw[1].get("input_ids")
    if ids is None:
        ids = raw[1]["inputs_embeds"][..., 0]
    rows = host.own_rows(running(), layouts.TOKENS, ids)
    return tuple((ids if rows is None else ids[rows]).shape)


def _several(prompt: Any) -> bool:
    """Whether it is written as a list of prompts, be it of one."""
    if isinstance(prompt, Tensor) or hasattr(prompt, "__array__"):
        return bool(prompt.ndim > 1)
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and not is_chat(prompt)
        and isinstance(prompt[0], (str, list, tuple, Tensor))
    )


def _refuse_wrapped(module: Module) -> None:
    """A module that wraps a model hides the one whose names and class are known."""
    if any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__):
        raise ValueError(
            f"{type(module).__name__} wraps the model, and has other names for its modules; load "
            f"the checkpoint with peft=<the adapter's folder>, or pass merge_and_unload() of it"
        )
    for name, part in module.named_modules():
        if isinstance(part, OptimizedModule) or _has_compiled_forward(part):
            raise ValueError(
                f"torch.compile() wrapped {name or 'the model'}, or its forward; pass the model "
                f"without it, or compile in place with .compile()"
            )


def _has_compiled_forward(module: Module) -> bool:
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def _is_compiled(module: Module) -> bool:
    return module._compiled_call_impl is not None or _has_compiled_forward(module)


def _uncompiled(module: Module) -> contextlib.AbstractContextManager[Any]:
    """Runs what is compiled in ``module`` as it is written.

    A compiler that follows a forward into a block, and from one block into another, may leave
    the thread's autograd state behind: an edit is then not noticed.
    """
    if any(map(_is_compiled, module.modules())):
        stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return contextlib.nullcontext()


# Whose linear maps alone are others, at the same places: a value is what enters or leaves them.
_QUANTISED = ("bitsandbytes",)


def _refuse_quantised(config: Any, kwargs: dict[str, Any]) -> None:
    """Weights whose quantisation may change what the modules around them compute."""
    found = quantised_by(config, resolve_load_kwargs(kwargs).get("quantization_config"))
    if found is not None and found not in _QUANTISED:
        raise ValueError(
            f"the weights are quantised by {found!r}, under which no value was ever measured; load "
            f"plain weights, quantise them by dtype='int8' or 'nf4' ({', '.join(_QUANTISED)}), or "
            f"have transformers dequantise them, by dequantize=True in their quantization_config"
        )


class ListingScanner(ListingTracer, ScanningTracer):
    """The same of a scan, which runs without weights."""


class StandardizedTransformer(Standardized, TransformersModel, StandardModel):
    """A causal language model on transformers whose modules answer to the standard names.

    Args:
        repo_id: a model's name on the hub, a folder with a checkpoint, or a loaded module.
        family: the family to use instead of the one looked up: a module or any object with
            ``RENAME`` and ``ENVOYS``. The config is not read for it.
        rename: extra aliases, merged over the family's; a key given here wins.
        envoys: extra ``envoys=`` entries, merged over the family's; a key given here wins.
        tokenizer_kwargs: attributes to set on the tokenizer, ``padding_side`` for one.
        **kwargs: passed on to nnsight's ``TransformersModel`` and to transformers.

    Raises:
        UnsupportedFamily: no family is passed and none describes the checkpoint's model type.
        FileNotFoundError: ``repo_id`` is a path at which nothing is.
        ValueError: it wraps a model, as ``torch.compile`` and peft do, or its weights are
            quantised in a way under which no value was measured; with the way out.
    """

    engine = "hf"
    tokenizer: Any
    _batcher_class = RowBatcher

    def __init__(
        self,
        repo_id: str | os.PathLike[str] | Module,
        *args: Any,
        family: Any = None,
        rename: dict[Any, Any] | None = None,
        envoys: dict[Any, Any] | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(repo_id, os.PathLike):
            repo_id = os.fspath(repo_id)
        if isinstance(repo_id, str):
            checked_path(repo_id)

        if isinstance(repo_id, Module):
            _refuse_wrapped(repo_id)

        def model_type() -> str:
            if isinstance(repo_id, Module):
                return model_type_of(repo_id.config)
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(
                repo_id,
                revision=kwargs.get("revision"),
                trust_remote_code=kwargs.get("trust_remote_code", False),
            )
            # Before the weights are loaded.
            _refuse_quantised(config, kwargs)
            return model_type_of(config)

        self.family = self._family(family, model_type, self.engine)
        named = repo_id if isinstance(repo_id, str) else getattr(repo_id, "name_or_path", None)
        self._textless = kwargs.get("tokenizer") is None and not has_tokenizer(named)
        self._tokenizer_kwargs = tokenizer_kwargs or {}
        kwargs.setdefault("task", "text-generation")
        super().__init__(
            repo_id,
            *args,
            rename={**self.family.RENAME, **(rename or {})},
            envoys={**container_envoys(), **self.family.ENVOYS, **(envoys or {})},
            **kwargs,
        )
        _refuse_quantised(self.config, kwargs)
        if family is None and not hasattr(self.family, "check"):
            self._check_blocks()
        self._warn_of_softcap()

    # -- a checkpoint without a tokenizer ---------------------------------------

    @contextlib.contextmanager
    def _padded(self) -> Iterator[None]:
        """nnsight asks a tokenizer how to pad; here something answers where there is none."""
        if not self._textless:
            yield
            return
        self.tokenizer = SimpleNamespace(
            pad_token="", pad_token_id=0, padding_side="left", model_max_length=None
        )
        try:
            yield
        finally:
            self.tokenizer = None

    def _sync(self) -> None:
        # nnsight sets the tokenizer up again with the weights.
        super()._sync()
        for key, setting in self._tokenizer_kwargs.items():
            setattr(self.tokenizer, key, setting)

    def _loaded_preprocessors(self) -> set[str]:
        # Since 5.24 transformers does not say of text-generation where nnsight looks for it.
        needed: set[str] = super()._loaded_preprocessors()
        return needed | {"tokenizer"} if self.task == "text-generation" else needed

    def _load_meta(self, repo_id: str, *args: Any, **kwargs: Any) -> Module:
        with self._padded():
            module: Module = super()._load_meta(repo_id, *args, **kwargs)
        return module

    def _load(self, repo_id: str, *args: Any, **kwargs: Any) -> Module:
        with self._padded():
            module: Module = super()._load(repo_id, *args, **kwargs)
        return module

    def _wrap(self, module: Module, *args: Any, **kwargs: Any) -> Module:
        with self._padded():
            wrapped: Module = super()._wrap(module, *args, **kwargs)
        return wrapped

    def _warn_of_softcap(self) -> None:
        facts = self.architecture
        if facts is None or self.attn_implementation not in NO_SOFTCAP:
            return
        if facts.attention.softcap(self.text_config) is not None:
            warnings.warn(
                f"{self.model_name} caps its attention scores, and transformers' "
                f"{self.attn_implementation!r} attention applies no cap: the model computes "
                f"something else than it was trained to. Load it with "
                f"attn_implementation='eager'",
                stacklevel=3,
            )

    # -- values ----------------------------------------------------------------

    input_ids: layouts.TokenIds = value(Site(own("input"), _Ids("input_ids")))
    attention_mask: layouts.TokenIds = value(_mask)
    input_size: Any = value(
        Site(
            own("input"),
            Derived(_own_size, "write input_ids"),
        )
    )
    token_embeddings: layouts.Residual = value(_embeddings)
    final_norm_output: layouts.Residual = value(
        lambda host: host.no_norm or Site(under("norm", "output"), First())
    )
    lm_head_output: layouts.Logits = value(Site(under("lm_head", "output")))
    logits: layouts.Logits = value(Site(own("output"), Field("logits")))
    next_token_probs: layouts.Probabilities = value(
        Site(
            own("output"),
            Derived(lambda raw, host: raw["logits"][:, -1].softmax(-1), "write logits"),
        )
    )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        first: Tensor = next(self._module.parameters())
        return first.dtype

    # -- rows ------------------------------------------------------------------

    def starts(self, mediator: Any, keys: int) -> list[int]:
        """The position in its prompt of the first of ``keys`` positions, for each row of the
        block's prompts; it is negative where padding comes first."""
        batcher = self.interleaver.batcher
        if batcher is None or not batcher.width:
            return []
        pads = batcher.pads
        if mediator.batch_group is not None and batcher.batching:
            start, size = mediator.batch_group
            pads = pads[start : start + size]
        # A window's cache drops its oldest positions, the padding first.
        gone = max(0, batcher.width + Block.of(mediator).step - keys)
        return [gone - pad for pad in pads]

    def padding(self, mediator: Any, keys: int) -> list[int]:
        """How many of ``keys`` positions are padding in each row of the block's prompts."""
        return [max(0, -start) for start in self.starts(mediator, keys)]

    def own_rows(
        self, mediator: Any, layout: layouts.Layout, value: Tensor
    ) -> tuple[slice, ...] | None:
        batcher = self.interleaver.batcher
        if batcher is None or mediator.batch_group is None:
            return None
        if batcher.batching and value.shape[0] != mediator.batch_group[1]:
            raise Unavailable(
                "which rows are a prompt's own is not known where a batch of several prompts has "
                "more rows than prompts, as with beams or num_return_sequences: give one prompt "
                "to each trace"
            )
        if not any(batcher.pads):
            return None
        rows, cut = [slice(None)] * value.dim(), False
        for axis, name in enumerate(layout.axes):
            size = value.shape[axis]
            if name == "key" or (name in ("seq", "query") and size == batcher.width):
                # Prompts of one invoke keep the padding that lines them up with each other.
                pad = min(self.padding(mediator, size if name == "key" else batcher.width))
                if pad:
                    rows[axis], cut = slice(pad, None), True
        return tuple(rows) if cut else None

    # -- running ---------------------------------------------------------------

    @property
    def max_prompt_length(self) -> int | None:
        facts = self.architecture
        limit = None if facts is None else facts.learned_positions
        return None if limit is None else limit(self.text_config)

    def prompts(self, *inputs: Any) -> list[list[int]] | None:
        """The token ids of an invoke's prompts; ``None`` for what nnsight reads its own way.

        Raises:
            ValueError, TypeError: as :meth:`encode`, for each of them.
        """
        if len(inputs) != 1:
            return None
        prompt = inputs[0]
        if isinstance(prompt, Mapping):
            beyond = prompt.keys() - {"input_ids", "attention_mask"}
            if "inputs_embeds" in prompt or ("input_ids" in prompt and beyond):
                return None
            ids = prompt.get("input_ids", ())
            rows = ids if _several(ids) else ()
            # Several rows keep the padding they came with.
            return None if len(rows) > 1 else [self.encode(prompt)]
        several = prompt if _several(prompt) else [prompt]
        return [self.encode(one) for one in several] or [self.encode([])]

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        if len(inputs) == 1 and not isinstance(inputs[0], Mapping):
            return max(1, len(inputs[0])) if _several(inputs[0]) else 1
        return int(super()._batch_size(*inputs, **kwargs))

    def _batch(self, invokes: list[tuple[Any, Any]], fn: Any) -> tuple[Any, Any]:
        if getattr(fn, "__name__", None) == "pipe":
            piped: tuple[Any, Any] = super()._batch(invokes, fn)
            return piped
        encoded = [(self.prompts(*inputs), inputs, kwargs) for inputs, kwargs in invokes]
        with self._padded():
            assembled: tuple[Any, Any] = super()._batch(
                [
                    (inputs if ids is None else (ids if len(ids) > 1 else ids[0],), kwargs)
                    for ids, inputs, kwargs in encoded
                ],
                fn,
            )
        return assembled

    def trace(self, *inputs: Any, **kwargs: Any) -> Any:
        """nnsight's trace: one forward, with what it reads and writes in the block."""
        self._refuse_nested()
        kwargs.setdefault("tracer_cls", ListingTracer)
        nnsights: Any = super()
        return nnsights.trace(*inputs, **kwargs)

    def scan(self, *inputs: Any, fn: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        """nnsight's scan: the shapes of a forward, without its weights."""
        return ListingScanner(self, fn or self._call, *inputs, backend=backend, **kwargs)

    def prefill(self, *prompt: Any, **kwargs: Any) -> Any:
        """One forward over the whole prompt: ``with model.prefill(prompt) as tracer:``.

        Args:
            *prompt: a string, token ids, a tokenizer's output or chat messages; none, to give
                one with each ``tracer.invoke(...)``.
        """
        return self.trace(*prompt, **kwargs)

    def decode(self, *prompt: Any, max_new_tokens: int, **kwargs: Any) -> Any:
        """Greedy decoding: ``with model.decode(prompt, max_new_tokens=n) as tracer:``.

        Each token is the argmax of the raw logits; of ``generation_config`` only the end
        tokens are used. The first of ``tracer.iter`` is the prompt's step.

        Raises:
            ValueError: no token is asked for, or more than there are learned positions.
        """
        length = checked_length(max_new_tokens)
        return self.trace(*prompt, fn=self._greedy, max_new_tokens=length, **kwargs)

    def _greedy(self, *inputs: Any, **kwargs: Any) -> Any:
        from transformers import GenerationConfig

        limit, prompt = self.max_prompt_length, kwargs["input_ids"].shape[1]
        # The last token is made and not read.
        if limit is not None and prompt + kwargs["max_new_tokens"] - 1 > limit:
            raise ValueError(
                f"{prompt} tokens and {kwargs['max_new_tokens']} new ones do not fit: "
                f"{self.model_name} has at most {limit} positions"
            )
        model = self._module
        kept = model.generation_config
        ends = self.end_tokens
        model.generation_config = GenerationConfig(
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=kept.pad_token_id if kept.pad_token_id is not None else (ends or [0])[0],
        )
        over: dict[Mediator, Any] = {}
        interleaver = self.interleaver

        def leave(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
            # Beside a longer one transformers pads what has ended and goes on computing it.
            ended = torch.isin(tokens[:, -1], torch.tensor(ends, device=tokens.device))
            for block in interleaver.mediators:
                rows = block.batch_group
                if block.pending is not None and rows and ended[rows[0] : sum(rows)].all():
                    over[block], block.pending = block.pending, None
                    interleaver.reindex()
            return torch.zeros_like(ended)

        if ends:
            kwargs["stopping_criteria"] = [leave, *kwargs.get("stopping_criteria", ())]
        try:
            generated = model.generate(*inputs, **kwargs)
        finally:
            model.generation_config = kept
            for block, pending in over.items():
                block.pending = pending
                interleaver.reindex()
        return self.generator(generated, hook=True)

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a generation, from the checkpoint's generation config."""
        ends = self._module.generation_config.eos_token_id
        if ends is None:
            return []
        return [int(end) for end in (ends if isinstance(ends, (list, tuple)) else [ends])]

    def interleave(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = list(self.interleaver.mediators)
        for mediator in (*self._edits, *blocks):
            if type(mediator) is Mediator:
                mediator.__class__ = Apart
        try:
            with _uncompiled(self._module):
                result = super().interleave(fn, *args, **kwargs)
        except OutOfOrderError as error:
            raise error if isinstance(error, OutOfOrder) else _ours(error) from None
        for mediator in blocks:
            Block.of(mediator).check_late_edits()
            for name, kept in list(mediator.lcls.items()):
                if id(kept) in _saves() and (plain := released(kept)) is not kept:
                    mediator.lcls[name] = mark(plain)
        self.__dict__["_blocks_run"] = blocks
        return result

    # -- methods ---------------------------------------------------------------

    def order(self, layer: int | None = None) -> dict[str, int]:
        """In which order the forward passes the values; equal where they are read together.

        Measured on a forward of this model. Values have to be read in this order.

        Args:
            layer: a block's index for its values, under the keys of ``support(layer)``;
                without it the model's own values.

        Returns:
            Each available value's position, from 0.

        Raises:
            IndexError: there is no such layer.
        """
        passed = self._passed(layer)
        positions = {at: i for i, at in enumerate(sorted(set(passed.values())))}
        return {key: positions[at] for key, at in passed.items()}

    def rank(self, name: str, layer: int | None = None) -> tuple[int, int]:
        """A key to sort values of the whole model by, in the order of the forward.

        Args:
            name: a value's key, as in ``support(layer)``.
            layer: its block, or ``None`` for the model's own values.

        Returns:
            The block, ``-1`` before the first and ``num_layers`` after the last, and the
            position in there.

        Raises:
            Unavailable: the model does not serve it. KeyError: it is no standard value.
        """
        self.require(name if layer is None else f"layers.{layer}.{name}")
        if layer is not None:
            return layer % self.num_layers, self.order(layer)[name]
        passed = self._passed(None)
        first = min(self._passed(0).values())
        block = -1 if passed[name] <= first else self.num_layers
        return block, self.order()[name]

    def _passed(self, layer: int | None) -> dict[str, int]:
        """Where one forward passed each available value, as the number of the visit."""
        found = self.__dict__.setdefault("_order", {})
        if layer not in found:
            found[layer] = self._measure(layer)
        measured: dict[str, int] = found[layer]
        return measured

    def _measure(self, layer: int | None) -> dict[str, int]:
        block = None if layer is None else self.layers[layer]
        served = [key for key, reason in self.support(layer).items() if reason is None]
        if layer is None:
            served = [key for key in served if not key.startswith("layers.")]
        # Locations are listed in the order of their first visit, so the list starts empty.
        kept, self.interleaver.counts = self.interleaver.counts, {}
        try:
            with self.prefill([self.vocab_size - 1]):
                sites = prepared(self if block is None else block, served)
                self.logits  # noqa: B018 - a block that reads nothing does not run
                nnsight.save(sites)
            visits = {location: i for i, location in enumerate(self.interleaver.counts)}
        finally:
            self.interleaver.counts = kept
        return {key: visits[location] for key, location in sites.items()}

    def _project(self, hidden: Tensor) -> Tensor:
        if not self.dispatched:
            self.dispatch()
        logits: Tensor = self.lm_head(self._normed(hidden))
        facts = self.architecture
        if facts is not None and facts.logits is not None:
            logits = facts.logits(self.text_config, logits)
        return logits


def prepared(host: Any, keys: list[str]) -> dict[str, str]:
    """Run inside a block: the locations of values on a host or under it, made ready to be
    served."""
    found: dict[str, str] = {}
    for key in keys:
        path, _, name = key.rpartition(".")
        owner = getattr(host, path) if path else host
        site = getattr(type(owner), name).site(owner)
        if site.prepare is not None:
            site.prepare(owner)
        found[key] = site.at(owner)
    return found


def _ours(error: OutOfOrderError) -> OutOfOrder:
    ours = OutOfOrder(str(error))
    ours.__intervention_tb__ = getattr(error, "__intervention_tb__", error.__traceback__)
    return ours
