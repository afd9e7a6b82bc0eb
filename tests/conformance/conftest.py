"""The two engines, pointed at by the conformance kit, on every checkpoint that has a family."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Before vLLM or torch are imported: engines in this process, one thread each.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass(frozen=True)
class Transformers:
    """nnterp.hf, under one of transformers' attention implementations."""

    attention: str = "eager"
    name = "hf"

    @property
    def label(self) -> str:
        return "hf" if self.attention == "eager" else f"hf-{self.attention}"

    @property
    def version(self) -> str:
        import transformers

        return transformers.__version__

    def load(self, path: Path, **options: Any) -> Any:
        from nnterp.hf import StandardizedTransformer

        with warnings.catch_warnings():
            # It is told of a softcap that sdpa leaves out: a known fault here.
            warnings.filterwarnings("ignore", ".*applies no cap", UserWarning)
            return StandardizedTransformer(
                str(path), attn_implementation=self.attention, dispatch=True, **options
            )

    def close(self, model: Any) -> None:
        pass


@dataclass(frozen=True)
class VLLM:
    """nnterp.vllm, with the engine in this process."""

    name = label = "vllm"

    @property
    def version(self) -> str:
        import vllm

        return vllm.__version__

    def load(self, path: Path, **options: Any) -> Any:
        import torch

        imported = "nnterp.vllm" in sys.modules
        from nnterp.vllm import StandardizedVLLM

        if not imported:
            # vLLM collects garbage at each start and end of an engine; what was imported is none.
            gc.freeze()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # whatever ran in this process before
        settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "dispatch": True}
        # Room for the prompts here: a CPU engine fills its cache with zeros, 1 GiB in 1.5 s.
        settings["kv_cache_memory_bytes"] = 2**26
        if torch.cuda.is_available():
            # Several engines share the device.
            settings |= {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.05}
        return StandardizedVLLM(str(path), **settings, **options)

    def close(self, model: Any) -> None:
        model.close()


def pytest_collection_finish() -> None:
    import torch

    torch.set_num_threads(1)


ENGINES = (Transformers(), Transformers("sdpa"), VLLM())


def pytest_configure(config: pytest.Config) -> None:
    from nnterp.core.testing.faults import known
    from nnterp.core.testing.plugin import install

    install(config, ENGINES, known=known())
