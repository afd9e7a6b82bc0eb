"""Run many traces on one engine and watch the memory of its processes.

python scripts/long_life.py [traces]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "isolation"))

import lifetime

ALLOWED = 20.0


def main(count: int = 10_000) -> int:
    def report(number: int, held: dict[str, float]) -> None:
        sizes = ", ".join(f"{name} {size:.1f}" for name, size in held.items())
        print(f"{number}: {sizes} MiB", flush=True)

    grown, left = lifetime.live(count, min(1000, count // 2), report)
    print("grown by", {name: round(size, 1) for name, size in grown.items()}, "MiB;", left, "left")
    return 1 if left or max(grown.values()) >= ALLOWED else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
