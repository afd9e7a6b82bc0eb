"""Many requests of every kind at once, in the engine's own processes, a third of them faulty."""

from __future__ import annotations

import asyncio

import pytest
import workload

pytestmark = pytest.mark.slow

COUNT = 72


def soaked(checkpoint, count, longest, **options):
    async def run():
        with workload.asynchronous(checkpoint("llama"), **options) as model:
            return await workload.soak(model, workload.requests(count, 0, longest))

    return asyncio.run(run())


@pytest.mark.filterwarnings("ignore:.*was never reached:UserWarning")
def test_room_for_all(checkpoint):
    report = soaked(checkpoint, COUNT, longest=14)
    assert not report.problems, str(report)
    assert report.left == 0
    assert report.preempted == 0
    assert len(report.counts) >= 12
    assert set(report.counts) == workload.HEALTHY.keys() | workload.FAULTY.keys()


@pytest.mark.filterwarnings("ignore:.*was never reached:UserWarning")
def test_a_cache_too_small_for_all(checkpoint):
    report = soaked(
        checkpoint, 48, longest=80, num_gpu_blocks_override=16, block_size=32, block_timeout=1.0
    )
    assert not report.problems, str(report)
    assert report.left == 0
    assert report.preempted > 0, "nothing was preempted, so nothing is shown"
