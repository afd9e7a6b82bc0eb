"""README.md is true: its blocks run and print what it says. Its tables are tested with the pages of
the documentation.

``python tests/test_readme.py`` writes the outputs anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"

# A block of Python, and what it prints.
_BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)
_MARK = "== next block =="


def blocks(readme: str) -> list[tuple[str, str]]:
    """Each block with the output that is said of it."""
    return _BLOCK.findall(readme)


def run(code: str, folder: Path, *, in_process: bool) -> str:
    """What ``code`` prints as a script of its own."""
    script = folder / "script.py"
    script.write_text(code)
    environment = {
        "NNTERP_CACHE": str(ROOT / ".cache" / "nnterp"),
        **os.environ,
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    if in_process:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    ran = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def outputs(readme: str, folder: Path) -> list[str]:
    """What each block prints: the first as a script, the others after it, one after another."""
    first, *others = [code for code, _ in blocks(readme)]
    found = [run(first, folder, in_process=False)]
    # They go on from the first one's names, and share a process with vLLM's engine.
    names = first.split("if __name__")[0] + "\ncheckpoint = smollm2()\n"
    later = run(
        names + "".join(f"print('{_MARK}')\n{code}\n" for code in others), folder, in_process=True
    )
    return found + [output.removeprefix("\n") for output in later.split(_MARK)[1:]]


@pytest.mark.smoke
def test_every_block_says_what_it_prints() -> None:
    readme = README.read_text()
    assert len(blocks(readme)) == readme.count("```python") >= 3


@pytest.mark.smoke
def test_the_links_lead_somewhere() -> None:
    readme = README.read_text()
    headings = re.findall(r"^#+ (.*)$", readme, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in headings}
    for target in re.findall(r"\]\(([^)]+)\)", readme):
        if target.startswith("#"):
            assert target[1:] in anchors
        elif "://" not in target:
            assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:packages|tests|examples)/[\w./-]*|\.ci/run)`", readme):
        assert (ROOT / path).exists(), path


@pytest.mark.slow
def test_every_block_prints_what_is_said(tmp_path: Path) -> None:
    readme = README.read_text()
    said = [output for _, output in blocks(readme)]
    assert outputs(readme, tmp_path) == said


def write_outputs() -> None:
    """Write what the blocks print into README.md."""
    import tempfile

    readme = README.read_text()
    with tempfile.TemporaryDirectory() as folder:
        found = iter(outputs(readme, Path(folder)))
    README.write_text(
        _BLOCK.sub(lambda m: f"```python\n{m[1]}```\n\n```text\n{next(found)}```\n", readme)
    )


if __name__ == "__main__":
    write_outputs()
