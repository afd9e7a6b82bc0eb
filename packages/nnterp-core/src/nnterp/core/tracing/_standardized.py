"""What both engines' models share: sizes, questions, methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import nnsight
import torch
from torch import Tensor

from .. import families as registry
from .._errors import Unavailable, UnsupportedFamily, WrongShape
from .._layouts import Layout
from .._vocabulary import VOCABULARY, terms
from ..architectures import Architecture
from ._generic import NO_LENS, NOT_SERVED, UNVERIFIED, Verified, adopt, watch_and_adopt
from ._hosts import Layer, Named
from ._lenses import First
from ._prompts import encode
from ._values import Step, Value

# The largest error of the identity and of the lens that rounding explains, by dtype.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

# Torch takes bytes for a mask, and has no comparisons of the unsigned others.
_POSITIONS = (torch.int8, torch.int16, torch.int32, torch.int64)

_FIRST = First()
_PLAIN = Architecture(model_type="")


def checked_path(repo_id: str) -> str:
    """``repo_id`` itself, or a clear error where it is a path at which nothing is.

    Raises:
        FileNotFoundError: it is written as a path and does not exist.
    """
    looks_local = repo_id.startswith((".", "/", "~")) or repo_id.count("/") > 1
    if looks_local and not Path(repo_id).expanduser().exists():
        raise FileNotFoundError(f"no checkpoint at {repo_id!r}: the path does not exist")
    return repo_id


def has_tokenizer(source: Any) -> bool:
    """Whether the folder ``source`` has a tokenizer's files; of what is no folder, True."""
    folder = Path(str(source))
    if not source or not folder.is_dir():
        return bool(source)  # on the hub, or in its cache: loading it says what it cannot find
    names = {path.name for path in folder.iterdir()}
    known = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}
    return bool(names & known) or any(name.endswith((".tiktoken", ".gguf")) for name in names)


def model_type_of(config: Any) -> str:
    """The model type that families are looked up by: the text model's own."""
    text = config.get_text_config()
    model_type: str = text.model_type
    return model_type


def quantised_by(config: Any, given: Any = None) -> str | None:
    """How weights are quantised, by transformers' name of the method; ``None`` for plain ones.

    Args:
        config: the checkpoint's config.
        given: the ``quantization_config`` that the model is loaded with, which goes first.
    """
    found = given
    for one in (config, config.get_text_config()):
        found = found or getattr(one, "quantization_config", None)
    if not found:
        return None
    settings = found if isinstance(found, Mapping) else vars(found)
    if settings.get("dequantize"):
        return None
    method = settings.get("quant_method") or type(found).__name__
    return str(getattr(method, "value", method))


def checked_length(max_new_tokens: int) -> int:
    """``max_new_tokens`` itself.

    Raises:
        ValueError: it is less than one.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; a generation is of one at least")
    return max_new_tokens


class Standardized(Named):
    """A model whose modules and values answer to the standard names.

    The base of ``StandardizedTransformer`` and ``StandardizedVLLM``, beside the engine's own
    model class.

    Attributes:
        family: the family the checkpoint resolved to, or the one passed.
        engine: the engine's name.
    """

    kind = "model"
    engine: ClassVar[str]
    family: Any
    label: ClassVar[str] = ""

    @property
    def block(self) -> Any:
        """There is none: values of the model are under no block."""
        raise AttributeError("the model itself is in no block")

    @property
    def architecture(self) -> Architecture | None:
        """The facts its family names, or ``None`` for a family of the caller's without any."""
        facts: Architecture | None = getattr(self.family, "ARCHITECTURE", None)
        return None if facts is None else facts.of(self.text_config)

    @property
    def model_name(self) -> str:
        """The family and engine, for messages: ``"llama on vllm"``."""
        facts = self.architecture
        name = facts.model_type if facts else getattr(self.family, "__name__", "a custom family")
        return f"{name} on {self.engine}"

    @property
    def no_norm(self) -> str | None:
        """Why the final norm's output is not served, or ``None`` where it is."""
        facts = self.architecture
        if facts is not None and facts.norm is None:
            return "this model has no final norm"
        return self.unverified

    @property
    def unembedded(self) -> str | None:
        """Why the embedding table's rows are not served, or ``None`` where they are."""
        return NOT_SERVED if getattr(self.family, "GENERIC", False) else None

    @property
    def unverified(self) -> str | None:
        """Why what is before and after the blocks is not served, or ``None`` where it is.

        The lens shows both of a generic family: the stream that the head takes, normed.
        """
        if not getattr(self.family, "GENERIC", False):
            return None
        found: Verified | None = self.__dict__.get("_verified")
        if found is None:
            return UNVERIFIED
        return None if found.lens else NO_LENS

    @property
    def text_config(self) -> Any:
        """The config of the text model: the config itself unless it wraps one."""
        return self.config.get_text_config()

    @property
    def config(self) -> Any:
        """The checkpoint's transformers config, as the engine's model holds it."""
        return self._module.config

    @staticmethod
    def _family(family: Any, model_type: Any, engine: str) -> Any:
        found = registry.lookup(model_type(), engine) if family is None else family
        return registry.checked(found)

    def _check_blocks(self) -> None:
        """Refuse an implementation whose blocks the family that was looked up does not name."""
        blocks = [block for block in getattr(self, "layers", ()) if not isinstance(block, Layer)]
        if blocks:
            found = ", ".join(sorted({type(block._module).__name__ for block in blocks}))
            raise UnsupportedFamily(
                f"{self.model_name} was loaded with blocks of another implementation, {found}, "
                f"which its family does not describe; pass family= for it"
            )

    def _refuse_nested(self) -> None:
        if self.interleaver.interleaving:
            raise RuntimeError(
                "a trace of this model was opened inside a block that is running in it; open it "
                "after that block, or give both prompts to one trace with tracer.invoke(...)"
            )

    def _remote_backend(self, *args: Any) -> Any:
        raise ValueError(
            "remote= is not supported: a remote server runs nnsight's own model classes, which "
            "have no standard names; load the model here, or trace it there by nnsight's names"
        )

    # -- sizes -----------------------------------------------------------------

    def _size(self, name: str, default: Any) -> int:
        function = getattr(self.family, name, None)
        return int(function(self) if function is not None else default())

    @property
    def num_layers(self) -> int:
        """The number of decoder blocks."""
        return self._size("num_layers", lambda: len(self.layers))

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self._size("hidden_size", lambda: self.text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        return self._size("vocab_size", lambda: self.text_config.vocab_size)

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self._size("num_heads", lambda: self.text_config.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        """The number of key and value heads."""
        return self._size(
            "num_kv_heads",
            lambda: (self.architecture or _PLAIN).num_kv_heads(self.text_config),
        )

    @property
    def head_dim(self) -> int:
        """The width of a value head."""
        return self._size(
            "head_dim", lambda: (self.architecture or _PLAIN).head_dim(self.text_config)
        )

    @property
    def qk_head_dim(self) -> int:
        """The width of a query or key head."""
        return self._size(
            "qk_head_dim", lambda: (self.architecture or _PLAIN).qk_head_dim(self.text_config)
        )

    @property
    def intermediate_size(self) -> int:
        """The number of neurons of a dense MLP."""
        return self._size(
            "intermediate_size",
            lambda: (self.architecture or _PLAIN).intermediate_size(self.text_config),
        )

    # -- asking ----------------------------------------------------------------

    def support(self, layer: int | None = None, *, step: Step = "prefill") -> dict[str, str | None]:
        """Which values this model serves: ``None`` where it does, else the reason.

        Args:
            layer: a block's index for its keys (``layer_input``, ``self_attn.attention_output``);
                without it the model's own values and every block's, under ``layers.*.`` where
                all blocks agree and under their index where they differ.
            step: which kind of step it is asked for.

        Raises:
            IndexError: there is no such layer.
        """
        if layer is not None:
            return self._layer_support(self.layers[layer], step)
        found: dict[str, str | None] = {
            value.name: value.reason(self, step) for value in self.standard_values()
        }
        blocks = [self._layer_support(block, step) for block in self.layers]
        for key in blocks[0] if blocks else ():
            answers = [block[key] for block in blocks]
            if len(set(answers)) == 1:
                found[f"layers.*.{key}"] = answers[0]
            else:
                found |= {f"layers.{i}.{key}": answer for i, answer in enumerate(answers)}
        return found

    @staticmethod
    def _layer_support(block: Any, step: Step) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for kind in ("layer", "self_attn", "linear_attn", "mlp"):
            try:
                host = block if kind == "layer" else getattr(block, kind)
            except Unavailable:
                reason = type(block).absent[kind]
                found |= {f"{kind}.{term.name}": reason for term in terms(kind)}
                continue
            except AttributeError:  # the block is of a class that the family does not name
                reason = f"no family describes {type(block._module).__name__}"
                found |= {f"{kind}.{term.name}": reason for term in terms(kind)}
                continue
            for term in terms(kind):
                key = term.name if kind == "layer" else f"{kind}.{term.name}"
                value: Value | None = getattr(type(host), term.name, None)
                found[key] = (
                    f"no family describes {type(host._module).__name__}"
                    if value is None
                    else value.reason(host, step)
                )
        return found

    def require(self, *keys: str, step: Step = "prefill") -> None:
        """Check up front that every key is served, ``"layers.*.layer_output"`` for all blocks.

        Raises:
            Unavailable: some are not; the message has every reason.
            KeyError: a key is no standard value.
        """
        problems: list[str] = []
        for key in keys:
            if VOCABULARY.get(key.rsplit(".", 1)[-1]) is None:
                raise KeyError(f"{key!r} is no standard value")
            if not key.startswith("layers."):
                answers = {key: self.support(step=step).get(key, "it is not on the model itself")}
            else:
                _, which, rest = key.split(".", 2)
                indices = range(self.num_layers) if which == "*" else [int(which)]
                answers = {
                    f"layers.{i}.{rest}": self.support(i, step=step).get(rest, "not on a block")
                    for i in indices
                }
            problems += [f"{name}: {reason}" for name, reason in answers.items() if reason]
        if problems:
            raise Unavailable(f"{self.model_name} does not serve " + "; ".join(problems))

    # -- running ---------------------------------------------------------------

    @property
    def max_prompt_length(self) -> int | None:
        """The most tokens a prompt may have, or ``None`` where nothing limits it."""
        raise NotImplementedError

    def encode(self, prompt: Any) -> list[int]:
        """The token ids of a prompt, as every trace of this model takes it.

        Raises:
            ValueError: it is empty, too long, holds several prompts or an id that is not in the
                vocabulary, or is text and there is no tokenizer.
            TypeError: it is no prompt.
        """
        ids = encode(prompt, self.tokenizer)
        vocabulary = self.text_config.vocab_size
        for token in ids:
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"token id {token} is not in the vocabulary of {self.model_name}, which has "
                    f"{vocabulary} tokens"
                )
        limit = self.max_prompt_length
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and {self.model_name} takes at most {limit}"
            )
        return ids

    def own_rows(self, mediator: Any, layout: Layout, value: Tensor) -> tuple[slice, ...] | None:
        """Which part of ``value`` is the block's own prompt; ``None`` for all of it."""
        return None

    # -- methods ---------------------------------------------------------------

    def project_on_vocab(self, hidden: Tensor) -> Tensor:
        """The logit lens: logits of a residual-stream tensor.

        Args:
            hidden: ``[..., hidden]``, of the model's dtype; the leading dimensions are kept. It is
                moved to the weights' device.

        Returns:
            ``[..., vocab]``, with the model's softcap and scale.

        Raises:
            TypeError: ``hidden`` is of another dtype, which an engine would round or misread.
            WrongShape: ``hidden`` is not as wide as the residual stream.
        """
        if hidden.dtype != self.dtype:
            raise TypeError(
                f"the residual stream is {self.dtype}, not {hidden.dtype}; convert with .to(...)"
            )
        if hidden.shape[-1:] != (self.hidden_size,):
            width = hidden.shape[-1] if hidden.dim() else "a number"
            raise WrongShape(f"the residual stream is {self.hidden_size} wide, not {width}")
        if self.unverified:
            raise Unavailable(
                f"project_on_vocab is unavailable on {self.model_name}: {self.unverified}"
            )
        project = getattr(self.family, "project_on_vocab", None)
        hidden = self._beside_weights(hidden)
        found: Tensor = self._project(hidden) if project is None else project(self, hidden)
        return found

    def _beside_weights(self, hidden: Tensor) -> Tensor:
        """What a block took from elsewhere, where the weights are; they may be on no device yet."""
        first: Tensor = next(self._module.parameters())
        return hidden if first.is_meta else hidden.to(first.device)

    def _project(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def _normed(self, hidden: Tensor) -> Any:
        """What the head takes: the final norm of ``hidden`` and whatever comes after it."""
        facts = self.architecture
        if facts is None or facts.norm is not None:
            hidden = _FIRST.get(self.norm(hidden), self)
        for path in facts.before_head if facts else ():
            hidden = _FIRST.get(self.get(path)(hidden), self)
        return hidden

    def _indices(self, layers: int | Sequence[int]) -> list[int]:
        wanted = [layers] if isinstance(layers, int) else list(layers)
        count = self.num_layers
        for layer in wanted:
            if not -count <= layer < count:
                raise IndexError(f"layer {layer} is out of range: the model has {count} layers")
        if not wanted:
            raise ValueError("no layer is named")
        found = [layer % count for layer in wanted]
        if len(set(found)) != len(found):
            raise ValueError(f"the layers {wanted} name one layer twice")
        return sorted(found)

    def skip_layer(self, layer: int, skip_with: Tensor | None = None) -> None:
        """Let a block pass its input on as its output; see :meth:`skip_layers`."""
        self.skip_layers(layer, layer, skip_with)

    def skip_layers(self, start: int, end: int, skip_with: Tensor | None = None) -> None:
        """Let the blocks ``start`` to ``end`` (inclusive) pass the stream on unchanged.

        The blocks still run, and their keys and values still enter the cache; what they
        computed is dropped for this block's rows alone. Negative indices count from the end.

        Args:
            skip_with: ``[batch, seq, hidden]``, what the last of them gives instead.

        Raises:
            IndexError: there is no such layer.
            ValueError: ``end`` is before ``start``.
        """
        count = self.num_layers
        (first,), (last,) = self._indices(start), self._indices(end)
        if last < first:
            raise ValueError(f"cannot skip from layer {first} to {last} (of {count}): end < start")
        stream = self.layers[first].layer_input if skip_with is None else skip_with
        for layer in range(first, last + 1):
            self.layers[layer].layer_output = stream

    def steer(
        self,
        layers: int | Sequence[int],
        vector: Tensor,
        factor: float = 1.0,
        positions: Any = None,
    ) -> None:
        """Add ``factor * vector`` to the stream leaving each of ``layers``, this step.

        Args:
            layers: one index or several, none twice.
            vector: ``[hidden]``, or anything that broadcasts to ``[batch, seq, hidden]``.
            factor: its factor.
            positions: an index, a slice, a list of indices, each once, or a mask; all of them by
                default.

        Raises:
            IndexError: there is no such layer, or this step has no such position.
            TypeError: ``positions`` are no whole numbers; bytes, which torch takes for a mask.
            ValueError: no layer is named, or one twice.
            WrongShape: the vector is not as wide as the stream.
        """
        indices = self._indices(layers)
        if vector.dim() == 0 or vector.shape[-1] != self.hidden_size:
            raise WrongShape(
                f"a steering vector is {self.hidden_size} wide, this one is {tuple(vector.shape)}"
            )
        where = slice(None) if positions is None else positions
        for layer in indices:
            stream = self.layers[layer].layer_output
            stream[:, _positions(where, stream.shape[1])] += factor * vector.to(stream)

    def get_topk_closest_tokens(self, hidden: Tensor, k: int = 5) -> list[dict[str, float]]:
        """The most likely tokens under the logit lens, for each row of ``hidden``.

        Args:
            hidden: ``[..., hidden]``.
            k: how many.

        Returns:
            For each row, in order, token to probability.
        """
        probs = self.project_on_vocab(hidden).softmax(-1)
        return [self.probs_to_dict(row, k) for row in probs.reshape(-1, probs.shape[-1])]

    def probs_to_dict(self, probs: Tensor, k: int = 5) -> dict[str, float]:
        """The ``k`` most likely tokens of a distribution, by their text.

        Args:
            probs: ``[vocab]`` or ``[1, vocab]``.
            k: how many. Two tokens that decode to one text are told apart by their id.
        """
        top = probs.reshape(-1, probs.shape[-1])
        if len(top) != 1:
            raise WrongShape(f"one distribution at a time, not {tuple(probs.shape)}")
        values, ids = top[0].float().topk(k)
        found: dict[str, float] = {}
        for token, p in zip(ids.tolist(), values.tolist(), strict=True):
            text = str(token) if self.tokenizer is None else self.tokenizer.decode([token])
            found[f"{text}<{token}>" if text in found else text] = p
        return found

    def verify(self) -> dict[str, float]:
        """Check the loaded model itself, on a dummy prompt.

        On every block ``layer_input + attention_output + mlp_output == layer_output``, and the
        lens of the last block's output is the logits.

        Returns:
            The error of each check, relative to its row.

        Raises:
            Unavailable: a check fails beyond what the dtype's rounding explains.
        """
        count = min(4, self.vocab_size)
        ids = list(range(self.vocab_size - count, self.vocab_size))
        found: dict[str, float]
        bound = _ROUNDING.get(self.dtype, 1e-1)
        if getattr(self.family, "GENERIC", False):
            return self._verify_generic(ids, bound)
        with self.prefill(ids):
            found = nnsight.save(identity_errors(self))
        wrong = {key: error for key, error in found.items() if not error <= bound}
        if wrong:
            raise Unavailable(
                f"{self.model_name} does not hold what its values promise: "
                + ", ".join(f"{key} off by {error:.1e}" for key, error in wrong.items())
            )
        return found

    def _verify_generic(self, ids: list[int], bound: float) -> dict[str, float]:
        found: Verified | None
        with self.prefill(ids):
            found = nnsight.save(watch_and_adopt(self, bound))
        if found is None:
            raise Unavailable(
                f"{self.model_name} serves nothing of this model: no tensor chains through its "
                f"blocks as a residual stream"
            )
        adopt(self, found)
        return found.errors


def _positions(where: Any, count: int) -> Any:
    """An index of ``count`` positions: for one beyond them a GPU ends all that its process runs."""
    if isinstance(where, slice):
        return where
    positions = torch.as_tensor(where)
    if positions.dtype == torch.bool and positions.dim():
        return positions
    if positions.numel() and positions.dtype not in _POSITIONS:
        raise TypeError(
            f"positions are whole numbers, a slice or a mask of booleans, not {positions.dtype}"
        )
    positions = positions.long().reshape(-1)
    beyond = positions[(positions < -count) | (positions >= count)].tolist()
    if beyond:
        raise IndexError(f"position {beyond[0]} is out of range: this step has {count}")
    return positions


def identity_errors(model: Any) -> dict[str, float]:
    """Run inside a block: each block's identity and the lens, as errors relative to the row."""
    errors: dict[str, float] = {}
    stream = None
    for i, layer in enumerate(model.layers):
        parts = layer.layer_input.clone()
        norms = layer.facts.stream_norms or (None, None)
        for name, norm in (("self_attn", norms[0]), ("linear_attn", None), ("mlp", norms[1])):
            host = getattr(layer, name, None)
            value = "mlp_output" if name == "mlp" else "attention_output"
            if host is not None and model.support(i).get(f"{name}.{value}") is None:
                parts = parts + getattr(host, value)
            if norm is not None:
                parts = layer.get(norm)(parts)
        stream = layer.layer_output.clone()
        errors[f"layers.{i}"] = _largest(parts, stream)
    lens = model.project_on_vocab(stream)[:, -1]
    errors["project_on_vocab"] = _largest(lens, model.logits[:, -1])
    return errors


def _largest(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().float(), expected.detach().float()
    scale = expected.abs().amax(-1).clamp_min(1e-30)
    return float(((found - expected).abs().amax(-1) / scale).max())
