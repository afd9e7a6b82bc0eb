"""The blocks of the documentation's pages, and what they print when they are run.

A ``python`` block runs, after those before it on its page; a ``text`` block after it is what it
prints. One with a ``title`` is a file, which the page's other blocks may import. Of a ``console``
block the commands that start one of ``COMMANDS`` are run, beside these files.

    python snippets.py OUTPUT PAGE[:ENGINE]...

runs pages in this process, one after another, and writes what their blocks print, as JSON. With an
engine, every ``engine="..."`` of the page is that one.

    python snippets.py --write PAGE...

writes into pages what their blocks print.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMANDS = ("pytest",)

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""A name on the hub, where the tests run the copy that they have of it."""

_FENCE = re.compile(
    r"^```(?P<kind>[\w-]*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_MARK = "\x1enext block\x1e"


@cache
def generator() -> Any:
    """``docs/generate.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        kind: ``"python"``, ``"text"``, ``"console"``, or nothing.
        body: what is in it.
        title: the file that it is, or ``None``.
        said: what the page says that it prints, or ``None`` where it says nothing.
    """

    kind: str
    body: str
    title: str | None = None
    said: str | None = None


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order, each with the output that follows it."""
    matches = list(_FENCE.finditer(page))
    found: list[Block] = []
    for i, match in enumerate(matches):
        after = matches[i + 1] if i + 1 < len(matches) else None
        follows = (
            after is not None
            and after["kind"] == "text"
            and not page[match.end() : after.start()].strip()
        )
        said = after["body"] if after is not None and follows else None
        found.append(Block(match["kind"], match["body"], match["title"], said))
    return found


def scripts(page: str) -> list[Block]:
    """The blocks of a page that run."""
    return [one for one in blocks(page) if one.kind == "python" and one.title is None]


def commands(page: str) -> list[tuple[str, str]]:
    """The commands of a page that are run, each with the output that is said of it."""
    found: list[tuple[str, str]] = []
    for block in blocks(page):
        if block.kind != "console":
            continue
        for part in re.split(r"^\$ ", block.body, flags=re.MULTILINE)[1:]:
            command, _, said = part.partition("\n")
            if command.split()[0] in COMMANDS:
                found.append((command, said))
    return found


def matches(found: str, said: str) -> bool:
    """Whether ``found`` is what is said: a line ``...`` stands for any lines, a number for any
    number, and what follows on a line is not said."""
    lines = [re.sub(r"\d+", r"\\d+", re.escape(line.strip())) for line in said.strip().splitlines()]
    pattern = "".join(
        r"(?:.*\n)*?" if line == re.escape("...") else rf"\s*{line}.*\n" for line in lines
    )
    return re.fullmatch(pattern, found.strip() + "\n") is not None


def script(page: str) -> str:
    """A page's blocks as one script, which says where each ends."""
    return "".join(f"{block.body}\nprint({_MARK!r})\n" for block in scripts(page))


def engines(page: str) -> list[str | None]:
    """The engines that a page says its blocks run on; ``None`` for those that the blocks name."""
    said = re.search(r"^<!-- engines: (.*) -->$", page, re.MULTILINE)
    return [None] if said is None else list(said[1].split(", "))


def on(engine: str | None, page: str) -> str:
    """The page with its engine for another."""
    return page if engine is None else re.sub(r'engine="\w+"', f'engine="{engine}"', page)


def here(code: str) -> str:
    """``code`` with a local folder for the model on the hub."""
    if HUB not in code:
        return code
    from nnterp.core.testing import smollm2

    return code.replace(HUB, str(smollm2()))


def filled(page: str, outputs: list[str]) -> str:
    """The page with what its blocks print."""
    left = iter(outputs)

    def block(match: re.Match[str]) -> str:
        if match["kind"] != "python" or match["title"] is not None:
            return match[0]
        printed = next(left)
        code = match[0].removesuffix(match["after"] or "")
        return f"{code}\n\n```text\n{printed}```" if printed else code

    pattern = _FENCE.pattern + r"(?P<after>\n\n```text\n.*?^```$)?"
    return re.sub(pattern, block, page, flags=_FENCE.flags)


def run(text: str) -> dict[str, object]:
    """What a page's blocks and commands print, in a folder of its own."""
    result: dict[str, object] = {"outputs": [], "commands": [], "error": None}
    before, path = Path.cwd(), list(sys.path)
    modules = set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        for block in blocks(text):
            if block.kind == "python" and block.title is not None:
                file = Path(folder, block.title)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.body)
        # nnsight reads a block's source by its file's name, so each page has another one.
        page = Path(folder, "page.py")
        page.write_text(here(script(text)))
        printed, names = io.StringIO(), {}
        try:
            with contextlib.redirect_stdout(printed):
                names = runpy.run_path(str(page), run_name="__main__")
        except BaseException:
            result["error"] = traceback.format_exc()
        finally:
            for found in names.values():
                if hasattr(found, "vllm_entrypoint"):
                    found.close()
        result["outputs"] = [
            part.removeprefix("\n") for part in printed.getvalue().split(_MARK)[:-1]
        ]
        if result["error"] is None:
            result["commands"] = [called(command) for command, _ in commands(text)]
        os.chdir(before)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(folder):
                del sys.modules[name]
    return result


def called(command: str) -> list[object]:
    """The exit code of a command, and what it prints."""
    ran = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)]
        if command.startswith("pytest")
        else shlex.split(command),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return [ran.returncode, ran.stdout if ran.returncode == 0 else ran.stdout + ran.stderr]


if __name__ == "__main__":
    # The engine in this process, quiet, and nothing fetched.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("NNTERP_CACHE", str(DOCS.parent / ".cache" / "nnterp"))
    output, *pages = sys.argv[1:]
    if output == "--write":
        for page in map(Path, pages):
            text = page.read_text()
            result = run(text)
            if result["error"]:
                sys.exit(str(result["error"]))
            page.write_text(filled(text, result["outputs"]))
    else:
        found = {}
        for name in pages:
            file, _, engine = name.partition(":")
            found[name] = run(on(engine or None, Path(file).read_text()))
        Path(output).write_text(json.dumps(found))
