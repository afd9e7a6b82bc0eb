"""Soak an engine: many requests of every kind at once, a third of them faulty.

    python scripts/soak.py [requests] [seed]

First with room for all, then with a cache so small that requests are preempted.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "isolation"))

import workload

from nnterp.core.testing import build

ROOMY = {"longest": 14}, {}
TIGHT = {"longest": 80}, {"num_gpu_blocks_override": 24, "block_size": 32}


def main(count: int = 200, seed: int = 0) -> int:
    found = 0
    for asked, options in (ROOMY, TIGHT):

        async def soaked(asked=asked, options=options) -> workload.Report:
            with workload.asynchronous(str(build("llama")), **options) as model:
                return await workload.soak(model, workload.requests(count, seed, **asked))

        report = asyncio.run(soaked())
        print(options or "room for all", report, flush=True)
        found += len(report.problems) + report.left
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
