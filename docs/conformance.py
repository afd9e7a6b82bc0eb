"""The page of families, made from the report of a conformance run: ``conformance.json``.

It is what ``hatch run families`` wrote.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

REPORT = Path(__file__).with_name("conformance.json")

NAMES = {"hf": "transformers", "hf-sdpa": "transformers with sdpa", "vllm": "vLLM"}
"""What the engines are called, by their label in the report."""

COMMON = 0.5
"""A reason that more than this share of an engine's checkpoints give is told once for all."""

Subject = Mapping[str, Any]


@cache
def report() -> dict[str, Any]:
    """The report that is kept."""
    found: dict[str, Any] = json.loads(REPORT.read_text())
    return found


@cache
def by_family() -> dict[str, dict[str, list[Subject]]]:
    """The checkpoints of each model type, by engine."""
    found: dict[str, dict[str, list[Subject]]] = {}
    for subject in report()["subjects"].values():
        engines = found.setdefault(subject["model_type"], {name: [] for name in NAMES})
        engines[subject["engine"]].append(subject)
    return dict(sorted(found.items()))


def _number(found: float | str | None) -> str:
    if found is None:
        return "not measured"
    return "0" if found == 0 else f"{float(found):.1e}"


def _worst(subjects: Iterable[Subject]) -> tuple[float, str, float] | None:
    """The error that takes most of what is allowed: it, its key, and the bound."""
    found = [
        (float(value["error"]), key, value["bound"])
        for subject in subjects
        for key, value in subject["values"].items()
        if value.get("error") is not None
    ]
    return max(found, key=lambda one: one[0] / one[2], default=None)


def versions() -> str:
    """What the report was made with."""
    found = report()["versions"]
    engines = ", ".join(
        f"{NAMES[label]} {version}"
        for label, version in found["engines"].items()
        if label != "hf-sdpa"
    )
    others = ", ".join(f"{name} {found[name]}" for name in ("nnsight", "torch") if name in found)
    return f"\nMeasured with {engines}, {others}, on {report()['platform']}.\n\n"


def summary(table: Callable[..., str]) -> str:
    """One line a family: the worst error on each engine, or that it is not there."""
    rows = []
    for model_type, engines in by_family().items():
        cells = [f"[`{model_type}`](#{model_type})"]
        for subjects in engines.values():
            loaded = [one for one in subjects if one["missing"] is None]
            worst = _worst(loaded)
            faults = sum(len(one["faults"]) for one in loaded)
            if worst is None:
                cells.append("cannot be loaded" if subjects else "no family")
            else:
                known = f", {faults} known fault{'s' if faults > 1 else ''}" if faults else ""
                cells.append(_number(worst[0]) + known)
        rows.append(cells)
    return table(["family", *NAMES.values()], rows)


@cache
def _common() -> dict[str, dict[str, set[str]]]:
    """Reasons that most checkpoints of an engine give, with the values, by engine."""
    counts: dict[str, Counter[tuple[str, str]]] = {name: Counter() for name in NAMES}
    totals: Counter[str] = Counter()
    for subject in report()["subjects"].values():
        if subject["missing"] is not None:
            continue
        totals[subject["engine"]] += 1
        counts[subject["engine"]].update(list(dict.fromkeys(_reasons(subject))))
    return {
        engine: _grouped(pair for pair, n in found.items() if n > COMMON * totals[engine])
        for engine, found in counts.items()
    }


def _reasons(subject: Subject) -> Iterable[tuple[str, str]]:
    """What a checkpoint does not serve: reason and key."""
    for key, value in subject["values"].items():
        if value.get("reason"):
            yield value["reason"], key
        if value.get("decode"):
            yield f"on decode steps: {value['decode']}", key


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for reason, key in pairs:
        found.setdefault(reason, set()).add(key)
    return found


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys))


def common() -> str:
    """What most families of an engine do not serve."""
    merged: dict[tuple[str, str], list[str]] = {}
    for engine, reasons in _common().items():
        for reason, keys in reasons.items():
            merged.setdefault((_keys(keys), reason), []).append(engine)
    lines = [
        f"- {_engines(engines)}: {keys}: {reason}."
        for (keys, reason), engines in sorted(merged.items(), key=lambda one: -len(one[1]))
    ]
    return "\n" + "\n".join(lines) + "\n\n"


def _engines(engines: Iterable[str], notes: Mapping[str, str] | None = None) -> str:
    """Engines by name, with a note on some."""
    named = {engine: (notes or {}).get(engine, "") for engine in engines}
    if set(named) == set(NAMES) and not any(named.values()):
        return "every engine"
    if {"hf", "hf-sdpa"} <= set(named) and named["hf"] == named["hf-sdpa"]:
        named.pop("hf-sdpa")
    return " and ".join(NAMES[engine] + note for engine, note in named.items())


def families(table: Callable[..., str]) -> str:
    """A section for each family."""
    return "\n" + "\n".join(
        _family(model_type, engines, table) for model_type, engines in by_family().items()
    )


def _family(
    model_type: str, engines: Mapping[str, list[Subject]], table: Callable[..., str]
) -> str:
    parts = [f"### `{model_type}` {{ #{model_type} }}\n"]
    rows, known = [], []
    for engine, subjects in engines.items():
        for subject in subjects:
            named = f"`{subject['checkpoint']}`"
            if subject["missing"] is not None:
                rows.append([NAMES[engine], named, "none", "cannot be loaded"])
                missing = subject["missing"]
                known.append(
                    f"- {NAMES[engine]} ({named}): cannot be loaded: {missing['cause']} "
                    f"(`{missing['version']}`)."
                )
                continue
            worst = _worst([subject])
            served = sum(value["status"] != "unavailable" for value in subject["values"].values())
            where = f"{_number(worst[0])} at `{worst[1]}`" if worst else "not measured"
            rows.append([NAMES[engine], named, str(served), where])
            known += [
                f"- {NAMES[engine]} ({named}): {fault['cause']} (`{fault['version']}`); it shows "
                f"first at `{fault['value']}`, which is off by {_number(fault['size'])}."
                for fault in subject["faults"]
            ]
    parts.append(table(["engine", "checkpoint", "values", "furthest off"], rows))
    if known:
        parts += ["Known faults:\n", *known, ""]
    told = _told(engines)
    if told:
        parts.append("Unavailable, besides what holds [for most](#for-most-families):\n")
        parts += [f"- {line}" for line in told]
        parts.append("")
    parts.append(_matrix(engines, table))
    return "\n".join(parts)


def _told(engines: Mapping[str, list[Subject]]) -> list[str]:
    """What a family does not serve, where most do."""
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for engine, subjects in engines.items():
        for subject in subjects:
            for reason, key in _reasons(subject):
                if key in _common()[engine].get(reason, set()):
                    continue
                own = found.setdefault((_particular(reason, engine), key), {})
                own.setdefault(engine, set()).add(subject["checkpoint"])
    merged: dict[tuple[str, str], list[str]] = {}
    for (reason, key), where in found.items():
        notes = {}
        for engine, names in where.items():
            loaded = {one["checkpoint"] for one in engines[engine] if one["missing"] is None}
            notes[engine] = "" if names == loaded else f" ({_keys(names)})"
        merged.setdefault((_engines(where, notes), reason), []).append(key)
    return [f"{where}: {_keys(keys)}: {reason}." for (where, reason), keys in merged.items()]


def _particular(reason: str, engine: str) -> str:
    """Of several reasons, of blocks that differ, those that most families do not give."""
    for usual in _common()[engine]:
        reason = reason.replace(f"{usual}; ", "").replace(f"; {usual}", "")
    return reason


def _matrix(engines: Mapping[str, list[Subject]], table: Callable[..., str]) -> str:
    """Every value that a family serves, with its worst error on each engine."""
    keys: dict[str, None] = {}
    for subjects in engines.values():
        for subject in subjects:
            keys |= dict.fromkeys(
                key for key, one in subject["values"].items() if one["status"] != "unavailable"
            )
    shown = [name for name, subjects in engines.items() if any(s["values"] for s in subjects)]
    rows = []
    for key in keys:
        cells = [f"`{key}`"]
        for engine in shown:
            found = [s["values"][key] for s in engines[engine] if key in s["values"]]
            served = [one for one in found if one["status"] != "unavailable"]
            errors = [one["error"] for one in served]
            if not served:
                cells.append("unavailable")
            elif None in errors:
                cells.append("not measured")
            else:
                only = "" if all(one["writable"] for one in served) else ", read-only"
                cells.append(_number(max(map(float, errors))) + only)
        rows.append(cells)
    inside = table(["value", *(NAMES[name] for name in shown)], rows)
    body = "".join(f"    {line}\n" for line in inside.splitlines())
    return f'??? note "Every value"\n\n{body}'
