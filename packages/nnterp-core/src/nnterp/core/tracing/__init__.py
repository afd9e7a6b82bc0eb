"""What the engines share over nnsight: values as descriptors, hosts, methods.

Importing this brings in torch and nnsight; it is the upper floor of ``nnterp.core``.
"""

from __future__ import annotations

from ._apart import Apart as Apart
from ._attention import pattern as pattern
from ._attention import reads_ahead as reads_ahead
from ._attention import scores as scores
from ._generic import generic as generic
from ._hosts import UNSHARED as UNSHARED
from ._hosts import WEIGHTED_INPUT as WEIGHTED_INPUT
from ._hosts import Attention as Attention
from ._hosts import Layer as Layer
from ._hosts import Mixture as Mixture
from ._hosts import Mlp as Mlp
from ._hosts import Named as Named
from ._hosts import OnBlock as OnBlock
from ._hosts import Sublayer as Sublayer
from ._hosts import bound as bound
from ._hosts import container_envoys as container_envoys
from ._hosts import renames as renames
from ._lenses import KEEP as KEEP
from ._lenses import Argument as Argument
from ._lenses import Batched as Batched
from ._lenses import Derived as Derived
from ._lenses import Field as Field
from ._lenses import First as First
from ._lenses import Halves as Halves
from ._lenses import Heads as Heads
from ._lenses import InPlace as InPlace
from ._lenses import Item as Item
from ._lenses import Lens as Lens
from ._lenses import Scaled as Scaled
from ._lenses import Summed as Summed
from ._lenses import multiplied as multiplied
from ._private import released as released
from ._prompts import encode as encode
from ._prompts import is_chat as is_chat
from ._standardized import Standardized as Standardized
from ._standardized import checked_length as checked_length
from ._standardized import checked_path as checked_path
from ._standardized import has_tokenizer as has_tokenizer
from ._standardized import model_type_of as model_type_of
from ._standardized import quantised_by as quantised_by
from ._values import Block as Block
from ._values import OutOfOrder as OutOfOrder
from ._values import Site as Site
from ._values import Value as Value
from ._values import beside as beside
from ._values import opened as opened
from ._values import operations as operations
from ._values import own as own
from ._values import reading as reading
from ._values import running as running
from ._values import unavailable as unavailable
from ._values import under as under
from ._values import value as value
