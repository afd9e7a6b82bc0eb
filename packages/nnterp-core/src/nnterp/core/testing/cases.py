"""What the conformance tests do to a model: prompts, and edits that both sides make alike.

An edit is described as data, so that the oracle can make it beforehand, in plain transformers, and
an engine can make it again through the standard names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nnterp.core import VOCABULARY, Term
from nnterp.core.reading import host_of

# The longest is longer than the shortest window of every recipe but one. No special token.
_TOKENS = (
    *(5, 17, 250, 9, 33, 7, 100, 8, 299, 41, 60, 13, 77, 201, 4, 55, 66, 120, 36, 31),
    *(19, 290, 3, 180, 90, 44, 11, 12, 99, 140, 255, 266, 71, 82, 93, 104, 6, 277, 200, 30),
)
PROMPTS: Mapping[str, tuple[int, ...]] = {
    "one": _TOKENS[6:7],
    "five": _TOKENS[:5],
    "thirteen": _TOKENS[20:33],
    "forty": _TOKENS,
}
"""Prompts by their length in tokens."""

LONGEST = tuple(3 + (7 * i * i + 13 * i) % 297 for i in range(200))
"""A prompt of which the logits alone are compared."""

STEPS = 2
"""How many decode steps follow a prompt."""

Way = Literal[
    "assignment", "in_place", "position", "zero", "zero_head", "steered", "steered_some", "replaced"
]
WRITES: tuple[Way, ...] = ("assignment", "in_place", "position")
"""The three ways of writing a value."""

STEER_FACTOR = 1.5
STEER_POSITIONS = (1, 3)


@dataclass(frozen=True)
class Change:
    """One edit of one value.

    Attributes:
        key: the value's standard path.
        way: how it is edited.
        step: 0 for the prompt, 1 for the first decode step, ...
        position: where on the sequence, if the way is ``"position"``.
        source: the value of the same prompt, unedited, that takes its place, if the way is
            ``"replaced"``.
    """

    key: str
    way: Way
    step: int = 0
    position: int = 2
    source: str | None = None

    @property
    def term(self) -> Term:
        """The entry of the vocabulary."""
        return VOCABULARY[self.key.rsplit(".", 1)[-1]]


@dataclass(frozen=True)
class Case:
    """A run with edits.

    Attributes:
        name: unique, and readable.
        kind: ``"write"`` for a value written on the prompt, ``"decode"`` for one written on the
            way, ``"lens"``, ``"ablation"`` or ``"method"``.
        changes: the edits, in forward order.
        steps: how many decode steps follow the prompt.
        prompt: which of ``PROMPTS``.
    """

    name: str
    kind: str
    changes: tuple[Change, ...]
    steps: int = 0
    prompt: str = "five"


def _wave(like: Tensor, count: int, phase: float) -> Tensor:
    """``count`` numbers between -1 and 1 that no symmetry of a model hides."""
    return torch.sin(torch.arange(count, device=like.device) * 0.7 + phase).to(like.dtype)


def steering_vector(hidden: int) -> Tensor:
    """The vector that the steering cases add."""
    return _wave(torch.zeros(()), hidden, 0.3)


def _where(term: Term, position: int) -> tuple[Any, ...]:
    axis = term.layout.axis("seq")
    axis = term.layout.axis("query") if axis is None else axis
    assert axis is not None
    return (*[slice(None)] * axis, position)


def assigned(value: Tensor, change: Change) -> Tensor:
    """What is assigned in place of the whole value."""
    if change.term.name == "attention_mask":
        new = value.clone()
        new[:, change.position] = 0
        return new
    if change.term.name == "expert_indices":
        return value ^ 1
    if change.term.layout.kind == "int":
        return (value + 7) % 256 + 3
    if change.term.name == "expert_weights":
        # Engines may list a token's experts in different orders, so no slot is a special one.
        return value * 0.5 + value * value
    return value * 0.5 + 0.2 * _wave(value, value.shape[-1], 0.1)


def write_in_place(value: Tensor, change: Change) -> None:
    """Change the value itself, all of it or one position."""
    if change.term.name == "attention_mask":
        value[:, change.position] = 0
    elif change.term.name in ("expert_indices", "expert_weights"):
        new = assigned(value, change)
        where = _where(change.term, change.position) if change.way == "position" else ...
        value[where] = new[where]
    elif change.way == "position" and change.term.layout.kind == "int":
        value[_where(change.term, change.position)] = 211
    elif change.way == "position":
        part = value[_where(change.term, change.position)]
        value[_where(change.term, change.position)] = part * (
            1.5 + 0.5 * _wave(value, part.shape[-1], 0.2)
        )
    elif change.term.layout.kind == "int":
        value.add_(19).remainder_(256).add_(3)
    else:
        value.mul_(1 + 0.5 * _wave(value, value.shape[-1], 0.4))


def changed(value: Tensor, change: Change, source: Tensor | None = None) -> Tensor:
    """The value after the edit.

    Args:
        value: the value; it may be changed in place.
        change: the edit.
        source: what takes its place, if the way is ``"replaced"``.
    """
    if change.way == "assignment":
        return assigned(value, change)
    if change.way == "replaced":
        assert source is not None
        return source.clone()
    if change.way == "zero":
        return torch.zeros_like(value)
    if change.way == "zero_head":
        value[:, :, 1] = 0
    elif change.way in ("steered", "steered_some"):
        step = STEER_FACTOR * steering_vector(value.shape[-1])
        where = list(STEER_POSITIONS) if change.way == "steered_some" else slice(None)
        value[:, where] += step
    else:
        write_in_place(value, change)
    return value


def perform(model: Any, change: Change, source: Tensor | None = None) -> None:
    """Make an edit by the standard names, in a trace: by assignment, or in place."""
    host, name = host_of(model, change.key)
    if change.way in ("assignment", "replaced", "zero"):
        setattr(host, name, changed(getattr(host, name), change, source))
    else:
        changed(getattr(host, name), change)


def blocks_of(keys: Mapping[str, Any]) -> int:
    """How many blocks the keys are of."""
    return 1 + max(int(key.split(".")[1]) for key in keys if key.startswith("layers."))


def cases(
    keys: Mapping[str, Tensor], effective: Callable[[Case], bool]
) -> tuple[dict[str, Case], list[str]]:
    """Every case for a model with these values.

    Args:
        keys: the values of a prompt of five tokens.
        effective: whether a case changes the logits of the last position.

    Returns:
        The cases by name, and the names of edits that change nothing at any position.
    """
    count = blocks_of(keys)
    middle, last = count // 2, count - 1
    # Blocks may differ: each value is written in every way on one that has it.
    having: dict[str, list[int]] = {}
    for key in keys:
        if key.startswith("layers."):
            _, layer, rest = key.split(".", 2)
            having.setdefault(rest, []).append(int(layer))
    found: list[Case] = []
    idle: list[str] = []

    def add(case: Case, *others: Case) -> None:
        for choice in (case, *others):
            if effective(choice):
                found.append(choice)
                return
        idle.append(case.name)

    for key in keys:
        name = key.rsplit(".", 1)[-1]
        if not VOCABULARY[name].writable:
            continue
        if key.startswith("layers."):
            _, layer, rest = key.split(".", 2)
            if int(layer) != having[rest][len(having[rest]) // 2]:
                add(Case(f"{key}:assignment", "write", (Change(key, "assignment"),)))
                continue
        for way in WRITES:
            here = Case(f"{key}:{way}", "write", (Change(key, way),))
            # Late in the model only the last position still reaches the last logits.
            at_end = Case(here.name, "write", (Change(key, way, position=-1),))
            add(here, at_end)
        # Whether a step's mask counts for later ones is the caller's choice, not the model's.
        for step in () if name == "attention_mask" else (0, 1):
            change = Change(key, "assignment", step=step)
            add(
                Case(
                    f"{key}:assignment@{step}",
                    "decode",
                    (change,),
                    steps=1 if name == "attention_mask" else STEPS,
                )
            )

    stream = f"layers.{middle}.layer_output"
    entering = f"layers.{middle}.layer_input"
    contributions = (
        f"layers.{middle}.self_attn.attention_output",
        f"layers.{middle}.mlp.mlp_output",
    )
    for name, key in zip(("zero_attention", "zero_mlp"), contributions, strict=True):
        if key in keys:
            add(Case(name, "ablation", (Change(key, "zero"),)))
    heads = f"layers.{middle}.self_attn.attention_head_outputs"
    if heads in keys:
        add(Case("zero_head", "ablation", (Change(heads, "zero_head"),)))
    add(Case("zero_block", "ablation", (Change(stream, "replaced", source=entering),)))
    add(Case("skip_layer", "method", (Change(stream, "replaced", source=entering),)))
    skipped = tuple(
        Change(f"layers.{i}.layer_output", "replaced", source="layers.0.layer_input")
        for i in range(middle + 1)
    )
    add(Case("skip_layers", "method", skipped))
    add(
        Case(
            "skip_with",
            "method",
            (Change(stream, "replaced", source=f"layers.{last}.layer_output"),),
        )
    )
    add(Case("steer", "method", (Change(stream, "steered"),)))
    add(Case("steer_positions", "method", (Change(stream, "steered_some"),)))
    several = tuple(Change(f"layers.{i}.layer_output", "steered") for i in range(count))
    add(Case("steer_layers", "method", several))
    for i in range(last):
        source = f"layers.{i}.layer_output"
        end = f"layers.{last}.layer_output"
        add(Case(f"lens:{i}", "lens", (Change(end, "replaced", source=source),)))
    return {case.name: case for case in found}, idle
