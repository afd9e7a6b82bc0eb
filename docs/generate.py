"""The generated parts of README.md and of the documentation's pages: ``hatch run tables``.

A part lies between ``<!-- name: written by ... -->`` and ``<!-- end -->``; each name is a function
here. A test holds every page to what they give.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCES = [ROOT / "packages" / name / "src" for name in ("nnterp-core", "nnterp-hf", "nnterp-vllm")]
PART = re.compile(r"(<!-- ([\w-]+): written by .*? -->\n).*?(<!-- end -->\n)", re.DOTALL)


def pages() -> list[Path]:
    """README.md and every page of the documentation."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    first, *others = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n"
        for line in (head, *rows)
    ]
    return f"{first}|{'---|' * len(head)}\n{''.join(others)}"


def codes(names: Iterable[str]) -> str:
    """Names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


# -- the vocabulary --------------------------------------------------------------------------------


def _axes(term: Any) -> str:
    layout = f"`{' '.join(term.layout.axes)}`"
    return layout + {"float": "", "int": ", int", "sizes": ", a tuple"}[term.layout.kind]


@cache
def vocabulary() -> str:
    """Every value, with its hosts."""
    from nnterp.core import VOCABULARY

    return table(
        ["value", "on", "layout", "meaning", "writable"],
        [
            [
                f"`{term.name}`",
                codes(term.hosts),
                _axes(term),
                term.meaning,
                "yes" if term.writable else "no",
            ]
            for term in VOCABULARY.values()
        ],
    )


def _host(*hosts: str) -> Callable[[], str]:
    def values() -> str:
        from nnterp.core import VOCABULARY

        return table(
            ["value", "layout", "meaning", "writable", "gradients"],
            [
                [
                    f"`{term.name}`",
                    _axes(term),
                    term.meaning,
                    "yes" if term.writable else "no",
                    "yes" if term.gradients else "no",
                ]
                for term in VOCABULARY.values()
                if set(hosts) & set(term.hosts)
            ],
        )

    return values


def _mlp(mixture: bool) -> Callable[[], str]:
    def values() -> str:
        from nnterp.core._vocabulary import MIXTURE

        lines = _host("mlp")().splitlines(keepends=True)
        chosen = [line for line in lines[2:] if (line.split("`")[1] in MIXTURE) is mixture]
        return "".join(lines[:2] + chosen)

    return values


@cache
def axes() -> str:
    """Every axis of a layout, by the values that have it."""
    from nnterp.core import VOCABULARY

    meanings = {
        "batch": "one row for each prompt; always 1 on vLLM",
        "seq": "the tokens of this step: the whole prompt, then one at a time",
        "hidden": "the residual stream's width, `hidden_size`",
        "vocab": "the logits, `vocab_size`",
        "neurons": "a dense MLP's width, `intermediate_size`",
        "heads": "query heads, `num_heads`",
        "kv_heads": "key and value heads, `num_kv_heads`",
        "head_dim": "the width of a value head, `head_dim`",
        "qk_head_dim": "the width of a query or key head, `qk_head_dim`",
        "query": "the tokens of this step, as those that attend",
        "key": "the tokens that are attended to: all so far, or what a window's cache still holds",
        "experts": "the experts of a mixture",
        "top_k": "the experts that a token is given to, in the order that the engine has them",
    }
    used = {axis for term in VOCABULARY.values() for axis in term.layout.axes}
    assert used == set(meanings), used ^ set(meanings)
    return table(["axis", "what it counts"], [[f"`{k}`", v] for k, v in meanings.items()])


@cache
def sizes() -> str:
    """The sizes, with what each class says of them."""
    from nnterp.core import SIZES
    from nnterp.core.tracing import Attention, Mixture, Mlp, Standardized

    def on(host: Any, name: str) -> bool:
        return isinstance(inspect.getattr_static(host, name, None), property)

    rows = []
    for name in SIZES:
        said = inspect.getdoc(inspect.getattr_static(Standardized, name)) or ""
        hosts = ["model"]
        hosts += ["self_attn"] if on(Attention, name) else []
        hosts += ["mlp"] if on(Mlp, name) and on(Mixture, name) else []
        rows.append([f"`{name}`", codes(hosts), said.rstrip(".")[0].lower() + said.rstrip(".")[1:]])
    return table(["size", "on", "what it is"], rows)


# -- families --------------------------------------------------------------------------------------


@cache
def families() -> str:
    """The families of each engine."""
    from nnterp.core import families

    hf, vllm = families.known("hf"), families.known("vllm")
    both = [name for name in hf if name in vllm]
    rows = [["both engines", codes(both)]]
    for engine, names in (("transformers", hf), ("vLLM", vllm)):
        alone = [name for name in names if name not in both]
        if alone:
            rows.append([f"{engine} alone", codes(alone)])
    return table(["on", "families"], rows)


@cache
def faults() -> str:
    """The known faults of the engines."""
    from nnterp.core.faults import shipped

    engines = {"hf": "transformers", "vllm": "vLLM"}
    return table(
        ["engine", "of", "models", "what it does", "what to do"],
        [
            [
                engines[fault.engine],
                f"`{fault.version}`",
                codes(fault.model_types),
                fault.cause,
                fault.advice,
            ]
            for fault in shipped().faults
        ],
    )


@cache
def refused() -> str:
    """The options that the engine on vLLM refuses, from its source: importing it takes vLLM."""
    source = SOURCES[2] / "nnterp" / "vllm" / "_model.py"
    options = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_REFUSED"
    )
    return table(["option", "why"], [[f"`{name}=`", why] for name, why in options.items()])


def _conformance(name: str) -> Callable[[], str]:
    def part() -> str:
        module = beside("conformance")
        made = getattr(module, name)
        found: str = made(table) if "table" in inspect.signature(made).parameters else made()
        return found

    return part


@cache
def beside(name: str) -> Any:
    """A module of this folder, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attributes(documented: type[Any]) -> Iterator[tuple[list[str], str]]:
    """The entries under ``Attributes:`` of a docstring: names, and what is said of them."""
    said = (inspect.getdoc(documented) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"\n(?=    \S)", said):
        names, _, words = " ".join(entry.split()).partition(": ")
        yield names.split(", "), words.replace("``", "`")


def _default(found: Any) -> str:
    default = found.default
    if default is MISSING and found.default_factory is MISSING:
        return "must be said"
    if default is MISSING:
        default = found.default_factory()
    if default is None or isinstance(default, (str, bool, int, float, tuple, dict, frozenset)):
        return f"`{default!r}`"
    return "by the config" if callable(default) else f"`{type(default).__name__}()`"


def _facts(
    name: str, module: str = "nnterp.core.architectures", head: str = "fact"
) -> Callable[[], str]:
    def facts() -> str:
        import importlib

        documented = getattr(importlib.import_module(module), name)
        by_name = {field.name: field for field in fields(documented)}
        rows = []
        for names, words in attributes(documented):
            defaults = [_default(by_name.pop(one)) for one in names]
            shown = defaults[:1] if len(set(defaults)) == 1 else defaults
            rows.append([codes(names), ", ".join(shown), words.rstrip(".")])
        assert not by_name, f"{name} does not document {', '.join(by_name)}"
        return table([head, "if not said", "what it says"], rows)

    return facts


@cache
def rows() -> str:
    """The architectures that core has, and how each differs from Llama's, in a word or two."""
    from nnterp.core import architectures
    from nnterp.core.architectures import LLAMA, Architecture

    found = []
    for name, facts in vars(architectures).items():
        if not isinstance(facts, Architecture):
            continue
        differ = [
            field.name
            for field in fields(facts)
            if field.name != "model_type"
            and getattr(facts, field.name) != getattr(LLAMA, field.name)
        ]
        found.append([f"`{name}`", codes(differ) if differ else "nothing"])
    return table(["row", "differs from `LLAMA` in"], found)


# -- the kit ---------------------------------------------------------------------------------------


@cache
def promises() -> str:
    """The conformance tests, by what is wrong where one fails."""
    # As text: it is a module of tests, which pytest imports with its own markers.
    source = SOURCES[0] / "nnterp" / "core" / "testing" / "conformance.py"
    rows = []
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            said = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("``", "`")
            rows.append([f"`{node.name}`", " ".join(said.split()).rstrip(".")])
    return table(["test", "where it fails"], rows)


@cache
def bounds() -> str:
    """How far off a row may be, and of which values farther."""
    from nnterp.core.testing.bench import BOUND, LOOSER

    def number(bound: float) -> str:
        return f"{bound:.0e}".replace("e-0", "e-")

    looser = "".join(f", and one of `{name}` by {number(bound)}" for name, bound in LOOSER.items())
    return f"\nA row of a value may be off by {number(BOUND)} of its largest magnitude{looser}.\n\n"


@cache
def adapter() -> str:
    from nnterp.core.testing.adapters import Adapter

    rows = [[codes(names), words.rstrip(".")] for names, words in attributes(Adapter)]
    for name in ("load", "close"):
        said, parts = sections(getattr(Adapter, name))
        given = [f"`{one}`: {words}" for one, words in parts.get("Args", {}).items()]
        rows.append([f"`{called(Adapter, name)}`", " ".join([said, *given]).rstrip(".")])
    return table(["of the adapter", "what it is"], rows)


@cache
def methods() -> str:
    """What the protocol says of a model's methods."""
    from nnterp.core.protocols import StandardModel

    rows = []
    for name, method in vars(StandardModel).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        said, parts = sections(method)
        given = [f"`{one}`: {words}" for one, words in parts.get("Args", {}).items()]
        gives = [f"Returns {words}" for words in parts.get("Returns", {"": ""}).values() if words]
        raises = [f"`{error}`: {words}" for error, words in parts.get("Raises", {}).items()]
        rows.append(
            [f"`{called(StandardModel, name)}`", " ".join([said, *given, *gives]), " ".join(raises)]
        )
    return table(["method", "what it does", "raises"], rows)


def called(owner: type[Any], name: str) -> str:
    """A method's call, without types: ``load(path, **options)``."""
    signature = inspect.signature(getattr(owner, name))
    plain = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in list(signature.parameters.values())[1:]
    ]
    return f"{name}{inspect.Signature(plain)}"


def sections(documented: Any) -> tuple[str, dict[str, dict[str, str]]]:
    """What a docstring says before its sections, and each section by what its entries are of.

    ``Returns`` has one entry, of the empty name.
    """
    said, *rest = re.split(r"\n\n(?=[A-Z]\w+:\n)", inspect.getdoc(documented) or "")
    found: dict[str, dict[str, str]] = {}
    for section in rest:
        title, _, body = section.partition(":\n")
        entries = found.setdefault(title, {})
        for entry in re.split(r"\n(?=    \S)", body) if title != "Returns" else [": " + body]:
            name, _, words = _plain(entry).partition(": ")
            entries[name.lstrip(":").strip()] = words.strip()
    return _plain(said), found


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


TOY = ROOT / "tests" / "toy"


def _toy(file: str, *names: str) -> Callable[[], str]:
    """Parts of the toy engine's source: whole files, classes, or methods of classes."""

    def code() -> str:
        source = (TOY / file).read_text()
        parts = [_definition(source, name) for name in names] or [source.rstrip()]
        body = "\n\n\n".join(parts)
        # It is formatted where it stands, and a method's lines are shorter here.
        fence = f'```python3 title="tests/toy/{file}"\n{body}\n```'
        return f"\n<!-- fmt: off -->\n\n{fence}\n\n<!-- fmt: on -->\n\n"

    return code


@cache
def toy() -> str:
    """The whole of the toy engine, folded away."""
    whole = textwrap.indent(f"```python3\n{(TOY / 'engine.py').read_text()}```", "    ")
    folded = f'??? example "tests/toy/engine.py"\n\n{whole}'
    return f"\n<!-- fmt: off -->\n\n{folded}\n\n<!-- fmt: on -->\n\n"


def _definition(source: str, name: str) -> str:
    found: Any = ast.parse(source)
    for part in name.split("."):
        found = next(node for node in found.body if getattr(node, "name", None) == part)
    lines = source.splitlines()[found.lineno - 1 : found.end_lineno]
    return textwrap.dedent("\n".join(lines))


# -- the reference ---------------------------------------------------------------------------------


def exported(module: str) -> list[str]:
    """The public names that a package's ``__init__`` says it has: ``from a import x as x``."""
    found = [path for source in SOURCES if (path := source / module.replace(".", "/")).is_dir()]
    tree = ast.parse((found[0] / "__init__.py").read_text())
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name and not alias.name.startswith("_")
    ]
    return sorted(dict.fromkeys(names), key=str.lower)


def _reference(module: str) -> Callable[[], str]:
    def directives() -> str:
        # A module among them has a page of its own.
        names = [name for name in exported(module) if f"{module}.{name}" not in MODULES]
        return "\n" + "".join(f"::: {module}.{name}\n\n" for name in names)

    return directives


MODULES = {
    "nnterp.core": "core",
    "nnterp.core.protocols": "protocols",
    "nnterp.core.families": "families",
    "nnterp.core.architectures": "architectures",
    "nnterp.core.faults": "faults",
    "nnterp.core.reading": "reading",
    "nnterp.core.equivalence": "equivalence",
    "nnterp.core.testing": "testing",
    "nnterp.core.tracing": "tracing",
    "nnterp.hf": "hf",
    "nnterp.vllm": "vllm",
}
"""The page of the reference for each public module."""

PACKAGES = (
    *("nnterp.core", "nnterp.core.equivalence", "nnterp.core.tracing"),
    *("nnterp.hf", "nnterp.vllm"),
)
"""Those whose public names are imported from private modules."""

PARTS: dict[str, Callable[[], str]] = {
    "vocabulary": vocabulary,
    "model-values": _host("model"),
    "layer-values": _host("layer"),
    "attention-values": _host("self_attn", "linear_attn"),
    "mlp-values": _mlp(mixture=False),
    "mixture-values": _mlp(mixture=True),
    "axes": axes,
    "sizes": sizes,
    "families": families,
    "faults": faults,
    "refused": refused,
    **{
        f"conformance-{name}": _conformance(name)
        for name in ("versions", "summary", "common", "families")
    },
    "architecture": _facts("Architecture"),
    "attention": _facts("Attention"),
    "mixture": _facts("Mixture"),
    "recipe": _facts("Recipe", "nnterp.core.testing.recipes", "field"),
    "reference": _facts("Reference", "nnterp.core.testing.recipes", "field"),
    "mixture-reference": _facts("MixtureReference", "nnterp.core.testing.recipes", "field"),
    "rows": rows,
    "promises": promises,
    "bounds": bounds,
    "adapter": adapter,
    "methods": methods,
    "toy-adapter": _toy("adapter.py"),
    "toy-forward": _toy("engine.py", "ToyModel.forward", "ToyModel._attention"),
    "toy-run": _toy("engine.py", "Run"),
    "toy-value": _toy("engine.py", "Value"),
    "toy-trace": _toy("engine.py", "Trace", "Steps"),
    "toy-host": _toy("engine.py", "Host"),
    "toy-push": _toy("engine.py", "push"),
    "toy-checked": _toy("engine.py", "ToyModel.checked"),
    "toy": toy,
    **{f"reference-{MODULES[module]}": _reference(module) for module in PACKAGES},
}


def written(page: str) -> str:
    """``page`` with its parts made anew."""

    def part(match: re.Match[str]) -> str:
        return match[1] + PARTS[match[2]]() + match[3]

    return PART.sub(part, page)


if __name__ == "__main__":
    for path in pages():
        text = path.read_text()
        if (new := written(text)) != text:
            path.write_text(new)
