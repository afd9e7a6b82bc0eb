"""The version, which the three distributions share: print it, or set it in all of them.

    hatch run version            0.1.0
    hatch run version 0.2.0      the versions, and each backend's pin on the core

Its one source is nnterp-core's pyproject.toml; a test holds the others to it.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("nnterp-core", "nnterp-hf", "nnterp-vllm")
# MAJOR.MINOR.PATCH, and rc1 and the like behind it before a release.
SCHEME = re.compile(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}((a|b|rc)[1-9]\d*)?")


def current(root: Path) -> str:
    """The version, as nnterp-core has it."""
    text = (root / "packages" / "nnterp-core" / "pyproject.toml").read_text()
    version: str = tomllib.loads(text)["project"]["version"]
    return version


def set_version(root: Path, new: str) -> None:
    """Write ``new`` into the three projects."""
    old = current(root)
    for name in NAMES:
        file = root / "packages" / name / "pyproject.toml"
        text = file.read_text()
        text = text.replace(f'\nversion = "{old}"\n', f'\nversion = "{new}"\n')
        text = text.replace(f'"nnterp-core[nnsight]=={old}"', f'"nnterp-core[nnsight]=={new}"')
        file.write_text(text)


def scheme(text: str) -> str:
    """``text`` itself, if it is a version of our scheme."""
    if SCHEME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not MAJOR.MINOR.PATCH")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the version, or set it everywhere.")
    parser.add_argument("new", nargs="?", type=scheme, help="the version to set")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    arguments = parser.parse_args()
    if arguments.new is not None:
        set_version(arguments.root, arguments.new)
    else:
        print(current(arguments.root))


if __name__ == "__main__":
    main()
