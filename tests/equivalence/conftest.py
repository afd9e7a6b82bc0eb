"""What the tests of the comparison share: checkpoints of which one weight is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nnterp.core import VOCABULARY
from nnterp.core._vocabulary import MIXTURE

IDS = [[5, 17, 250, 9, 33], [7, 100, 8, 299, 41, 60, 13, 77, 201, 4, 55, 66, 120]]


def shared_by_both(layers: int) -> int:
    """How many values of a dense model both engines serve."""
    terms = VOCABULARY.values()
    of_model = [term for term in terms if "model" in term.hosts]
    of_block = [term for term in terms if term not in of_model and term.name not in MIXTURE]
    # vLLM has neither a mask nor the projection apart from the logits.
    return len(of_model) - 2 + layers * len(of_block)


@pytest.fixture(autouse=True, scope="module")
def small_models() -> Iterator[None]:
    """vLLM's engine in this process, and one thread: the models are small."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield
    torch.set_num_threads(before)


@pytest.fixture
def doctored(checkpoint: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """``doctored("llama", "model.norm.weight", 1.01)``: a copy of which one weight is scaled."""
    from safetensors.torch import load_file, save_file

    def make(name: str, weight: str, factor: float) -> str:
        folder = tmp_path / "doctored"
        shutil.copytree(checkpoint(name), folder)
        weights = load_file(folder / "model.safetensors")
        weights[weight] *= factor
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return make
