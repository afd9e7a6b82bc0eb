"""Do two loadings of a model compute the same? Every shared value, in the order of the forward.

``compare`` reads two models, ``Report`` holds what was found. A report is plain data: reading one
from its JSON needs neither torch nor an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._report import Departure as Departure
from ._report import LogitsAgreement as LogitsAgreement
from ._report import Measure as Measure
from ._report import Prompt as Prompt
from ._report import Report as Report
from ._report import Side as Side
from ._report import Spec as Spec
from ._report import ValueReport as ValueReport

if TYPE_CHECKING:
    from ._compare import compare as compare


def __getattr__(name: str) -> Any:
    # It brings in torch and nnsight, which whoever only reads a report does without.
    if name == "compare":
        from ._compare import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
