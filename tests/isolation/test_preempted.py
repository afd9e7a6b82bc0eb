"""A request that was preempted and ends before it resumes, in a cache too small for all."""

from __future__ import annotations

import asyncio

import pytest
import torch
import workload

pytestmark = pytest.mark.slow

PROMPTS = [[3 + (7 * i + k) % 290 for i in range(30)] for k in range(3)]
TOKENS = 95


def reading(model, prompt):
    with model.decode(prompt, max_new_tokens=TOKENS) as tracer:
        rows = [].save()
        for _ in tracer.iter[0:TOKENS]:
            rows.append(model.logits[:, -1])
    return tracer.backend


def editing(model, prompt):
    with model.decode(prompt, max_new_tokens=TOKENS) as tracer:
        for _ in tracer.iter[0:TOKENS]:
            model.layers[1].layer_output[:] += 1.0
    return tracer.backend


async def followed(backend, seen):
    """What a stream ends with, and on the way how many tokens it has."""
    async for output in backend:
        seen.append(len(output.outputs[0].token_ids))
    return torch.stack(output.saves["rows"])


def test_it_leaves_what_now_belongs_to_others_alone(checkpoint):
    # Room for the two that come first, and while they are short for the third.
    room = {"num_gpu_blocks_override": 9, "block_size": 32, "block_timeout": 60.0}

    async def beside():
        with workload.asynchronous(checkpoint("llama"), **room) as model:
            alone = [await followed(reading(model, prompt), []) for prompt in PROMPTS[:2]]
            counts = [[], [], []]
            others = [
                asyncio.create_task(followed(reading(model, prompt), seen))
                for prompt, seen in zip(PROMPTS[:2], counts[:2], strict=True)
            ]
            edited = asyncio.create_task(followed(editing(model, PROMPTS[2]), counts[2]))
            while len(counts[0]) < 3 * TOKENS // 4:
                await asyncio.sleep(0.002)
            assert len(counts[2]) < TOKENS // 2, "it was not preempted"
            edited.cancel()
            return alone, await asyncio.gather(*others)

    for expected, found in zip(*asyncio.run(beside()), strict=True):
        assert torch.equal(found, expected)
