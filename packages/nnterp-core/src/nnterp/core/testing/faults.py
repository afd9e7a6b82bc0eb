"""Faults of engines that are known: where an engine departs from transformers, and why.

A fault is an entry of a data file. The patch it names makes the oracle compute what the engine
does, so that everything else about the checkpoint is held to the normal bound.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nnterp.core.testing.adapters import Subject
from nnterp.core.testing.oracle import PATCHES


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        checkpoint: the recipe's name.
        engine: the engine's label.
        version: which versions of it, ``">=0.31,<0.33"``.
        value: the first value of the forward that departs, ``"layers.0.mlp.mlp_neurons"``.
        size: how far, as the largest share of a row that was measured.
        cause: what the engine does.
        patch: the oracle's patch that does the same.
    """

    checkpoint: str
    engine: str
    version: str
    value: str
    size: float
    cause: str
    patch: str

    def concerns(self, subject: Subject) -> bool:
        """Whether the subject has it."""
        adapter = subject.adapter
        return (self.checkpoint, self.engine) == (subject.recipe.name, adapter.label) and Version(
            adapter.version
        ) in SpecifierSet(self.version)


@dataclass(frozen=True)
class Missing:
    """A checkpoint that an engine cannot load, though it has a family for it.

    Attributes:
        checkpoint: the recipe's name.
        engine: the engine's label.
        version: which versions of it.
        cause: why not.
        error: a pattern of what it says when it is asked to.
    """

    checkpoint: str
    engine: str
    version: str
    cause: str
    error: str

    def concerns(self, subject: Subject) -> bool:
        """Whether it is about the subject."""
        return _concerns(self, subject)


@dataclass(frozen=True)
class Known:
    """What is known not to be as it should.

    Attributes:
        faults: where an engine departs from transformers.
        missing: what an engine cannot load.
    """

    faults: tuple[Fault, ...] = ()
    missing: tuple[Missing, ...] = ()

    def fault(self, subject: Subject) -> Fault | None:
        """The fault that a subject has, or ``None``.

        Raises:
            ValueError: there are several; one patch reproduces all that a subject does.
        """
        found = [fault for fault in self.faults if fault.concerns(subject)]
        if len(found) > 1:
            raise ValueError(f"{subject.label} has several; one patch must reproduce it all")
        return found[0] if found else None

    def lacks(self, subject: Subject) -> Missing | None:
        """Why the subject cannot be loaded, or ``None``."""
        return next((one for one in self.missing if one.concerns(subject)), None)

    def unmatched(self, subjects: Sequence[Subject]) -> list[Fault | Missing]:
        """Entries of a checkpoint and engine that are not there, whatever the version."""
        there = {(one.recipe.name, one.adapter.label) for one in subjects}
        entries: list[Fault | Missing] = [*self.faults, *self.missing]
        return [entry for entry in entries if (entry.checkpoint, entry.engine) not in there]


def _concerns(entry: Fault | Missing, subject: Subject) -> bool:
    named = (entry.checkpoint, entry.engine) == (subject.recipe.name, subject.adapter.label)
    return named and Version(subject.adapter.version) in SpecifierSet(entry.version)


_Entry = TypeVar("_Entry", Fault, Missing)


def read_known(path: Path) -> Known:
    """The entries of a data file, ``[[fault]]`` and ``[[missing]]``.

    Raises:
        ValueError: an entry lacks a field, has one too many, or names no patch that there is; or
            the file has another kind of entry.
    """
    content = tomllib.loads(path.read_text())
    if not set(content) <= {"fault", "missing"}:
        raise ValueError(f"{path} has entries called {', '.join(content)}")

    def entries(kind: type[_Entry], name: str) -> tuple[_Entry, ...]:
        known = {field.name for field in fields(kind)}
        for entry in content.get(name, []):
            if set(entry) != known:
                raise ValueError(f"{path}: {entry} has not the fields {', '.join(sorted(known))}")
            SpecifierSet(entry["version"])
        return tuple(kind(**entry) for entry in content.get(name, []))

    found = Known(entries(Fault, "fault"), entries(Missing, "missing"))
    for fault in found.faults:
        if fault.patch not in PATCHES:
            raise ValueError(f"{path}: no patch is called {fault.patch!r}")
    return found
