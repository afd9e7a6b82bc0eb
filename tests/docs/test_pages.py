"""The documentation's pages are true: their blocks run and print what is said, their tables are the
library's own, and every name in a table is one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .snippets import DOCS, HUB, blocks, commands, engines, generator, matches, scripts

PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
RUN = {name: path.read_text() for name, path in PAGES.items() if scripts(path.read_text())}
"""The pages with blocks that run."""

SCRIPT = Path(__file__).with_name("snippets.py")

# The engines share a process, in which what vLLM changes comes last.
ORDER = sorted(
    ((name, engine) for name, text in RUN.items() for engine in engines(text)),
    key=lambda run: run[1] == "vllm" or 'engine="vllm"' in RUN[run[0]],
)


def _key(name: str, engine: str | None) -> str:
    return str(PAGES[name]) + (f":{engine}" if engine else "")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every page printed, all of them run in one process."""
    output = tmp_path_factory.mktemp("docs") / "ran.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(output), *(_key(*run) for run in ORDER)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), ORDER, ids=str)
def test_every_block_prints_what_is_said(ran: Any, name: str, engine: str | None) -> None:
    result = ran[_key(name, engine)]
    assert result["error"] is None, result["error"]
    said = [block.said or "" for block in scripts(RUN[name])]
    assert result["outputs"] == said, "run: hatch run outputs PAGE"
    for (command, expected), (code, printed) in zip(
        commands(RUN[name]), result["commands"], strict=True
    ):
        assert code == 0, f"{command}\n{printed}"
        assert matches(printed, expected), f"{command}\n{printed}"


@pytest.mark.smoke
def test_the_pages_that_have_blocks_run() -> None:
    with_code = {name for name, path in PAGES.items() if "```python\n" in path.read_text()}
    assert with_code == set(RUN)
    assert {"index.md", "values.md", "vllm.md", "writing-a-family.md"} <= with_code
    both = [name for name, text in RUN.items() if set(engines(text)) == {"hf", "vllm"}]
    assert "values.md" in both
    # What is on the hub is the copy that the tests have, so nothing is fetched.
    named = {match for text in RUN.values() for match in re.findall(r'"([\w.-]+/[\w.-]+)"', text)}
    assert {one for one in named if not one.endswith(".py")} <= {HUB}


@pytest.mark.smoke
@pytest.mark.parametrize("path", generator().pages(), ids=lambda path: path.name)
def test_the_tables_are_the_librarys(path: Path) -> None:
    page = path.read_text()
    assert generator().written(page) == page, "run: hatch run tables"


@pytest.mark.smoke
def test_every_part_is_on_a_page() -> None:
    used = {
        match[2]
        for path in generator().pages()
        for match in generator().PART.finditer(path.read_text())
    }
    assert used == set(generator().PARTS)


@pytest.mark.smoke
def test_what_pip_is_told_is_what_the_readme_says() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    for name in ("start/transformers.md", "start/vllm.md"):
        told = re.findall(r"^\$ (pip .*)$", PAGES[name].read_text(), flags=re.MULTILINE)
        assert told
        for command in told:
            plain, _, index = command.partition(" --extra-index-url ")
            assert plain in readme
            assert index in readme


# -- names in tables -------------------------------------------------------------------------------

CORE = DOCS.parent / "packages" / "nnterp-core"
HF = DOCS.parent / "packages" / "nnterp-hf"
VLLM = DOCS.parent / "packages" / "nnterp-vllm"

# Where the names stand that a page's tables have besides those of the library.
SOURCES = {
    "availability.md": [
        VLLM / "src/nnterp/vllm/_conventions.py",
        HF / "src/nnterp/hf/_mixture.py",
        HF / "src/nnterp/hf/_interior.py",
    ],
    "differences.md": [CORE / "src/nnterp/core/equivalence/_text.py"],
    "index.md": [package / "pyproject.toml" for package in (CORE, HF, VLLM)],
    "vllm.md": [VLLM / "src/nnterp/vllm/_model.py"],
    "writing-a-family.md": [
        VLLM / "src/nnterp/vllm/_conventions.py",
        VLLM / "src/nnterp/families/vllm/llama.py",
        HF / "src/nnterp/families/hf/llama.py",
    ],
    "writing-an-engine.md": [VLLM / "src/nnterp/vllm/_model.py"],
}
# What is arbitrary in an example.
PLACEHOLDERS = {*"abinx", "ids", "text", "prompt", "why", "with", "None", "inf", "hf"}


def cells(name: str) -> list[str]:
    """Every code in a page's tables that are written by hand; on the page of other libraries'
    names, in the columns of ours."""
    page = generator().PART.sub("", PAGES[name].read_text())
    page = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    found = []
    for line in page.splitlines():
        if line.startswith("|"):
            row = line.strip("|").split("|")
            found += re.findall(r"`([^`]+)`", "|".join(row[1:] if name == "names.md" else row))
    return found


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", text))


def known(name: str) -> set[str]:
    """The names that a table of a page may have."""
    import builtins

    from nnterp.core import MODULES, SIZES, VOCABULARY
    from nnterp.core.families import Family
    from nnterp.core.protocols import StandardModel
    from nnterp.core.tracing import Standardized

    exported = {one for module in generator().PACKAGES for one in generator().exported(module)}
    axes = {axis for term in VOCABULARY.values() for axis in term.layout.axes}
    found = {*VOCABULARY, *MODULES, *SIZES, *axes, *exported, *dir(Standardized), *dir(builtins)}
    found |= {*vars(StandardModel), *StandardModel.__annotations__, *Family.__annotations__}
    found |= {"model", "tracer", "value", "invoke", "iter", "save", "batch", "ARCHITECTURE"}
    for source in SOURCES.get(name, []):
        found |= words(source.read_text())
    return found | PLACEHOLDERS


@pytest.mark.smoke
@pytest.mark.parametrize("name", [name for name in PAGES if cells(name)])
def test_every_name_in_a_table_resolves(name: str) -> None:
    there = known(name)
    unknown = {code: words(code) - there for code in cells(name) if words(code) - there}
    assert not unknown


@pytest.mark.smoke
def test_a_name_that_is_none_does_not_resolve() -> None:
    assert words("model.layers[i].layer_outptu") - known("names.md") == {"layer_outptu"}


@pytest.mark.smoke
def test_the_values_of_the_vocabulary_have_a_name_elsewhere() -> None:
    """The table for those who come from TransformerLens leaves out none that has a counterpart."""
    from nnterp.core import VOCABULARY

    named = {word for code in cells("names.md") for word in words(code)} & set(VOCABULARY)
    alone = {
        *("input_size", "lm_head_output"),
        *("router_logits", "expert_weights", "expert_indices", "expert_outputs"),
        *("routed_output", "shared_expert_output"),
    }
    assert named == set(VOCABULARY) - alone


@pytest.mark.smoke
def test_every_block_is_of_a_known_kind() -> None:
    for name, path in PAGES.items():
        kinds = {block.kind for block in blocks(path.read_text())}
        assert kinds <= {"", "python", "python3", "text", "console", "toml"}, name
