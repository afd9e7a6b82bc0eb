"""BLOOM on transformers; its attention and MLP add the residual stream themselves."""

from __future__ import annotations

from transformers.models.bloom.modeling_bloom import BloomAttention, BloomBlock, BloomMLP

from nnterp.core.architectures import BLOOM as ARCHITECTURE
from nnterp.core.tracing import Argument, Item, Lens, value
from nnterp.hf import Attention, Masked, declare, head_inputs, operation


class BloomInterior(Attention):
    """Its forward computes the scores itself, on queries, keys and values split by one call."""

    attention_queries = value(operation("self__reshape_0.output", Item(0)))
    attention_keys = value(operation("self__reshape_0.output", Item(1)))
    attention_values = value(operation("self__reshape_0.output", Item(2)))
    attention_scores = value(operation("F_softmax_0.input", Argument(0) | Masked()))
    attention_probabilities = value(operation("self_attention_dropout_0.output", Lens()))
    attention_head_outputs = value(head_inputs("dense"))


RENAME, ENVOYS = declare(
    ARCHITECTURE, layer=BloomBlock, attention=BloomAttention, mlp=BloomMLP, interior=BloomInterior
)
