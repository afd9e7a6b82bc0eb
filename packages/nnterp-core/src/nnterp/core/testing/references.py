"""The oracle's answers for one checkpoint: computed once, kept beside the checkpoint."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor

from nnterp.core.testing import cases as cases_module
from nnterp.core.testing import oracle as oracle_module
from nnterp.core.testing.cases import LONGEST, PROMPTS, STEPS, Case, Change
from nnterp.core.testing.oracle import Edit, Oracle, Record
from nnterp.core.testing.recipes import EOS, Recipe

# Logits that differ by less than this share of their spread count as unchanged by an edit.
_EFFECT = 1e-3


@dataclass(frozen=True)
class Edited:
    """What the oracle computed for one case.

    Attributes:
        case: the case.
        logits: the logits of each step, up to the one that chose an end token.
    """

    case: Case
    logits: tuple[Tensor, ...]


@dataclass(frozen=True)
class References:
    """What plain transformers computes for one checkpoint.

    Attributes:
        records: every value of every prompt, on the prompt and on the decode steps.
        edited: the logits of every case.
        idle: edits that change no logits in this model, by their case's name.
        longest: the logits of the longest prompt.
    """

    records: Mapping[str, Record]
    edited: Mapping[str, Edited]
    idle: tuple[str, ...]
    longest: Tensor


def references(path: Path, recipe: Recipe, patch: str | None = None) -> References:
    """The oracle's answers, from the file beside the checkpoint, which is made if need be.

    Making it loads the checkpoint in transformers. A process in which vLLM has loaded the same
    model type by transformers' own classes cannot do that any more: ask before.

    Args:
        path: the checkpoint's folder.
        recipe: its recipe.
        patch: the oracle's patch.
    """
    return _unpacked(torch.load(prepared(path, recipe, patch), weights_only=True))


def prepared(path: Path, recipe: Recipe, patch: str | None = None) -> Path:
    """The file of :func:`references`, made if need be, and not read."""
    file = path.with_name(f"{path.name}.{patch or 'plain'}-{_fingerprint(recipe)}.pt")
    if not file.is_file():
        with filelock.FileLock(file.with_suffix(".lock")):
            if not file.is_file():
                _write(file, _computed(path, recipe, patch))
    return file


@cache
def _fingerprint(recipe: Recipe) -> str:
    """What the answers depend on, but for the checkpoint, whose folder has its own."""
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    sources = [inspect.getsource(module) for module in (oracle_module, cases_module)]
    sources.append(inspect.getsource(inspect.getmodule(_fingerprint) or oracle_module))
    text = json.dumps([versions, repr(recipe.reference), *sources])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _write(file: Path, content: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as unfinished:
        torch.save(content, unfinished)
    Path(unfinished.name).chmod(0o644)
    Path(unfinished.name).rename(file)


def _computed(path: Path, recipe: Recipe, patch: str | None) -> dict[str, Any]:
    threads = torch.get_num_threads()
    # Models this small gain nothing from a second thread, and lose much where cores are shared.
    torch.set_num_threads(1)
    try:
        return _answers(Oracle(path, recipe, patch=patch), recipe)
    finally:
        torch.set_num_threads(threads)


def _answers(oracle: Oracle, recipe: Recipe) -> dict[str, Any]:
    records = {name: oracle.run(ids, STEPS) for name, ids in PROMPTS.items()}
    for name, record in records.items():
        if EOS in record.tokens:
            raise RuntimeError(
                f"{recipe.name}: the prompt {name!r} is followed by an end token; take another"
            )
    edited: dict[str, Edited] = {}

    def effective(case: Case) -> bool:
        plain = records[case.prompt]
        edits = [_edit(change, plain) for change in case.changes]
        run = oracle.edited(PROMPTS[case.prompt], edits, case.steps)
        first = min(change.step for change in case.changes)
        # Both engines end a generation after an end token.
        count = next((step for step, token in enumerate(run.tokens) if token == EOS), case.steps)
        if count < first:
            return False
        logits = tuple(run.get("logits", step) for step in range(count + 1))
        edited[case.name] = Edited(case, logits)
        before = plain.get("logits", first)[:, -1]
        moved = (logits[first][:, -1] - before).abs().max() / before.std()
        return bool(moved > _EFFECT)

    five = records["five"]
    keys = {key: five.get(key) for key in five.keys()}  # noqa: SIM118
    planned, idle = cases_module.cases(keys, effective)
    return {
        "records": {
            name: {
                "tokens": record.tokens,
                "steps": [
                    {key: record.get(key, step) for key in record.keys(step)}
                    for step in range(STEPS + 1)
                ],
            }
            for name, record in records.items()
        },
        "edited": [
            {"case": asdict(case), "logits": list(edited[name].logits)}
            for name, case in planned.items()
        ],
        "idle": idle,
        "longest": oracle.run(LONGEST, 0).get("logits"),
    }


def _edit(change: Change, plain: Record) -> Edit:
    source = None if change.source is None else plain.get(change.source)
    return Edit(change.key, lambda value: cases_module.changed(value, change, source), change.step)


def _unpacked(content: dict[str, Any]) -> References:
    edited: dict[str, Edited] = {}
    for entry in content["edited"]:
        fields = dict(entry["case"])
        fields["changes"] = tuple(Change(**change) for change in fields["changes"])
        case = Case(**fields)
        edited[case.name] = Edited(case, tuple(entry["logits"]))
    return References(
        records={
            name: Record(record["tokens"], record["steps"])
            for name, record in content["records"].items()
        },
        edited=edited,
        idle=tuple(content["idle"]),
        longest=content["longest"],
    )
