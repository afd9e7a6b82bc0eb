"""Any decoder: what can be verified on the loaded model, after ``model.verify()``.

To be passed by hand, ``family=nnterp.families.vllm.generic``.
"""

from __future__ import annotations

from nnterp.core.tracing import generic

GENERIC = True
RENAME, ENVOYS = generic()
