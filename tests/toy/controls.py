"""Ways in which an engine can be wrong, each planted in the toy engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from engine import Forward, ToyModel
from torch import Tensor

Shown: TypeAlias = Callable[[ToyModel, str, Tensor, Mapping[str, Any]], Tensor]
"""What is served for a value, or taken from what is written to it.

Of the model, the value's key, the tensor, and what the forward has computed so far.
"""


def served_as(name: str, out: Shown, back: Shown) -> type[ToyModel]:
    """A model that computes what it should, and serves one value as something else."""

    class Wrong(ToyModel):
        def forward(self, ids: Tensor, cache: dict[int, tuple[Tensor, Tensor]]) -> Forward:
            inner, reply = super().forward(ids, cache), None
            so_far: dict[str, Any] = {}
            while True:
                try:
                    key, value = inner.send(reply)
                except StopIteration as end:
                    return end.value
                so_far[key] = value
                if key.rsplit(".", 1)[-1] == name:
                    new = yield key, out(self, key, value, so_far)
                    reply = back(self, key, new, so_far)
                else:
                    so_far[key] = reply = yield key, value

    return Wrong


def _bias(model: ToyModel, key: str) -> Tensor:
    return model.weights[f"model.layers.{key.split('.')[1]}.self_attn.o_proj.bias"]


def _other_half(so_far: Mapping[str, Any], key: str) -> Tensor:
    return so_far[key.replace("layer_output", "layer_mid")]


class WindowOneLonger(ToyModel):
    """Attends to one token more than the window holds."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.window += 1


WithoutBias = served_as(
    "attention_output",
    lambda model, key, value, so_far: value - _bias(model, key),
    lambda model, key, new, so_far: new + _bias(model, key),
)
"""The attention's contribution without the bias of its last projection."""

HeadsTransposed = served_as(
    "attention_head_outputs",
    lambda model, key, value, so_far: (
        value.flatten(2).unflatten(2, (model.head_dim, model.num_heads)).transpose(2, 3)
    ),
    lambda model, key, new, so_far: (
        new.transpose(2, 3).flatten(2).unflatten(2, (model.num_heads, model.head_dim))
    ),
)
"""The heads' outputs split into heads along the wrong axis."""

HalfOfTheStream = served_as(
    "layer_output",
    lambda model, key, value, so_far: value - _other_half(so_far, key),
    lambda model, key, new, so_far: new + _other_half(so_far, key),
)
"""The half of the stream that the last sublayer gave, without what it is added to."""

EditLost = served_as(
    "layer_output",
    lambda model, key, value, so_far: value,
    lambda model, key, new, so_far: so_far[key],
)
"""The stream as it is; what is written to it does not reach the model."""

CONTROLS: Mapping[str, tuple[str, type[ToyModel]]] = {
    "toy-bias": ("llama", WithoutBias),
    "toy-window": ("mistral", WindowOneLonger),
    "toy-heads": ("llama", HeadsTransposed),
    "toy-half": ("llama", HalfOfTheStream),
    "toy-lost": ("llama", EditLost),
}
"""By the label of the engine that has it: the checkpoint that shows it, and the model."""
