"""The standard vocabulary on transformers, through nnsight."""

from __future__ import annotations

from ._conventions import Attention as Attention
from ._conventions import Layer as Layer
from ._conventions import Mlp as Mlp
from ._conventions import declare as declare
from ._interior import Call as Call
from ._interior import Masked as Masked
from ._interior import head_inputs as head_inputs
from ._interior import instead_of as instead_of
from ._interior import operation as operation
from ._interior import recomputed_scores as recomputed_scores
from ._mixture import Experts as Experts
from ._mixture import Mixture as Mixture
from ._mixture import Router as Router
from ._mixture import mixture_operation as mixture_operation
from ._mixture import routed_by as routed_by
from ._model import StandardizedTransformer as StandardizedTransformer
from ._rows import Flattened as Flattened
