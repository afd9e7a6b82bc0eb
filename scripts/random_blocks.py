"""Run seeded random blocks on both engines against plain torch hooks.

python scripts/random_blocks.py [programs] [first seed] [checkpoint ...]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "isolation"))

import generator

from nnterp.core.testing import Oracle, build


def main(programs: int = 2000, first: int = 0, *names: str) -> int:
    found = 0
    for name in names or ("llama",):
        oracle = Oracle(build(name), name)
        for model in generator.both(str(build(name))):
            keys, started = generator.keys_of(oracle, model), time.perf_counter()
            for seed in range(first, first + programs):
                for problem in generator.compare(oracle, model, generator.program(seed, keys)):
                    found += 1
                    print(name, model.engine, problem, flush=True)
            seconds = time.perf_counter() - started
            print(f"{name} {model.engine}: {programs} programs in {seconds:.0f} s", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    sys.exit(main(*numbers, *sys.argv[3:]))
