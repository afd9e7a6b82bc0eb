"""What code written against the vocabulary may rely on, whatever the engine.

These are typing protocols: they say which names there are. Whether this model serves one
is asked with ``support()`` or ``require()``, not with ``isinstance``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from . import _layouts as layouts

if TYPE_CHECKING:
    from torch import Tensor

Step = Literal["prefill", "decode"]


class StandardAttention(Protocol):
    """A block's attention, ``model.layers[i].self_attn``."""

    attention_input: layouts.Residual
    attention_output: layouts.Residual
    attention_queries: layouts.Queries
    attention_keys: layouts.Keys
    attention_values: layouts.Values
    attention_scores: layouts.Pattern
    attention_probabilities: layouts.Pattern
    attention_head_outputs: layouts.HeadOutputs


class StandardLinearAttention(Protocol):
    """A block's recurrent mixer, ``model.layers[i].linear_attn``."""

    attention_input: layouts.Residual
    attention_output: layouts.Residual


class StandardMlp(Protocol):
    """A block's feed-forward, dense or a mixture of experts, ``model.layers[i].mlp``."""

    mlp_input: layouts.Residual
    mlp_output: layouts.Residual
    mlp_neurons: layouts.Neurons
    router_logits: layouts.RouterLogits
    expert_weights: layouts.ExpertWeights
    expert_indices: layouts.ExpertIndices
    expert_outputs: layouts.ExpertOutputs
    routed_output: layouts.Residual
    shared_expert_output: layouts.Residual


class StandardLayer(Protocol):
    """A decoder block, ``model.layers[i]``."""

    layer_input: layouts.Residual
    layer_mid: layouts.Residual
    layer_output: layouts.Residual
    self_attn: StandardAttention
    linear_attn: StandardLinearAttention
    mlp: StandardMlp


class StandardModel(Protocol):
    """A causal language model whose internals answer to the standard names."""

    input_ids: layouts.TokenIds
    attention_mask: layouts.TokenIds
    token_embeddings: layouts.Residual
    final_norm_output: layouts.Residual
    lm_head_output: layouts.Logits
    logits: layouts.Logits

    @property
    def input_size(self) -> tuple[int, int]: ...

    @property
    def next_token_probs(self) -> layouts.Probabilities: ...

    embed_tokens: Any
    layers: Sequence[StandardLayer]
    norm: Any
    lm_head: Any
    tokenizer: Any

    @property
    def config(self) -> Any: ...

    family: Any

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def qk_head_dim(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    def trace(self, *inputs: Any, **kwargs: Any) -> Any:
        """A block of the engine's own kind, with options of its own; ``prefill`` and ``decode`` are
        what every engine has."""
        ...

    def encode(self, prompt: Any) -> list[int]:
        """The token ids of a prompt: text, token ids, a tokenizer's output or chat messages.

        Ids are taken as they are; text becomes ids once.

        Raises:
            ValueError: the prompt is empty, has an id that is not in the vocabulary, or is longer
                than the model takes.
        """
        ...

    def prefill(self, *prompt: Any, **kwargs: Any) -> Any:
        """A ``with`` block inside one forward pass over the prompt.

        Args:
            *prompt: one prompt; none, to give several, one ``with tracer.invoke(prompt):`` each.
            **kwargs: options of the engine's own.

        Returns:
            the context manager; ``as tracer`` is what has ``invoke``.

        Raises:
            ValueError: of ``encode``.
        """
        ...

    def decode(self, *prompt: Any, max_new_tokens: int, **kwargs: Any) -> Any:
        """A ``with`` block inside greedy decoding, each token the argmax of the raw logits.

        Args:
            *prompt: as for ``prefill``.
            max_new_tokens: the number of steps; an end token of the checkpoint's generation config
                ends it before.
            **kwargs: options of the engine's own.

        Returns:
            the context manager; ``as tracer`` is what has ``invoke`` and ``iter``. Of
            ``tracer.iter[a:b]`` each turn is one step, and step 0 the prompt's.

        Raises:
            ValueError: of ``encode``.
        """
        ...

    def support(self, layer: int | None = None, *, step: Step = "prefill") -> dict[str, str | None]:
        """Which values the model serves: ``None`` where it does, else the reason.

        Args:
            layer: a block, for its keys alone, ``self_attn.attention_output``. Without it the
                model's own and every block's, under ``layers.*.`` where all blocks agree and
                under ``layers.0.`` and so on where they differ.
            step: the kind of step that is asked about.

        Returns:
            a reason or ``None`` for every key of the vocabulary.

        Raises:
            IndexError: there is no such layer.
        """
        ...

    def require(self, *keys: str, step: Step = "prefill") -> None:
        """Check up front that every key is served; ``layers.*.`` is every block.

        Raises:
            Unavailable: some are not; the message has each of them with its reason.
            KeyError: a key is no standard value.
        """
        ...

    def project_on_vocab(self, hidden: Tensor) -> Tensor:
        """The logit lens: the final norm, the head, and what the model does to the logits after it.

        Args:
            hidden: ``[..., hidden]``, not normed.

        Returns:
            the logits, ``[..., vocab]``.

        Raises:
            OutsideTrace: no block runs, of an engine whose weights are elsewhere.
        """
        ...

    def skip_layer(self, layer: int, skip_with: Tensor | None = None) -> None:
        """``skip_layers(layer, layer, skip_with)``; a negative index counts from the end.

        Raises:
            IndexError: there is no such layer.
        """
        ...

    def skip_layers(self, start: int, end: int, skip_with: Tensor | None = None) -> None:
        """Let the blocks ``start`` to ``end`` (inclusive) pass on what went into the first.

        Args:
            start: the first block.
            end: the last block, skipped too.
            skip_with: ``[batch, seq, hidden]``, what they pass on instead.

        Raises:
            IndexError: there is no such layer.
        """
        ...

    def steer(
        self,
        layers: int | Sequence[int],
        vector: Tensor,
        factor: float = 1.0,
        positions: Any = None,
    ) -> None:
        """Add ``factor * vector`` to the ``layer_output`` of each of ``layers``, on this step.

        Args:
            layers: one index or several.
            vector: ``[hidden]``, or what broadcasts to ``[batch, seq, hidden]``.
            factor: its factor.
            positions: an index, a slice or a list of positions; all of them without it.

        Raises:
            IndexError: there is no such layer.
        """
        ...

    def get_topk_closest_tokens(self, hidden: Tensor, k: int = 5) -> list[dict[str, float]]:
        """The most likely tokens under the logit lens, for each row.

        Args:
            hidden: ``[..., hidden]``.
            k: how many.

        Returns:
            a list with one dict a row, the leading axes flattened, each as ``probs_to_dict``
            makes it.

        Raises:
            OutsideTrace: as ``project_on_vocab``.
        """
        ...

    def probs_to_dict(self, probs: Tensor, k: int = 5) -> dict[str, float]:
        """The most likely tokens of one distribution.

        Args:
            probs: ``[vocab]`` or ``[1, vocab]``.
            k: how many.

        Returns:
            text to probability, the most likely first. The text is the tokenizer's ``decode`` of
            the token alone, without a tokenizer the id; where an earlier token of the dict has the
            same, it is ``text<id>``.
        """
        ...

    def order(self, layer: int | None = None) -> dict[str, int]:
        """In which order the forward passes the values; equal where they are read together.

        Args:
            layer: a block, for its values, under the keys of ``support(layer)``; without it the
                model's own.

        Returns:
            the position of each value that is served, from 0.

        Raises:
            IndexError: there is no such layer.
            NotImplementedError: the engine does not measure it; who reads finds it by trying.
        """
        ...

    def rank(self, name: str, layer: int | None = None) -> tuple[int, int]:
        """A key to sort the values of the whole model by, in the order of the forward.

        Args:
            name: a value's key, as in ``support(layer)``.
            layer: its block; without it a value of the model's own.

        Returns:
            the block, ``-1`` before the first and ``num_layers`` after the last, and the position
            in there.

        Raises:
            Unavailable: the model does not serve it.
            NotImplementedError: the engine does not measure it.
        """
        ...

    def verify(self) -> dict[str, float]:
        """Check the loaded model itself on a prompt of its choice: on every block
        ``layer_input + attention_output + mlp_output == layer_output``, with whatever norms the
        architecture has between, and the lens of the last block's output is the logits.

        Returns:
            the error of each, as a share of its row: ``layers.0`` and so on, and
            ``project_on_vocab``.

        Raises:
            Unavailable: one is larger than the dtype's rounding explains.
        """
        ...
