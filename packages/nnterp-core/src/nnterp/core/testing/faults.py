"""Faults of engines that are known: where an engine departs from transformers, and why.

A fault is an entry of a data file. The patch it names makes the oracle compute what the engine
does, so that everything else about the checkpoint is held to the normal bound.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

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


def read_faults(path: Path) -> list[Fault]:
    """The entries of a data file, ``[[fault]]`` by ``[[fault]]``.

    Raises:
        ValueError: an entry lacks a field, has one too many, or names no patch that there is.
    """
    known = {field.name for field in fields(Fault)}
    found = []
    for entry in tomllib.loads(path.read_text()).get("fault", []):
        if set(entry) != known:
            raise ValueError(f"{path}: {entry} has not the fields {', '.join(sorted(known))}")
        fault = Fault(**entry)
        if fault.patch not in PATCHES:
            raise ValueError(f"{path}: no patch is called {fault.patch!r}")
        SpecifierSet(fault.version)
        found.append(fault)
    return found


def fault_of(subject: Subject, faults: Iterable[Fault]) -> Fault | None:
    """The fault that a subject has, or ``None``.

    Raises:
        ValueError: there are several; one patch reproduces all that a subject does.
    """
    found = [fault for fault in faults if fault.concerns(subject)]
    if len(found) > 1:
        raise ValueError(f"{subject.label} has several entries; one patch must reproduce it all")
    return found[0] if found else None


def unmatched(faults: Sequence[Fault], subjects: Sequence[Subject]) -> list[Fault]:
    """Entries that are of no checkpoint and engine there is, or of none of this version."""
    return [fault for fault in faults if not any(fault.concerns(one) for one in subjects)]
