"""The standard vocabulary of a language model's internals, for every engine.

This is the ground floor: plain Python, no framework. What the engines share over nnsight
is in ``nnterp.core.tracing``.
"""

from __future__ import annotations

import sys as _sys

if getattr(_sys.modules.get("nnterp"), "__file__", None) is not None:
    raise ImportError(
        "another distribution called 'nnterp' is installed beside nnterp-core and hides its "
        "packages; the two cannot share an environment: pip uninstall nnterp, then reinstall "
        "nnterp-core"
    )

from . import families as families
from ._engines import engines as engines
from ._engines import load as load
from ._errors import MissingBackend as MissingBackend
from ._errors import OutOfOrder as OutOfOrder
from ._errors import OutsideTrace as OutsideTrace
from ._errors import Preempted as Preempted
from ._errors import Unavailable as Unavailable
from ._errors import UnsupportedFamily as UnsupportedFamily
from ._errors import WrongShape as WrongShape
from ._layouts import ExpertIndices as ExpertIndices
from ._layouts import ExpertOutputs as ExpertOutputs
from ._layouts import ExpertWeights as ExpertWeights
from ._layouts import HeadOutputs as HeadOutputs
from ._layouts import Keys as Keys
from ._layouts import Layout as Layout
from ._layouts import Logits as Logits
from ._layouts import Neurons as Neurons
from ._layouts import Pattern as Pattern
from ._layouts import Probabilities as Probabilities
from ._layouts import Queries as Queries
from ._layouts import Residual as Residual
from ._layouts import RouterLogits as RouterLogits
from ._layouts import TokenIds as TokenIds
from ._layouts import Values as Values
from ._text import token_positions as token_positions
from ._vocabulary import MODULES as MODULES
from ._vocabulary import SIZES as SIZES
from ._vocabulary import VOCABULARY as VOCABULARY
from ._vocabulary import Term as Term
