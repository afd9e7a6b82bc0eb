"""The oracle: plain transformers, in float32 with eager attention, watched with plain torch hooks.

Nothing here knows an engine of this project. A value is observed, and edited, where transformers
itself computes it: on module hooks, on the cache, and on the two operations that every eager
attention has in common (the product of queries and keys, and the softmax).
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache

from nnterp.core.testing.recipes import RECIPES, Recipe


@dataclass(frozen=True)
class Edit:
    """One edit of one value.

    Attributes:
        key: the value's standard path, as ``Record.get`` takes it.
        fn: takes the value in its standard layout, returns the new one: same shape and dtype. It
            is given a copy, so it may work in place. Where ``attention_scores`` are -inf the entry
            is masked, and -inf masks an entry.
        step: 0 for the prompt, 1 for the first decode step, ...
    """

    key: str
    fn: Callable[[Tensor], Tensor]
    step: int = 0


class Record:
    """What one run computed, step by step; an edited value is recorded as edited.

    Attributes:
        tokens: the greedy tokens, one for each decode step; an end token ends nothing.
    """

    def __init__(self, tokens: list[int], steps: list[dict[str, Tensor]]) -> None:
        self.tokens = tokens
        self._steps = steps

    def get(self, key: str, step: int = 0) -> Tensor:
        """A value of one step.

        With ``seq`` the tokens of the step (the whole prompt on step 0, then one) and ``all`` the
        tokens so far:

        - ``input_ids`` ``[1, seq]``, ``attention_mask`` ``[1, all]``;
        - ``token_embeddings``, ``final_norm_output`` ``[1, seq, hidden]``;
        - ``lm_head_output``, ``logits`` ``[1, seq, vocab]``, ``next_token_probs`` ``[1, vocab]``;
        - ``layers.I.layer_input``, ``.layer_mid``, ``.layer_output``,
          ``.self_attn.attention_input``, ``.self_attn.attention_output``, ``.mlp.mlp_input``,
          ``.mlp.mlp_output`` ``[1, seq, hidden]``;
        - ``layers.I.mlp.mlp_neurons`` ``[1, seq, neurons]``;
        - ``layers.I.self_attn.attention_queries`` ``[1, heads, seq, qk_head_dim]``,
          ``.attention_keys`` ``[1, kv_heads, seq, qk_head_dim]``, ``.attention_values``
          ``[1, kv_heads, seq, head_dim]``;
        - ``layers.I.self_attn.attention_scores``, ``.attention_probabilities``
          ``[1, heads, seq, all]``, masked scores -inf; a window masks and does not shorten;
        - ``layers.I.self_attn.attention_head_outputs`` ``[1, seq, heads, head_dim]``;
        - of a sparse block, instead of the neurons, ``layers.I.mlp.router_logits``
          ``[1, seq, experts]``, ``.expert_weights``, ``.expert_indices`` ``[1, seq, top_k]``,
          ``.expert_outputs`` ``[1, seq, top_k, hidden]``, ``.routed_output`` and, with a shared
          expert, ``.shared_expert_output`` ``[1, seq, hidden]``.

        Raises:
            KeyError: the step has no such value; the message lists those it has.
            IndexError: there is no such step.
        """
        values = self._step(step)
        if key not in values:
            raise KeyError(f"step {step} has no {key!r}; it has {', '.join(values)}")
        return values[key]

    def keys(self, step: int = 0) -> list[str]:
        """The paths of all values of one step, in the order in which they were computed.

        Raises:
            IndexError: there is no such step.
        """
        return list(self._step(step))

    def _step(self, step: int) -> dict[str, Tensor]:
        if not 0 <= step < len(self._steps):
            raise IndexError(f"there is no step {step}; there are {len(self._steps)}")
        return self._steps[step]


class Oracle:
    """One checkpoint in plain transformers.

    Args:
        path: the checkpoint's folder.
        recipe: its recipe, or the name of one of ``RECIPES``; only ``reference`` is read, so the
            recipe of a small checkpoint serves a real one of the same type.
        patch: the name of one of ``PATCHES``, a change to the model that reproduces what another
            implementation computes; None for plain transformers.

    Attributes:
        model: transformers' own model. Between two runs it carries no hook but a patch's.

    Raises:
        KeyError: no recipe or no patch has that name.
    """

    def __init__(self, path: Path, recipe: Recipe | str, *, patch: str | None = None) -> None:
        if isinstance(recipe, str):
            recipe = RECIPES[recipe]
        self.recipe = recipe
        self.reference = recipe.reference
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if patch is not None:
            if patch not in PATCHES:
                raise KeyError(f"no patch is called {patch!r}; there are {', '.join(PATCHES)}")
            PATCHES[patch](self.model)
        self.heads = int(self.model.config.num_attention_heads)
        self.kv_heads = int(getattr(self.model.config, "num_kv_heads", None) or self.heads)
        # Since 5.24 transformers calls it cache.
        taken = inspect.signature(self.model.forward).parameters
        self._cache = "cache" if "cache" in taken else "past_key_values"
        self._lock = threading.Lock()

    def run(self, ids: Sequence[int], steps: int = 0) -> Record:
        """One forward over a prompt, then greedy decode steps through the cache.

        Args:
            ids: the prompt's token ids.
            steps: how many decode steps follow.

        Raises:
            ValueError: the prompt is empty, or ``steps`` is negative.
        """
        return self.edited(ids, (), steps)

    def edited(self, ids: Sequence[int], edits: Sequence[Edit], steps: int = 0) -> Record:
        """``run`` with edits, so that everything computed later sees them, later steps too.

        Edits of one value are applied in the order given. A contribution is edited as it is added
        to the stream, keys and values before they enter the cache, ``layer_mid`` both in the
        residual and in what the second sublayer reads, ``token_embeddings`` before any scale.
        ``next_token_probs`` is read-only.

        Args:
            ids: the prompt's token ids.
            edits: what to change.
            steps: how many decode steps follow.

        Raises:
            KeyError: an edit's value does not exist in this model.
            ValueError: the prompt is empty, ``steps`` is negative, an edit's step is beyond it, a
                value is read-only, or an edit returned another shape or dtype.
        """
        if len(ids) == 0:
            raise ValueError("the prompt is empty")
        if steps < 0:
            raise ValueError(f"steps is {steps}; it cannot be negative")
        for edit in edits:
            if not 0 <= edit.step <= steps:
                raise ValueError(f"{edit.key} is edited on step {edit.step} of {steps}")
            if edit.key == "next_token_probs":
                raise ValueError("next_token_probs is read-only: edit logits")
        tap = _Tap(edits)
        with self._lock, torch.set_grad_enabled(False), self._watched(tap):
            tokens = self._forward(tap, ids, steps)
        tap.check_used()
        return Record(tokens, tap.steps)

    def _forward(self, tap: _Tap, ids: Sequence[int], steps: int) -> list[int]:
        cache = DynamicCache() if self.reference.latent else _WatchedCache(tap, self._expansion())
        step_ids = torch.tensor([list(ids)])
        mask = torch.ones_like(step_ids)
        tokens: list[int] = []
        for step in range(steps + 1):
            tap.begin()
            step_ids = tap.passed("input_ids", step_ids)
            mask = tap.passed("attention_mask", mask)
            output = self.model(
                input_ids=step_ids, attention_mask=mask, use_cache=True, **{self._cache: cache}
            )
            logits = tap.passed("logits", output.logits)
            tap.passed("next_token_probs", logits[:, -1].softmax(-1))
            if step < steps:
                step_ids = logits[:, -1:].argmax(-1)
                mask = torch.cat([mask, torch.ones_like(step_ids)], dim=1)
                tokens.append(int(step_ids))
        return tokens

    def _expansion(self) -> int:
        """How often transformers repeats each key head before the cache."""
        return self.heads // self.kv_heads if self.reference.keys_expanded else 1

    @contextmanager
    def _watched(self, tap: _Tap) -> Iterator[None]:
        """The model with every hook in place, taken out again at the end."""
        where = self.reference
        with ExitStack() as stack:
            hooks: list[Any] = []
            stack.callback(_remove, hooks)
            hooks.append(self._watch_embedding(tap, self._module(where.embedding)))
            if where.final_norm is not None:
                norm = self._module(where.final_norm)
                hooks.append(_watch_output(tap, "final_norm_output", norm))
            hooks.append(_watch_output(tap, "lm_head_output", self._module(where.head)))
            for index, block in enumerate(self._module(where.blocks)):
                hooks += self._watch_block(tap, index, block)
                attention = block.get_submodule(where.attention)
                prefix = f"layers.{index}.self_attn"
                stack.enter_context(_watched_attention(tap, prefix, attention, where.sinks))
                if where.latent:
                    stack.enter_context(_watched_expansion(tap, prefix, attention))
                if self._is_sparse(block):
                    stack.enter_context(self._watched_mixture(tap, f"layers.{index}.mlp", block))
            yield

    def _is_sparse(self, block: Any) -> bool:
        where = self.reference.mixture
        return where is not None and _submodule(block, where.experts) is not None

    @contextmanager
    def _watched_mixture(self, tap: _Tap, prefix: str, block: Any) -> Iterator[None]:
        where = self.reference.mixture
        assert where is not None
        router = block.get_submodule(where.router)
        experts = block.get_submodule(where.experts)
        if where.weighted_input:
            mixture = block.get_submodule(self.reference.mlp_added)
            with _watched_weighted_input(tap, prefix, mixture):
                yield
            return
        factor = 1.0 if (name := self.reference.multiplier) is None else float(getattr(block, name))
        hooks = [
            _watch_output(tap, f"{prefix}.expert_weights", router, part=where.weights),
            _watch_output(tap, f"{prefix}.expert_indices", router, part=where.indices),
            _watch_output(tap, f"{prefix}.routed_output", experts, factor),
        ]
        if where.shared is not None:
            gate = None if where.shared_gate is None else block.get_submodule(where.shared_gate)
            shared = block.get_submodule(where.shared)
            hooks.append(_watch_gated(tap, f"{prefix}.shared_expert_output", shared, gate, factor))
        try:
            with (
                _watched_router(tap, f"{prefix}.router_logits", router),
                _one_by_one(tap, f"{prefix}.expert_outputs", experts, factor),
            ):
                yield
        finally:
            _remove(hooks)

    def _module(self, path: str) -> Any:
        return self.model.get_submodule(path)

    def _watch_embedding(self, tap: _Tap, module: Any) -> Any:
        attribute = self.reference.embedding_scale

        def hook(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            rows = functional.embedding(args[0], module.weight)
            edited = tap("token_embeddings", rows)
            if edited is None:
                return None
            scaled = edited if attribute is None else edited * getattr(module, attribute)
            # A row that was left alone stays bit-equal.
            return torch.where(edited == rows, output, scaled)

        return module.register_forward_hook(hook)

    def _watch_block(self, tap: _Tap, index: int, block: Any) -> list[Any]:
        where, prefix = self.reference, f"layers.{index}"
        factor = 1.0 if where.multiplier is None else float(getattr(block, where.multiplier))
        added_a = block.get_submodule(where.attention_added)
        added_m = block.get_submodule(where.mlp_added)
        key_a, key_m = f"{prefix}.self_attn.attention_output", f"{prefix}.mlp.mlp_output"
        hooks = [
            _watch_input(tap, f"{prefix}.layer_input", block),
            _watch_output(tap, f"{prefix}.layer_output", block),
            _watch_input(
                tap, f"{prefix}.self_attn.attention_input", block.get_submodule(where.attention)
            ),
            _watch_output(tap, key_a, added_a, factor),
            _watch_output(tap, key_m, added_m, factor),
            _watch_heads(
                tap,
                f"{prefix}.self_attn.attention_head_outputs",
                block.get_submodule(where.projection),
                self.heads,
            ),
        ]
        if not self._is_sparse(block):
            down = block.get_submodule(where.down)
            hooks.append(_watch_input(tap, f"{prefix}.mlp.mlp_neurons", down))
        if where.middle is not None:
            side, path = where.middle
            watch = _watch_shared_input if side == "input" else _watch_output
            hooks.append(watch(tap, f"{prefix}.layer_mid", block.get_submodule(path)))
        # After the one above: the feed-forward may be entered where the stream between lies.
        entered = block.get_submodule(where.mlp_entered)
        hooks.append(_watch_input(tap, f"{prefix}.mlp.mlp_input", entered))
        return hooks


class _Tap:
    """Records every value and applies the edits."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.editing = False
        self._edits = edits
        self._used: set[int] = set()

    def begin(self) -> None:
        self.steps.append({})

    def __call__(self, key: str, value: Tensor) -> Tensor | None:
        """Record a value in its standard layout; the edited one, or None if nothing edits it."""
        values, edited = self.steps[-1], None
        if key in values:
            raise RuntimeError(f"{key} was computed twice in one step: the reference is wrong")
        for index, edit in enumerate(self._edits):
            if edit.key == key and edit.step == len(self.steps) - 1:
                self._used.add(index)
                edited = self._apply(edit, value if edited is None else edited)
        # A copy: the model may go on to change the tensor in place.
        values[key] = (value if edited is None else edited).detach().clone()
        return edited

    def passed(self, key: str, value: Tensor) -> Tensor:
        """Record a value; the edited one, or the value itself."""
        edited = self(key, value)
        return value if edited is None else edited

    def _apply(self, edit: Edit, value: Tensor) -> Tensor:
        # What the function computes is none of the attention's own operations.
        self.editing = True
        try:
            edited = edit.fn(value.clone())
        finally:
            self.editing = False
        if not isinstance(edited, Tensor):
            raise ValueError(f"the edit of {edit.key} returned {type(edited).__name__}")
        if edited.shape != value.shape or edited.dtype != value.dtype:
            raise ValueError(
                f"the edit of {edit.key} turned {tuple(value.shape)} {value.dtype} into "
                f"{tuple(edited.shape)} {edited.dtype}"
            )
        return edited

    def check_used(self) -> None:
        for index, edit in enumerate(self._edits):
            if index not in self._used:
                known = ", ".join(self.steps[edit.step])
                raise KeyError(f"nothing is called {edit.key!r} here; there are {known}")


class _WatchedCache(DynamicCache):
    """transformers' cache, keeping every key whatever the window, watched where it is filled."""

    def __init__(self, tap: _Tap, expansion: int) -> None:
        # Without a configuration every layer keeps all keys; the masks still hold the window.
        super().__init__()
        self._tap = tap
        self._expansion = expansion

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        prefix = f"layers.{layer_idx}.self_attn"
        keys = self._watch(f"{prefix}.attention_keys", key_states)
        values = self._watch(f"{prefix}.attention_values", value_states)
        whole: tuple[Tensor, Tensor] = super().update(keys, values, layer_idx, *args, **kwargs)
        return whole

    def _watch(self, key: str, native: Tensor) -> Tensor:
        edited = self._tap(key, native[:, :: self._expansion])
        if edited is None:
            return native
        return edited.repeat_interleave(self._expansion, dim=1)


class _AttentionMode(TorchFunctionMode):
    """Watches one forward of an eager attention.

    Its first product of two four-dimensional tensors is that of queries and keys; its one softmax
    turns the scores into the pattern. With sinks, the scores are what a column for them is put
    beside, and the pattern is what is left without it, which a dropout takes.
    """

    def __init__(
        self, tap: _Tap, prefix: str, heads_of: Callable[[Tensor], Tensor], sinks: bool
    ) -> None:
        super().__init__()
        self.seen_queries = False
        self.seen_scores = False
        self._sinks = sinks
        self._tap = tap
        self._prefix = prefix
        self._heads_of = heads_of

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._tap.editing:
            return func(*args, **kwargs)
        if not self.seen_queries and func in _PRODUCTS and args[0].ndim == args[1].ndim == 4:
            self.seen_queries = True
            queries = self._tap.passed(f"{self._prefix}.attention_queries", args[0])
            return func(queries, *args[1:], **kwargs)
        if not self.seen_queries and func is Tensor.baddbmm:
            self.seen_queries = True
            flat = kwargs["batch1"]
            edited = self._tap(f"{self._prefix}.attention_queries", self._heads_of(flat))
            if edited is not None:
                kwargs = kwargs | {"batch1": edited.reshape(flat.shape)}
            return func(*args, **kwargs)
        if self._sinks and self.seen_queries and func is torch.cat:
            self.seen_scores = True
            scores, column = args[0]
            return func([self._scores(scores), column], *args[1:], **kwargs)
        if self._sinks and self.seen_scores and func is functional.dropout:
            pattern = func(*args, **kwargs)
            return self._tap.passed(f"{self._prefix}.attention_probabilities", pattern)
        if not self._sinks and func is functional.softmax:
            self.seen_scores = True
            pattern = func(self._scores(args[0]), *args[1:], **kwargs)
            return self._tap.passed(f"{self._prefix}.attention_probabilities", pattern)
        return func(*args, **kwargs)

    def _scores(self, native: Tensor) -> Tensor:
        lowest = torch.finfo(native.dtype).min
        # The mask is a sum with the dtype's minimum, which swallows the score itself.
        scores = native.masked_fill(native <= lowest / 2, -torch.inf)
        edited = self._tap(f"{self._prefix}.attention_scores", scores)
        return native if edited is None else edited.masked_fill(edited == -torch.inf, lowest)


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


@contextmanager
def _watched_attention(tap: _Tap, prefix: str, attention: Any, sinks: bool) -> Iterator[None]:
    native = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Only an attention that folds heads into the batch is asked for them, and it has them.
        mode = _AttentionMode(
            tap,
            prefix,
            lambda flat: flat.reshape(-1, attention.num_heads, *flat.shape[1:]),
            sinks,
        )
        with mode:
            output = native(*args, **kwargs)
        if not (mode.seen_queries and mode.seen_scores):
            raise RuntimeError(f"the eager attention of {prefix} was not recognized")
        return output

    with _replaced(attention, forward):
        yield


@contextmanager
def _watched_expansion(tap: _Tap, prefix: str, attention: Any) -> Iterator[None]:
    """Keys and values as latents are expanded to them, those of the step's own tokens.

    The cache does not hold them, so what was edited is put in its place again in every step.
    """
    native = attention.expand_kv
    written: dict[str, Tensor] = {}

    def own(name: str, whole: Tensor) -> Tensor:
        count = tap.steps[-1]["input_ids"].shape[1]
        if name in written:
            whole = torch.cat([written[name], whole[:, :, written[name].shape[2] :]], 2)
        edited = tap(f"{prefix}.{name}", whole[:, :, -count:])
        if edited is not None:
            whole = written[name] = torch.cat([whole[:, :, :-count], edited], 2)
        return whole

    def expand_kv(*latents: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = native(*latents)
        return own("attention_keys", keys), own("attention_values", values)

    attention.expand_kv = expand_kv
    try:
        yield
    finally:
        del attention.expand_kv


def _watch_input(tap: _Tap, key: str, module: Any) -> Any:
    """A module's first argument; an edit reaches that module alone."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        native = args[0] if args else kwargs["hidden_states"]
        edited = tap(key, _with_batch(native))
        if edited is None:
            return None
        edited = edited.reshape(native.shape)
        if args:
            return (edited, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": edited}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _watch_shared_input(tap: _Tap, key: str, module: Any) -> Any:
    """A module's argument that is also kept as the residual: an edit in place reaches both."""

    def hook(module: Any, args: tuple[Any, ...]) -> None:
        edited = tap(key, _with_batch(args[0]))
        if edited is not None:
            args[0].copy_(edited.reshape(args[0].shape))

    return module.register_forward_pre_hook(hook)


def _watch_output(tap: _Tap, key: str, module: Any, factor: float = 1.0, part: int = 0) -> Any:
    """A module's output, or one part of it, times a factor that the block applies."""

    def hook(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        native = output[part] if isinstance(output, tuple) else output
        value = _with_batch(native) if factor == 1.0 else _with_batch(native) * factor
        edited = tap(key, value)
        if edited is None:
            return None
        if factor != 1.0:
            # An entry that was left alone stays bit-equal.
            edited = torch.where(edited == value, _with_batch(native), edited / factor)
        edited = edited.reshape(native.shape)
        if not isinstance(output, tuple):
            return edited
        return (*output[:part], edited, *output[part + 1 :])

    return module.register_forward_hook(hook)


def _watch_gated(tap: _Tap, key: str, module: Any, gate: Any, factor: float) -> Any:
    """A module's output times the sigmoid of a projection of its input, if there is one."""

    def hook(module: Any, args: tuple[Any, ...], output: Tensor) -> Any:
        scale = factor if gate is None else factor * gate(args[0]).sigmoid()
        value = _with_batch(output * scale)
        edited = tap(key, value)
        if edited is None:
            return None
        kept = (edited == value).reshape(output.shape)
        return torch.where(kept, output, edited.reshape(output.shape) / scale)

    return module.register_forward_hook(hook)


class _RouterMode(TorchFunctionMode):
    """Watches the first linear map of a router's forward."""

    def __init__(self, tap: _Tap, key: str) -> None:
        super().__init__()
        self.seen = False
        self._tap = tap
        self._key = key

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.seen or self._tap.editing or func is not functional.linear:
            return result
        self.seen = True
        return self._tap.passed(self._key, result[None])[0]


@contextmanager
def _watched_router(tap: _Tap, key: str, router: Any) -> Iterator[None]:
    native = router.forward

    def forward(*args: Any) -> Any:
        with _RouterMode(tap, key) as mode:
            output = native(*args)
        if not mode.seen:
            raise RuntimeError(f"the router of {key} was not recognized")
        return output

    with _replaced(router, forward):
        yield


@contextmanager
def _one_by_one(tap: _Tap, key: str, experts: Any, factor: float) -> Iterator[None]:
    """The experts, each token and each of its experts apart."""

    def forward(tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        outputs = tokens.new_zeros(*indices.shape, tokens.shape[-1])
        for index in range(experts.num_experts):
            chosen = indices == index
            outputs[chosen] = _expert(experts, index, tokens[chosen.nonzero()[:, 0]])
        value = outputs[None] * factor
        edited = tap(key, value)
        if edited is not None:
            outputs = torch.where(edited == value, outputs[None], edited / factor)[0]
        return (outputs * weights[..., None]).sum(1).to(tokens.dtype)

    with _replaced(experts, forward):
        yield


@contextmanager
def _watched_weighted_input(tap: _Tap, prefix: str, mixture: Any) -> Iterator[None]:
    """A mixture that scales what enters an expert, one expert after the other."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden.flatten(0, -2)
        found = functional.linear(tokens, mixture.router.weight)
        logits = tap.passed(f"{prefix}.router_logits", found[None])[0]
        values, indices = logits.topk(mixture.top_k)
        weights = tap.passed(f"{prefix}.expert_weights", values.sigmoid()[None])[0]
        indices = tap.passed(f"{prefix}.expert_indices", indices[None])[0]
        routed = torch.zeros_like(tokens)
        experts = mixture.experts
        for token, place in itertools.product(range(len(tokens)), range(mixture.top_k)):
            index = indices[token, place]
            entering = tokens[token] * weights[token, place]
            gate, up = (entering @ experts.gate_up_proj[index]).chunk(2)
            routed[token] += (up * experts.act_fn(gate)) @ experts.down_proj[index]
        shared = mixture.shared_expert(tokens)
        shared = tap.passed(f"{prefix}.shared_expert_output", shared[None])[0]
        routed = tap.passed(f"{prefix}.routed_output", routed[None])[0]
        return shared + routed, logits

    with _replaced(mixture, forward):
        yield


def _expert(experts: Any, index: int, tokens: Tensor) -> Tensor:
    def project(name: str, entering: Tensor) -> Tensor:
        weight = getattr(experts, name)[index]
        bias = getattr(experts, f"{name}_bias")[index] if experts.has_bias else 0.0
        projected: Tensor = entering @ (weight if experts.is_transposed else weight.T) + bias
        return projected

    neurons = experts._apply_gate(project("gate_up_proj", tokens))
    return project("down_proj", neurons)


@contextmanager
def _replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        # The class's own method shows again.
        del module.forward


def _submodule(block: Any, path: str) -> Any:
    """The module at a path, or None."""
    for name in path.split("."):
        block = getattr(block, name, None)
    return block


def _watch_heads(tap: _Tap, key: str, projection: Any, heads: int) -> Any:
    """The input of the output projection, one axis for the heads."""

    def hook(module: Any, args: tuple[Any, ...]) -> Any:
        edited = tap(key, args[0].unflatten(-1, (heads, -1)))
        return None if edited is None else (edited.flatten(-2), *args[1:])

    return projection.register_forward_pre_hook(hook)


def _with_batch(value: Tensor) -> Tensor:
    # Some feed-forwards fold the batch, of one prompt here, into the positions.
    return value.unsqueeze(0) if value.ndim == 2 else value


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _bloom_exact_gelu(model: Any) -> None:
    """BLOOM with the exact GELU for its tanh approximation."""
    for block in model.transformer.h:
        block.mlp.gelu_impl = nn.GELU()


def _falcon_alibi_once(model: Any) -> None:
    """Falcon's eager attention with the ALiBi term added once, as its sdpa attention does."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # The mask holds the term already.
        return args, kwargs | {"alibi": torch.zeros_like(kwargs["alibi"])}

    for block in model.transformer.h:
        block.self_attention.register_forward_pre_hook(hook, with_kwargs=True)


def _window_one_longer(model: Any) -> None:
    """A sliding window that holds one more token."""
    # The masks are made from the configuration.
    model.config.sliding_window += 1


def _no_attention_softcap(model: Any) -> None:
    """Scores without a softcap, as transformers' sdpa attention computes them."""
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None) is not None:
            module.attn_logit_softcapping = None


def _no_head_bias(model: Any) -> None:
    """A projection on the vocabulary without its bias."""
    model.lm_head.bias = None


PATCHES: dict[str, Callable[[Any], None]] = {
    "bloom_exact_gelu": _bloom_exact_gelu,
    "falcon_alibi_once": _falcon_alibi_once,
    "no_attention_softcap": _no_attention_softcap,
    "no_head_bias": _no_head_bias,
    "window_one_longer": _window_one_longer,
}
"""Changes to a loaded model, by name, that reproduce what another implementation computes."""
