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

    def trace(self, *inputs: Any, **kwargs: Any) -> Any: ...

    def prefill(self, *prompt: Any, **kwargs: Any) -> Any: ...

    def decode(self, *prompt: Any, max_new_tokens: int, **kwargs: Any) -> Any: ...

    def support(
        self, layer: int | None = None, *, step: Step = "prefill"
    ) -> dict[str, str | None]: ...

    def require(self, *keys: str, step: Step = "prefill") -> None: ...

    def project_on_vocab(self, hidden: Tensor) -> Tensor: ...

    def skip_layer(self, layer: int, skip_with: Tensor | None = None) -> None: ...

    def skip_layers(self, start: int, end: int, skip_with: Tensor | None = None) -> None: ...

    def steer(
        self,
        layers: int | Sequence[int],
        vector: Tensor,
        factor: float = 1.0,
        positions: Any = None,
    ) -> None: ...

    def get_topk_closest_tokens(self, hidden: Tensor, k: int = 5) -> list[dict[str, float]]: ...

    def probs_to_dict(self, probs: Tensor, k: int = 5) -> dict[str, float]: ...

    def order(self, layer: int | None = None) -> dict[str, int]: ...

    def rank(self, name: str, layer: int | None = None) -> tuple[int, int]: ...

    def verify(self) -> dict[str, float]: ...
