"""Faults of engines that are known: where an engine departs from transformers, and why.

One data file, ``known_faults.toml`` beside this module, says what each field of it means. A third
engine writes its own in the same layout. Plain Python: reading it needs no framework.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from nnterp.core import VOCABULARY


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Where the conformance tests see a fault.

    Attributes:
        checkpoint: the recipe's name.
        engine: the label of the engine that departs.
        value: the first value of the forward that departs, ``"layers.0.mlp.mlp_neurons"``.
        size: how far, as the largest share of a row that was measured.
        patch: the oracle's patch that does the same.
        version: which releases of the engine, where they are not the fault's own.
    """

    checkpoint: str
    engine: str
    value: str
    size: float
    patch: str
    version: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One ``[[fault]]`` of the data file, which says what each field means."""

    name: str
    engine: str
    version: str
    model_types: tuple[str, ...]
    values: tuple[str, ...]
    cause: str
    advice: str
    shown: tuple[Shown, ...]
    config: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    device: str | None = None
    layer_type: str | None = None
    longer_than: str | None = None


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A checkpoint that an engine cannot load, though it has a family for it.

    Attributes:
        checkpoint: the recipe's name.
        engine: the engine's label.
        version: which releases of it.
        cause: why not.
        error: a pattern of what it says when it is asked to.
    """

    checkpoint: str
    engine: str
    version: str
    cause: str
    error: str


@dataclass(frozen=True)
class Entries:
    """What a data file holds."""

    faults: tuple[Fault, ...] = ()
    missing: tuple[Missing, ...] = ()


@cache
def shipped() -> Entries:
    """What is known of the engines of this project."""
    return _parsed(files(__package__).joinpath("known_faults.toml").read_text(), "known_faults")


def read(path: Path) -> Entries:
    """The entries of a data file.

    Raises:
        ValueError: the file has another kind of entry; an entry lacks a field, has one that there
            is not, or names a value that is none; or two faults have one name.
    """
    return _parsed(path.read_text(), str(path))


def within(version: str, allowed: str) -> bool:
    """Whether a release is among those allowed, by its release number alone.

    Args:
        version: ``"0.32.0+cpu"``.
        allowed: clauses by commas, ``">=0.31,<0.33"``.

    Raises:
        ValueError: a clause is not of that form.
    """
    found, answers = _release(version), []
    for clause in allowed.split(","):
        parts = re.fullmatch(r"\s*(>=|<=|==|<|>)\s*(\d+(?:\.\d+)*)\s*", clause)
        if parts is None:
            raise ValueError(f"{clause!r} is no clause such as '>=0.31'")
        bound = _release(parts[2])
        answers.append(
            {
                ">=": found >= bound,
                "<=": found <= bound,
                "==": found == bound,
                "<": found < bound,
                ">": found > bound,
            }[parts[1]]
        )
    return all(answers)


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version.strip())
    numbers = [int(part) for part in found.group().split(".")] if found else [0]
    return tuple([*numbers, 0, 0, 0][:4])


_Entry = TypeVar("_Entry", Shown, Fault, Missing)


def _parsed(text: str, source: str) -> Entries:
    content = tomllib.loads(text)
    if not set(content) <= {"fault", "missing"}:
        raise ValueError(f"{source} has entries called {', '.join(content)}")
    faults = []
    for given in content.get("fault", []):
        shown = tuple(_entry(Shown, one, source) for one in given.get("shown", []))
        fault = _entry(Fault, {**given, "shown": shown}, source)
        _check(fault, source)
        faults.append(fault)
    if len({fault.name for fault in faults}) < len(faults):
        raise ValueError(f"{source}: two faults have one name")
    missing = [_entry(Missing, one, source) for one in content.get("missing", [])]
    for version in [one.version for one in faults] + [one.version for one in missing]:
        within("0", version)
    return Entries(tuple(faults), tuple(missing))


def _check(fault: Fault, source: str) -> None:
    where = f"{source}: {fault.name}"
    if not fault.shown:
        raise ValueError(f"{where} is shown by no checkpoint")
    if unknown := set(fault.values) - set(VOCABULARY):
        raise ValueError(f"{where} names no value: {', '.join(sorted(unknown))}")
    for one in fault.shown:
        if one.version is not None:
            within("0", one.version)
        if one.value.rsplit(".", 1)[-1] not in fault.values:
            raise ValueError(f"{where} is shown at {one.value}, which is none of its values")


def _entry(kind: type[_Entry], given: Mapping[str, Any], source: str) -> _Entry:
    known = {field.name: field.default is MISSING for field in fields(kind)}
    needed = {name for name, is_needed in known.items() if is_needed}
    if not needed <= set(given) <= set(known):
        raise ValueError(
            f"{source}: {dict(given)} must have the fields {', '.join(sorted(needed))}, and may "
            f"have no others than {', '.join(sorted(known))}"
        )
    entry: dict[str, Any] = {
        key: tuple(one) if isinstance(one, list) else one for key, one in given.items()
    }
    return kind(**entry)
