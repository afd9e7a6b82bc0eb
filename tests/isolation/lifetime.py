"""Many traces on one engine, and how much memory its processes hold meanwhile."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from nnterp.core import OutOfOrder
from nnterp.core.testing import build

P = [5, 17, 250, 9, 33]
MIB = 2**20


def trace(model: Any, number: int) -> None:
    """One trace; every tenth fails, every seventh has two invokes, and each block is its own."""
    vector = torch.full((96,), float(number % 5))
    prompt = [3 + (number * 7 + i) % 290 for i in range(3 + number % 20)]

    def helper(value: Any) -> Any:
        return value * 0.5

    if number % 10 == 9:
        try:
            with model.prefill(prompt):
                model.layers[2].layer_output.save()
                model.layers[0].layer_output.save()
        except OutOfOrder:
            return
        raise AssertionError("it did not fail")
    if number % 7 == 6:
        with model.decode(max_new_tokens=3) as tracer:
            for one in (prompt, P):
                with tracer.invoke(one):
                    rows = [].save()
                    for _ in tracer.iter[0:3]:
                        model.layers[1].layer_output[:] += vector
                        rows.append(model.logits)
        assert len(rows) == 2
        return
    with model.prefill(prompt):
        model.layers[0].layer_output = helper(model.layers[0].layer_output)
        stream = model.layers[1].layer_output.save()
        logits = model.logits.save()
    assert stream.shape == (1, len(prompt), 96)
    assert logits.shape == (1, 1, 304)


def resident() -> dict[str, float]:
    """MiB that this process and each of its children hold, by name."""
    this = psutil.Process()
    found = {"client": this.memory_info().rss / MIB}
    for child in this.children(recursive=True):
        name = " ".join(child.cmdline()) or child.name()
        if "resource_tracker" not in name:
            found[f"{name.split()[0]} {child.pid}"] = child.memory_info().rss / MIB
    return found


def live(count: int, settle: int, report: Any = None) -> tuple[dict[str, float], int]:
    """Run ``count`` traces; by how many MiB each process grew after the first ``settle``.

    Returns:
        The growth by process, and how many requests the worker still holds.
    """
    mode = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(mode)
    os.environ[mode] = "1"
    try:
        return _live(count, settle, report)
    finally:
        os.environ.pop(mode)
        if before is not None:
            os.environ[mode] = before


def _live(count: int, settle: int, report: Any) -> tuple[dict[str, float], int]:
    from vllm import envs

    from nnterp.vllm import StandardizedVLLM

    # An engine that another test left in this process has frozen vLLM's settings.
    envs.disable_envs_cache()
    with StandardizedVLLM(
        str(build("llama")), dtype="float32", max_model_len=128, dispatch=True
    ) as model:
        start: dict[str, float] = {}
        for number in range(count):
            if number == settle:
                start = resident()
            trace(model, number)
            if report is not None and number % 500 == 499:
                report(number + 1, resident())
        now = resident()
        (left,) = model.vllm_entrypoint.llm_engine.collective_rpc("nnsight_request_count")
    return {name: now[name] - start[name] for name in start}, int(left)
