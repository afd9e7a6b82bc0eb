"""How an engine ends: a death is reported at once, and no end leaves a process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

pytestmark = pytest.mark.slow

# What every script starts with; `here` tells which processes there are besides this one.
START = """
import asyncio, os, signal, sys, time
import torch
from nnterp.core.testing import build
from nnterp.vllm import StandardizedVLLM

P = [5, 17, 250, 9, 33]

# Where the tests are a shell's background job, an interruption is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def load(**options):
    return StandardizedVLLM(
        str(build("llama")), dtype="float32", max_model_len=128, dispatch=True, **options
    )
"""


class Child:
    """A python that runs a script, in a group of its own as a terminal's would be."""

    def __init__(self, script: str) -> None:
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        code = START + textwrap.dedent(script)
        self.process = subprocess.Popen(
            # A file, since a block is found by its source.
            [sys.executable, "-c", _FROM_FILE, code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.family: list[psutil.Process] = []

    def until(self, word: str) -> float:
        """Read until a line holds ``word``; when that was."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if word in line:
                self.family = psutil.Process(self.process.pid).children(recursive=True)
                return time.monotonic()
        raise AssertionError(f"no {word!r} in:\n{''.join(self.lines)}")

    def end(self, seconds: float = 60) -> int:
        output, _ = self.process.communicate(timeout=seconds)
        self.lines += output.splitlines(keepends=True)
        return self.process.returncode

    def left(self, seconds: float = 10) -> list[psutil.Process]:
        """Processes of its family that are still there."""
        assert len(self.family) >= 2, "the engine has processes of its own"
        _, alive = psutil.wait_procs(self.family, timeout=seconds)
        return alive

    @property
    def text(self) -> str:
        return "".join(self.lines)


_FROM_FILE = """
import runpy, sys, tempfile, pathlib
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "script.py")
    path.write_text(sys.argv[1])
    runpy.run_path(str(path), run_name="__main__")
"""


@pytest.fixture
def child():
    children = []

    def start(script):
        children.append(Child(script))
        return children[-1]

    yield start
    for one in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.family += psutil.Process(one.process.pid).children(recursive=True)
        for process in one.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        one.process.kill()
        one.process.communicate()


def test_a_worker_that_dies_is_an_error_at_once(child):
    script = child(
        """
        if __name__ == "__main__":
            with load() as model:
                with model.prefill(P):
                    model.logits.save()
                print("ready", flush=True)
                try:
                    with model.prefill(P):
                        model.layers[0].layer_output.save()
                        os._exit(7)
                except Exception as error:
                    print("reported", type(error).__name__, flush=True)
                started = time.monotonic()
                try:
                    with model.prefill(P):
                        model.logits.save()
                except Exception as error:
                    print("again", type(error).__name__, flush=True)
            print("closed", flush=True)
        """
    )
    ready = script.until("ready")
    assert script.until("reported") - ready < 10
    assert "EngineDeadError" in script.lines[-1]
    script.until("again")
    assert "EngineDeadError" in script.lines[-1]
    script.until("closed")
    assert script.end() == 0, script.text


def test_the_same_on_an_asynchronous_engine(child):
    script = child(
        """
        async def main():
            with load(mode="async") as model:
                async def plain():
                    with model.decode(P, max_new_tokens=100) as tracer:
                        model.logits.save()
                    return await tracer.backend
                async def deadly():
                    with model.decode(P, max_new_tokens=100) as tracer:
                        for step in tracer.iter[0:100]:
                            model.layers[0].layer_output
                            if step == 3:
                                os._exit(7)
                    return await tracer.backend
                await plain()
                print("ready", flush=True)
                found = await asyncio.gather(plain(), deadly(), plain(), return_exceptions=True)
                print("reported", [type(one).__name__ for one in found], flush=True)
            print("closed", flush=True)

        if __name__ == "__main__":
            asyncio.run(main())
        """
    )
    ready = script.until("ready")
    assert script.until("reported") - ready < 10
    assert script.lines[-1].count("EngineDeadError") == 3
    script.until("closed")
    assert script.end() == 0, script.text


def test_with_ends_every_process_of_an_asynchronous_engine(child):
    script = child(
        """
        if __name__ == "__main__":
            with load(mode="async") as model:
                print("ready", flush=True)
            print("closed", flush=True)
            time.sleep(60)
        """
    )
    script.until("ready")
    ended(script)


def ended(script):
    """Wait until it has closed its model; the process lives on, those of the engine are gone."""
    engine = [one for one in script.family if "resource_tracker" not in " ".join(_command(one))]
    assert len(engine) >= 2
    script.until("closed")
    _, alive = psutil.wait_procs(engine, timeout=5)
    # One that its parent has not asked after yet has ended too.
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_an_exception_leaves_no_process(child):
    script = child(
        """
        if __name__ == "__main__":
            model = load()
            print("ready", flush=True)
            with model.prefill(P):
                raise ValueError("of the block")
        """
    )
    script.until("ready")
    assert script.end() == 1
    assert "ValueError: of the block" in script.text
    assert not script.left()


@pytest.mark.parametrize("group", [False, True], ids=["the process", "the terminal"])
def test_an_interruption_leaves_no_process(child, group):
    script = child(
        """
        if __name__ == "__main__":
            with load(block_timeout=5.0) as model:
                with model.prefill(P):
                    model.logits.save()
                print("ready", flush=True)
                with model.decode(P, max_new_tokens=100) as tracer:
                    for step in tracer.iter[0:100]:
                        model.layers[0].layer_output
                        time.sleep(0.2)
        """
    )
    script.until("ready")
    time.sleep(1.0)
    if group:
        os.killpg(script.process.pid, signal.SIGINT)
    else:
        script.process.send_signal(signal.SIGINT)
    assert script.end() != 0
    assert "KeyboardInterrupt" in script.text
    assert not script.left()


def test_an_interrupted_trace_is_not_the_next_ones(child):
    """In a notebook the engine outlives the interruption."""
    script = child(
        """
        if __name__ == "__main__":
            with load() as model:
                def run(prompt):
                    with model.prefill(prompt):
                        logits = model.logits.save()
                    return logits
                first, other = run(P), run(P[::-1])
                print("ready", flush=True)
                try:
                    with model.decode(max_new_tokens=100) as tracer:
                        for _ in range(3):
                            with tracer.invoke(P):
                                for step in tracer.iter[0:100]:
                                    model.layers[0].layer_output
                                    time.sleep(0.1)
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                assert torch.equal(run(P[::-1]), other)
                assert torch.equal(run(P), first)
                with model.prefill() as tracer:
                    for prompt in (P, P[::-1]):
                        with tracer.invoke(prompt):
                            logits = model.logits.save()
                assert len(logits) == 2
                (count,) = model.vllm_entrypoint.llm_engine.collective_rpc("nnsight_request_count")
                print("count", count, flush=True)
            print("closed", flush=True)
            time.sleep(60)
        """
    )
    script.until("ready")
    time.sleep(1.0)
    script.process.send_signal(signal.SIGINT)
    script.until("interrupted")
    script.until("count")
    assert script.lines[-1].split() == ["count", "0"]
    ended(script)
