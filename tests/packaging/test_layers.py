"""Which modules may import which: core's ground floor no framework, no engine the other."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

HEAVY = ("torch", "nnsight", "transformers", "vllm", "numpy")
UPPER = tuple(
    f"nnterp.core.{name}"
    for name in ("tracing", "experiments", "reading", "equivalence", "testing")
)


def under(module: str, *roots: str) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)


def module_of(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def only_for_types(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below ``node`` that can run: what is for type checkers alone is left out."""
    for child in ast.iter_child_nodes(node):
        if only_for_types(child):
            for other in child.orelse:
                yield other
                yield from running(other)
        else:
            yield child
            yield from running(child)


def imported(code: str, module: str, *, package: bool) -> set[str]:
    """The absolute names that ``code`` imports, inside functions too."""
    found = set()
    for node in running(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            # One dot is the package itself, which a module leaves by dropping its own name.
            base = parts[: len(parts) - node.level + package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{origin}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            first = node.args[0] if node.args else None
            if called in ("import_module", "importlib.import_module", "__import__") and isinstance(
                first, ast.Constant
            ):
                found.add(str(first.value))
    return found


def violations(source: Path, ours: Callable[[str], bool], forbidden: tuple[str, ...]) -> list[str]:
    """What the modules of ``source`` that are ``ours`` import and must not."""
    modules = {path: module_of(path, source) for path in sorted(source.rglob("*.py"))}
    chosen = {path: module for path, module in modules.items() if ours(module)}
    assert chosen
    return [
        f"{module}: {name}"
        for path, module in chosen.items()
        for name in sorted(imported(path.read_text(), module, package=path.name == "__init__.py"))
        if under(name, *forbidden)
    ]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import torch.nn as nn", "torch.nn"),
        ("from torch import nn", "torch.nn"),
        ("def late():\n    import numpy", "numpy"),
        ("try:\n    import vllm\nexcept ImportError:\n    pass", "vllm"),
        ("import importlib\nimportlib.import_module('vllm')", "vllm"),
        ("from .tracing import Host", "nnterp.core.tracing.Host"),
        ("from . import tracing", "nnterp.core.tracing"),
        ("from ..hf import Model", "nnterp.hf.Model"),
        ("if not TYPE_CHECKING:\n    import torch", "torch"),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "torch"),
    ],
)
def test_the_walk_sees_every_spelling(line, name):
    assert name in imported(line, "nnterp.core.module", package=False)


def test_the_walk_knows_a_package_from_a_module():
    assert imported("from . import a", "nnterp.core", package=True) == {"nnterp.core.a"}
    assert imported("from .. import a", "nnterp.core.b", package=True) == {"nnterp.core.a"}
    assert imported("from .. import a", "nnterp.core.b", package=False) == {"nnterp.a"}


def test_the_walk_leaves_out_what_is_for_type_checkers():
    code = "if TYPE_CHECKING:\n    import torch\nimport json"
    assert imported(code, "nnterp.core.module", package=False) == {"json"}


def test_the_ground_floor_imports_no_framework_and_nothing_above_it(packages):
    barred = (*HEAVY, *UPPER, "nnterp.hf", "nnterp.vllm")
    assert violations(packages[0].source, lambda name: not under(name, *UPPER), barred) == []


def test_hf_never_imports_vllm(packages):
    barred = ("vllm", "nnterp.vllm", "nnterp.families.vllm")
    assert violations(packages[1].source, lambda name: True, barred) == []


def test_vllm_never_imports_hf(packages):
    barred = ("nnterp.hf", "nnterp.families.hf")
    assert violations(packages[2].source, lambda name: True, barred) == []


def test_comparing_needs_nothing_of_testing(packages):
    barred = ("nnterp.core.testing", "pytest", "transformers")
    ours = ("nnterp.core.equivalence", "nnterp.core.reading", "nnterp.core.faults")
    assert violations(packages[0].source, lambda name: under(name, *ours), barred) == []
