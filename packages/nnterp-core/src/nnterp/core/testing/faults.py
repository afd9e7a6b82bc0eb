"""Known faults as the conformance tests hold engines to them.

The patch that an entry names makes the oracle compute what the engine does, so that everything else
about the checkpoint is held to the normal bound.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from nnterp.core import faults
from nnterp.core.faults import Missing, within
from nnterp.core.testing.adapters import Subject


@dataclass(frozen=True)
class Fault:
    """A fault as one checkpoint shows it on one engine.

    Attributes:
        name: the fault's name.
        checkpoint: the recipe's name.
        engine: the engine's label.
        version: which versions of it, ``">=0.31,<0.33"``.
        value: the first value of the forward that departs, ``"layers.0.mlp.mlp_neurons"``.
        size: how far, as the largest share of a row that was measured.
        cause: what the engine does.
        patch: the oracle's patch that does the same.
    """

    name: str
    checkpoint: str
    engine: str
    version: str
    value: str
    size: float
    cause: str
    patch: str


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
        found = [fault for fault in self.faults if _concerns(fault, subject)]
        if len(found) > 1:
            raise ValueError(f"{subject.label} has several; one patch must reproduce it all")
        return found[0] if found else None

    def lacks(self, subject: Subject) -> Missing | None:
        """Why the subject cannot be loaded, or ``None``."""
        return next((one for one in self.missing if _concerns(one, subject)), None)

    def unmatched(self, subjects: Sequence[Subject]) -> list[Fault | Missing]:
        """Entries of a checkpoint and engine that are not there, whatever the version."""
        there = {(one.recipe.name, one.adapter.label) for one in subjects}
        entries: list[Fault | Missing] = [*self.faults, *self.missing]
        return [entry for entry in entries if (entry.checkpoint, entry.engine) not in there]

    def unpatched(self, patches: Collection[str]) -> list[Fault]:
        """Faults whose patch is none of these, the oracle's."""
        return [fault for fault in self.faults if fault.patch not in patches]


def _concerns(entry: Fault | Missing, subject: Subject) -> bool:
    named = (entry.checkpoint, entry.engine) == (subject.recipe.name, subject.adapter.label)
    return named and within(subject.adapter.version, entry.version)


def known(path: Path | None = None) -> Known:
    """The known faults of a data file, in the layout of :mod:`nnterp.core.faults`.

    Args:
        path: the file; this project's own by default.

    Raises:
        ValueError: an entry is not of that layout.
    """
    entries = faults.shipped() if path is None else faults.read(path)
    found = tuple(
        Fault(
            name=fault.name,
            checkpoint=one.checkpoint,
            engine=one.engine,
            version=one.version or fault.version,
            value=one.value,
            size=one.size,
            cause=fault.cause,
            patch=one.patch,
        )
        for fault in entries.faults
        for one in fault.shown
    )
    return Known(found, entries.missing)
