"""What the test folders share: checkpoints, the oracle, and models that are closed again."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Nothing that is run here needs a network, and nothing should wait for one.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# torch's compiler, which vLLM has for Cohere's norms, would try each instruction set that the
# processor names in a process of its own, two seconds in all. Empty, it does.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A million objects are imported and stay. Looking for garbage in them whenever seven hundred are
# new takes a third of the imports' time.
gc.set_threshold(100_000, 20, 20)

# A test that opens a vLLM engine in its own process says so by this.
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


def pytest_addoption(parser: pytest.Parser) -> None:
    from nnterp.core.testing.option import add_option

    add_option(parser)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup, one worker for a file, and for the checkpoints of a model type."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from nnterp.core.testing.plugin import scheduler

    # Whoever collects has put the groups in order, the long ones first.
    config.option.loadscopereorder = False
    return scheduler(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker: the longest group first, so that the last ones to end are short."""
    if not hasattr(config, "workerinput"):
        return
    from nnterp.core.testing.plugin import group_of

    groups = [group_of(item.nodeid) for item in items]
    seconds: dict[str, float] = defaultdict(float)
    for group, item in zip(groups, items, strict=True):
        # What such tests take about, on two cores.
        seconds[group] += 15.0 if item.get_closest_marker("slow") else 0.03
    places = sorted(range(len(items)), key=lambda i: -seconds[groups[i]])
    items[:] = [items[i] for i in places]


@contextmanager
def opened(engine: str, path: str | Path, **options: Any) -> Iterator[Any]:
    """A model of ``path`` on ``engine``, closed on the way out; vLLM runs in this process."""
    if engine == "hf":
        from nnterp.hf import StandardizedTransformer

        yield StandardizedTransformer(str(path), **options)
        return
    before = os.environ.get(IN_PROCESS)
    os.environ[IN_PROCESS] = "0"
    try:
        from nnterp.vllm import StandardizedVLLM

        defaults = {"dtype": "float32", "max_model_len": 128}
        with StandardizedVLLM(str(path), **{**defaults, **options}) as model:
            yield model
    finally:
        os.environ.pop(IN_PROCESS)
        if before is not None:
            os.environ[IN_PROCESS] = before


@pytest.fixture(scope="session")
def open_model() -> Callable[..., AbstractContextManager[Any]]:
    """``with open_model("vllm", path, **options) as model:``"""
    return opened


@pytest.fixture(scope="session")
def checkpoint() -> Callable[..., str]:
    """The folder of a small checkpoint, by its recipe's name."""
    from nnterp.core.testing import build

    return lambda name, **options: str(build(name, **options))


@pytest.fixture(scope="session")
def reference() -> Callable[..., Any]:
    """``reference("llama")`` is the oracle: plain transformers, without any code of ours.

    A second argument is the oracle's patch.
    """
    from nnterp.core.testing import Oracle, build

    return cache(lambda name, patch=None: Oracle(build(name), name, patch=patch))


@pytest.fixture(scope="module")
def only(checkpoint: Callable[..., str]) -> Iterator[Callable[..., Any]]:
    """``only("vllm", "llama")`` is that model, and the one model alive: the last is closed.

    Tests that ask for the same one after another share it.
    """
    held: dict[str, Any] = {}

    def ask(engine: str, name: str, **options: Any) -> Any:
        key = (engine, name, options)
        if held.get("key") != key:
            close()
            context = opened(engine, checkpoint(name), **options)
            held["model"], held["context"], held["key"] = context.__enter__(), context, key
        return held["model"]

    def close() -> None:
        if held:
            held["context"].__exit__(None, None, None)
            held.clear()

    yield ask
    close()


def _torch_state() -> tuple[str, ...] | None:
    """What torch keeps for a thread, and every operation in it obeys."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "_C"):
        return None
    return (
        f"gradients {torch.is_grad_enabled()}",
        f"inference mode {torch.is_inference_mode_enabled()}",
        f"included {torch._C._dispatch_tls_local_include_set()}",
        f"excluded {torch._C._dispatch_tls_local_exclude_set()}",
        f"compiler {torch._C._dynamo.eval_frame.get_eval_frame_callback()}",
    )


class _Collector:
    """Puts aside what is no garbage: vLLM looks for some nine times while an engine starts.

    At its end it lets go of what was put aside and looks through all of it, which shows here.
    """

    def __init__(self) -> None:
        self.looked_through_all = True
        gc.callbacks.append(self._collected)
        atexit.register(gc.unfreeze)  # What the interpreter does not free, Triton calls leaked.

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self.looked_through_all = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._put_aside()

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: object, request: object) -> None:
        # The engine before the one that this fixture starts may have ended within this setup.
        self._put_aside()

    def _put_aside(self) -> None:
        if self.looked_through_all:
            gc.freeze()
            self.looked_through_all = False


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Collector(), "nnterp-collector")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test leaves torch as it found it: those after it would fail without a cause of theirs."""
    before = _torch_state()
    result = yield
    after = _torch_state()
    assert before is None or before == after, "the test left torch's state of the thread changed"
    return result
