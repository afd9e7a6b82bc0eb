"""The standard vocabulary on transformers, through nnsight."""

from __future__ import annotations

from ._conventions import Attention as Attention
from ._conventions import Layer as Layer
from ._conventions import Mlp as Mlp
from ._conventions import declare as declare
from ._model import StandardizedTransformer as StandardizedTransformer
