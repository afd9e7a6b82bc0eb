"""Llama 4's text model on transformers; its mixtures run every expert on every token."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import (
    Llama4TextAttention,
    Llama4TextDecoderLayer,
    Llama4TextMLP,
    Llama4TextMoe,
)

from nnterp.core import _layouts as layouts
from nnterp.core.architectures import LLAMA4_TEXT as ARCHITECTURE
from nnterp.core.tracing import Item, Lens, value
from nnterp.hf import Experts, Flattened, Mixture, Router, declare, mixture_operation, routed_by


class Weights(Lens):
    """The weights used, of every expert's weight, which is 0 for those that are not."""

    def get(self, raw: Tensor, host: Any) -> Tensor:
        return raw.gather(-1, INDICES.get(raw, host))

    def put(self, raw: Any, new: Tensor, host: Any) -> Tensor:
        return torch.zeros_like(raw).scatter(-1, INDICES.get(raw, host), new)


class Indices(Lens):
    """The experts used; a write gives their weights to others."""

    def get(self, raw: Tensor, host: Any) -> Tensor:
        # A weight that was written may be below 0.
        return raw.abs().topk(host.mixture.top_k(host.config)).indices

    def put(self, raw: Any, new: Tensor, host: Any) -> Tensor:
        if bool((new.sort(-1).values.diff(dim=-1) == 0).any()):
            raise ValueError(
                "expert_indices name an expert twice for a token, and this model has one weight "
                "for each; write expert_weights or router_logits instead"
            )
        return torch.zeros_like(raw).scatter(-1, new, WEIGHTS.get(raw, host))


WEIGHTS, INDICES = Weights(), Indices()


class Llama4Mixture(Mixture):
    """Its router gives a weight for every expert, which scales what enters it."""

    routing: ClassVar[Router] = Router("router")

    expert_weights: layouts.ExpertWeights = value(routed_by(Item(0) | WEIGHTS | Flattened()))
    expert_indices: layouts.ExpertIndices = value(
        routed_by(Item(0) | INDICES | Experts() | Flattened())
    )
    routed_output: layouts.Residual = value(mixture_operation("sum_0.output"))


RENAME, ENVOYS = declare(
    ARCHITECTURE,
    layer=Llama4TextDecoderLayer,
    attention=Llama4TextAttention,
    mlp=Llama4TextMLP,
    mixture=Llama4TextMoe,
    routing=Llama4Mixture,
)
