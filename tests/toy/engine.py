"""A third engine, as an outsider would write one: llama's architecture in plain torch.

Nothing of nnsight, of transformers' models or of this project's engines is in it; of the project it
uses the vocabulary, the errors and the protocols. The forward is a generator that hands out each
value and takes it back, so that a block is ordinary Python: a read lets the forward run up to the
value, and what the block does to it is what the forward goes on with.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import linear, silu

from nnterp.core import VOCABULARY, OutOfOrder, OutsideTrace, Unavailable, WrongShape
from nnterp.core.reading import keeping, saved

Forward = Generator[tuple[str, Any], Any, Tensor]

HOSTS = ("self_attn", "linear_attn", "mlp")

REASONS = {
    "attention_mask": "a prompt is one sequence without padding here; there is no mask",
    "linear_attn.attention_input": "every block mixes tokens by attention",
    "linear_attn.attention_output": "every block mixes tokens by attention",
    **{
        f"mlp.{name}": "every feed-forward is dense here"
        for name in (
            *("router_logits", "expert_weights", "expert_indices", "expert_outputs"),
            *("routed_output", "shared_expert_output"),
        )
    },
}


class Value(Tensor):
    """What a block is given: a tensor that can be saved as it is."""

    def save(self) -> Tensor:
        return saved(plain(self).clone())


def plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Tensor) else value


# -- a run -----------------------------------------------------------------------------------------


class Run:
    """A prompt on its way through the model, step by step."""

    def __init__(self, model: ToyModel, ids: Sequence[int]) -> None:
        self.model, self.step = model, -1
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        # What reaches the model no more, with its version and what an edit of it raises.
        self._gone: list[tuple[Value, int, Exception]] = []
        self._begin(torch.tensor([list(ids)]))

    def _begin(self, ids: Tensor) -> None:
        self.step += 1
        self.passed: set[str] = set()
        self.forward = self.model.forward(ids, self.cache)
        self.logits: Tensor | None = None
        # What the block was given last, and the version of it that is not edited, if one is.
        self._given: tuple[Value, int | None] | None = None
        self.key, self.value = next(self.forward)

    def read(self, key: str) -> Any:
        if key == "next_token_probs":
            # It is nowhere in the forward, which stays at what it is computed from.
            probs = plain(self.read("logits"))[:, -1].softmax(-1).as_subclass(Value)
            self._gone.append((probs, probs._version, Unavailable(f"{key} is read-only")))
            return probs
        self._run_to(key)
        if not isinstance(self.value, Tensor):
            return self.value
        if self._given is None:
            copy = self.value.clone().as_subclass(Value)
            self._given = copy, copy._version
        return self._given[0]

    def write(self, key: str, new: Any) -> None:
        if not VOCABULARY[key.rsplit(".", 1)[-1]].writable:
            raise Unavailable(f"{key} is read-only")
        before = self.read(key)
        if not isinstance(new, Tensor) or new.dtype != before.dtype:
            raise TypeError(f"{key} is a tensor of {before.dtype}")
        if new.shape != before.shape:
            raise WrongShape(f"{key} is {tuple(before.shape)}, not {tuple(new.shape)}")
        self._given = plain(new).clone().as_subclass(Value), None

    def _run_to(self, key: str) -> None:
        if key in self.passed or self.logits is not None:
            raise OutOfOrder(f"the forward has run past {key}")
        while self.key != key:
            self._go_on()

    def _go_on(self) -> None:
        self._check()
        value = self.value
        if self._given is not None:
            copy, version = self._given
            value = value if copy._version == version else plain(copy)
            late = OutOfOrder(f"{self.key} was edited after the forward had run past it")
            self._gone.append((copy, copy._version, late))
            self._given = None
        self.passed.add(self.key)
        try:
            self.key, self.value = self.forward.send(value)
        except StopIteration as end:
            self.logits = end.value

    def _check(self) -> None:
        for value, version, error in self._gone:
            if value._version != version:
                raise error

    def finish(self) -> Tensor:
        """Run the step to its end; the logits that it chooses a token by."""
        while self.logits is None:
            self._go_on()
        self._check()
        return self.logits

    def go_to(self, step: int) -> bool:
        """Whether the generation gets as far as a step."""
        while self.step < step:
            token = self.finish()[:, -1:].argmax(-1)
            if int(token) in self.model.end_tokens:
                return False
            self._begin(token)
        return True


# -- blocks ----------------------------------------------------------------------------------------


class Trace:
    """``with model.prefill(prompt)``, ``with model.decode(...)``, and the invokes inside it."""

    def __init__(self, model: ToyModel, prompt: Any, steps: int) -> None:
        self.model, self.prompt, self.steps = model, prompt, steps
        self.found: dict[str, list[Any]] = {}

    def __enter__(self) -> Trace:
        self._frame = sys._getframe(1)
        self._block = None if self.prompt is None else self.invoke(self.prompt, self._frame)
        if self._block is not None:
            self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._block is not None:
            self._block.__exit__(*error)
        several = {name: ones for name, ones in self.found.items() if len(ones) > 1}
        if error[0] is None and several:
            push(self._frame, several)

    @contextmanager
    def invoke(self, prompt: Any, frame: FrameType | None = None) -> Iterator[None]:
        frame = frame or sys._getframe(2)
        kept: list[Any] = []
        if self.model.run is not None:
            raise RuntimeError("another block of this model is running")
        self.model.run = Run(self.model, self.model.encode(prompt))
        try:
            with torch.no_grad(), keeping(kept.append):
                yield
                self.model.run.finish()
        finally:
            self.model.run = None
        for name, value in frame.f_locals.items():
            if any(value is one for one in kept):
                self.found.setdefault(name, []).append(value)

    @property
    def iter(self) -> Steps:
        return Steps(self)


class Steps:
    """``tracer.iter[0:n]``."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __getitem__(self, steps: slice) -> Iterator[int]:
        for step in range(*steps.indices(self._trace.steps)):
            if not self._trace.model.run.go_to(step):
                return
            yield step


def push(frame: FrameType, variables: dict[str, Any]) -> None:
    """Set a function's variables from outside, which is what makes a list of a name."""
    frame.f_locals.update(variables)
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


# -- the model -------------------------------------------------------------------------------------


class Host:
    """A module with standard values: the model, a block, or a part of a block."""

    kind, prefix = "model", ""
    model: ToyModel

    def __getattr__(self, name: str) -> Any:
        if name in VOCABULARY and self.kind in VOCABULARY[name].hosts:
            return self.model.checked(self.prefix + name).read(self.prefix + name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in VOCABULARY and self.kind in VOCABULARY[name].hosts:
            self.model.checked(self.prefix + name).write(self.prefix + name, value)
        else:
            super().__setattr__(name, value)


class Part(Host):
    def __init__(self, model: ToyModel, kind: str, prefix: str) -> None:
        self.model, self.kind, self.prefix = model, kind, prefix


class Block(Part):
    def __init__(self, model: ToyModel, index: int) -> None:
        super().__init__(model, "layer", f"layers.{index}.")
        for host in HOSTS:
            setattr(self, host, Part(model, host, f"{self.prefix}{host}."))


class ToyModel(Host):
    """A checkpoint of llama's or mistral's architecture.

    Args:
        path: the checkpoint's folder.
    """

    engine = "toy"
    dtype = torch.float32

    def __init__(self, path: Path) -> None:
        self.model, self.run = self, None
        self.config = SimpleNamespace(**json.loads((path / "config.json").read_text()))
        self.weights = load_file(path / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.family = sys.modules[__name__]
        generation = json.loads((path / "generation_config.json").read_text())
        self.end_tokens = (generation["eos_token_id"],)
        self.num_layers = self.config.num_hidden_layers
        self.hidden_size = self.config.hidden_size
        self.vocab_size = self.config.vocab_size
        self.num_heads = self.config.num_attention_heads
        self.num_kv_heads = self.config.num_key_value_heads
        self.head_dim = self.qk_head_dim = self.config.head_dim
        self.intermediate_size = self.config.intermediate_size
        self.window = getattr(self.config, "sliding_window", None)
        self.layers = [Block(self, i) for i in range(self.num_layers)]
        self.embed_tokens = self.weights["model.embed_tokens.weight"]
        self.norm = lambda x: self._norm("model.norm", x)
        self.lm_head = lambda x: linear(x, self.weights["lm_head.weight"])

    # -- the forward ---------------------------------------------------------------

    def forward(self, ids: Tensor, cache: dict[int, tuple[Tensor, Tensor]]) -> Forward:
        start = cache[0][0].shape[2] if cache else 0
        ids = yield "input_ids", ids
        yield "input_size", tuple(ids.shape)
        stream = yield "token_embeddings", self.embed_tokens[ids]
        for i in range(self.num_layers):
            at, weights = f"layers.{i}", f"model.layers.{i}"
            stream = yield f"{at}.layer_input", stream
            normed = self._norm(f"{weights}.input_layernorm", stream)
            normed = yield f"{at}.self_attn.attention_input", normed
            added = yield from self._attention(i, normed, start, cache)
            added = yield f"{at}.self_attn.attention_output", added
            stream = yield f"{at}.layer_mid", stream + added
            normed = self._norm(f"{weights}.post_attention_layernorm", stream)
            normed = yield f"{at}.mlp.mlp_input", normed
            gate = silu(self._linear(f"{weights}.mlp.gate_proj", normed))
            neurons = gate * self._linear(f"{weights}.mlp.up_proj", normed)
            neurons = yield f"{at}.mlp.mlp_neurons", neurons
            added = self._linear(f"{weights}.mlp.down_proj", neurons)
            added = yield f"{at}.mlp.mlp_output", added
            stream = yield f"{at}.layer_output", stream + added
        normed = yield "final_norm_output", self.norm(stream)
        logits = yield "lm_head_output", self.lm_head(normed)
        logits = yield "logits", logits
        return logits

    def _attention(
        self, i: int, x: Tensor, start: int, cache: dict[int, tuple[Tensor, Tensor]]
    ) -> Generator[tuple[str, Any], Any, Tensor]:
        at, weights = f"layers.{i}.self_attn", f"model.layers.{i}.self_attn"

        def heads(name: str) -> Tensor:
            return self._linear(f"{weights}.{name}", x).unflatten(2, (-1, self.head_dim))

        places = torch.arange(start, start + x.shape[1])
        queries = self._rotated(heads("q_proj").transpose(1, 2), places)
        queries = yield f"{at}.attention_queries", queries
        keys = self._rotated(heads("k_proj").transpose(1, 2), places)
        keys = yield f"{at}.attention_keys", keys
        values = yield f"{at}.attention_values", heads("v_proj").transpose(1, 2)
        if i in cache:
            keys, values = (
                torch.cat(pair, 2) for pair in zip(cache[i], (keys, values), strict=True)
            )
        cache[i] = keys, values
        groups = self.num_heads // self.num_kv_heads
        scores = queries @ keys.repeat_interleave(groups, 1).mT * self.head_dim**-0.5
        distance = places.unsqueeze(1) - torch.arange(keys.shape[2])
        hidden = distance < 0
        if self.window is not None:
            hidden |= distance >= self.window
        scores = yield f"{at}.attention_scores", scores.masked_fill(hidden, -torch.inf)
        pattern = yield f"{at}.attention_probabilities", scores.softmax(-1)
        outputs = (pattern @ values.repeat_interleave(groups, 1)).transpose(1, 2)
        outputs = yield f"{at}.attention_head_outputs", outputs
        return self._linear(f"{weights}.o_proj", outputs.flatten(2))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return self.weights[f"{name}.weight"] * (x * scale)

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        theta = self.config.rope_parameters["rope_theta"]
        exponents = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = torch.outer(places.float(), 1.0 / theta**exponents).repeat(1, 2)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    # -- asking ----------------------------------------------------------------------

    def checked(self, key: str) -> Run:
        """The run that a value is read in."""
        name = key.split(".", 2)[-1] if key.startswith("layers.") else key
        if name in REASONS:
            raise Unavailable(f"{key} is unavailable on toy: {REASONS[name]}")
        if self.run is None:
            raise OutsideTrace(f"{key} is there while the model runs: read it in a block")
        return self.run

    def support(self, layer: int | None = None, *, step: str = "prefill") -> dict[str, str | None]:
        hosts = ("layer", *HOSTS)
        block = {
            key: REASONS.get(key)
            for term in VOCABULARY.values()
            for key, host in zip(term.keys(), term.hosts, strict=True)
            if host in hosts
        }
        if layer is not None:
            self.layers[layer]
            return block
        own = {name: REASONS.get(name) for name, t in VOCABULARY.items() if t.hosts == ("model",)}
        return own | {f"layers.*.{key}": reason for key, reason in block.items()}

    def require(self, *keys: str, step: str = "prefill") -> None:
        problems = []
        for key in keys:
            if key.rsplit(".", 1)[-1] not in VOCABULARY:
                raise KeyError(f"{key!r} is no standard value")
            reason = REASONS.get(key.split(".", 2)[-1] if key.startswith("layers.") else key)
            problems += [] if reason is None else [f"{key}: {reason}"]
        if problems:
            raise Unavailable("toy does not serve " + "; ".join(problems))

    def order(self, layer: int | None = None) -> dict[str, int]:
        raise NotImplementedError("the order of the forward is not measured here")

    def rank(self, name: str, layer: int | None = None) -> tuple[int, int]:
        raise NotImplementedError("the order of the forward is not measured here")

    # -- running ---------------------------------------------------------------------

    def encode(self, prompt: Any) -> list[int]:
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        if not ids or not all(0 <= token < self.vocab_size for token in ids):
            raise ValueError("the prompt is empty, or has an id that is not in the vocabulary")
        return ids

    def prefill(self, prompt: Any = None) -> Trace:
        return Trace(self, prompt, 1)

    trace = prefill

    def decode(self, prompt: Any = None, *, max_new_tokens: int) -> Trace:
        return Trace(self, prompt, max_new_tokens)

    # -- methods ---------------------------------------------------------------------

    def project_on_vocab(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def skip_layer(self, layer: int, skip_with: Tensor | None = None) -> None:
        layer = range(self.num_layers)[layer]
        self.skip_layers(layer, layer, skip_with)

    def skip_layers(self, start: int, end: int, skip_with: Tensor | None = None) -> None:
        stream = self.layers[start].layer_input.clone() if skip_with is None else skip_with
        for block in self.layers[start : end + 1]:
            block.layer_output = stream

    def steer(
        self,
        layers: int | Sequence[int],
        vector: Tensor,
        factor: float = 1.0,
        positions: Any = None,
    ) -> None:
        for layer in [layers] if isinstance(layers, int) else layers:
            where = slice(None) if positions is None else positions
            self.layers[layer].layer_output[:, where] += factor * vector

    def get_topk_closest_tokens(self, hidden: Tensor, k: int = 5) -> list[dict[str, float]]:
        probs = self.project_on_vocab(hidden).softmax(-1)
        return [self.probs_to_dict(row, k) for row in probs.flatten(0, -2)]

    def probs_to_dict(self, probs: Tensor, k: int = 5) -> dict[str, float]:
        found: dict[str, float] = {}
        for p, token in zip(*(one.tolist() for one in probs.flatten().topk(k)), strict=True):
            text = self.tokenizer.decode([token])
            found[f"{text}<{token}>" if text in found else text] = p
        return found

    def verify(self) -> dict[str, float]:
        errors: dict[str, float] = {}
        with self.prefill([5, 6, 7]):
            for i, layer in enumerate(self.layers):
                parts = layer.layer_input + layer.self_attn.attention_output + layer.mlp.mlp_output
                stream = layer.layer_output
                errors[f"layers.{i}"] = float((parts - stream).abs().max() / stream.abs().max())
            lens = self.project_on_vocab(stream)
            logits = self.logits
            difference = float((lens - logits).abs().max() / logits.abs().max())
            errors["project_on_vocab"] = difference
        if max(errors.values()) > 1e-4:
            raise Unavailable(f"toy does not hold what its values promise: {errors}")
        return errors
