"""One checkpoint on one engine, under test: what it serves, read once, beside the reference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nnterp.core import VOCABULARY, Layout
from nnterp.core.protocols import StandardModel, Step
from nnterp.core.reading import (
    by_expert,
    can_be_read,
    copied,
    forward_order,
    reasons,
    saved,
    value_at,
)
from nnterp.core.testing.adapters import Subject
from nnterp.core.testing.cases import PROMPTS, STEPS
from nnterp.core.testing.references import References
from nnterp.core.testing.report import Worst
from nnterp.core.testing.tolerance import worst_row

BOUND = 1e-5
"""How far a row may be from the reference, as a share of its largest magnitude."""

# An engine may compute these for the last position alone, where transformers has them all.
LAST_ALONE = frozenset({"lm_head_output", "logits"})

# Looser bounds, each with what was measured.
LOOSER: Mapping[str, float] = {
    # A score is a sum of head_dim products, and a row of one or two may all but cancel: 2.9e-4 on
    # the tiny phimoe, a score of 0.005 among scores of 3. The pattern has the normal bound.
    "attention_scores": 1e-3,
}

# Where the search for the forward order begins. Nothing depends on its being right.
_FIRST_GUESS = (
    *("input_ids", "attention_mask", "input_size", "token_embeddings"),
    *("layer_input", "attention_input", "attention_queries", "attention_keys", "attention_values"),
    *("attention_scores", "attention_probabilities", "attention_head_outputs"),
    *("attention_output", "layer_mid", "mlp_input", "router_logits", "expert_weights"),
    *("expert_indices", "expert_outputs", "routed_output", "shared_expert_output"),
    *("mlp_neurons", "mlp_output"),
    *("layer_output", "final_norm_output", "lm_head_output", "logits", "next_token_probs"),
)

Read: TypeAlias = Mapping[str, Any]
"""Values of one step by their key."""


def read(model: Any, prompt: Sequence[int], keys: Sequence[str]) -> dict[str, Any]:
    """These values of a prompt, read in this order in one trace."""
    with model.prefill(prompt):
        found = saved({})
        for key in keys:
            found[key] = copied(value_at(model, key))
    return by_expert(found)


def read_steps(
    model: Any, prompt: Sequence[int], keys: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """The values of each step of a greedy generation, in one trace."""
    count = len(keys)
    with model.decode(prompt, max_new_tokens=count) as tracer:
        found = saved([])
        for step in tracer.iter[0:count]:
            values = {}
            for key in keys[step]:
                values[key] = copied(value_at(model, key))
            found.append(values)
    return [by_expert(values) for values in found]


@dataclass(eq=False)
class Bench:
    """A subject with its model, the reference, and what was read of it.

    Attributes:
        subject: the checkpoint and the engine.
        model: the model, loaded.
        references: what it is held to; with the patch of a known fault, if it has one.
        worst: the largest errors measured so far, by the value's name.
        errors: likewise of values as they were read, by key, each with where it was.
        writable: which of the values that were tried can be written, by key.
    """

    subject: Subject
    model: Any = field(repr=False)
    references: References = field(repr=False)
    bound: float = BOUND
    worst: dict[str, Worst] = field(default_factory=dict)
    errors: dict[str, tuple[float, str]] = field(default_factory=dict, repr=False)
    writable: dict[str, bool] = field(default_factory=dict, repr=False)
    _order: list[str] | None = field(default=None, repr=False)
    _read: dict[Any, Any] = field(default_factory=dict, repr=False)

    # -- what it serves ----------------------------------------------------------

    @property
    def layers(self) -> int:
        """The number of blocks."""
        return int(self.model.num_layers)

    @property
    def middle(self) -> int:
        """The block that the cases edit."""
        return self.layers // 2

    def reasons(self, step: Step = "prefill") -> dict[str, str | None]:
        """``support()``, one entry a block: why a value is not served, or ``None``."""
        return reasons(self.model, step)

    def keys(self, step: Step = "prefill") -> list[str]:
        """The values that are served, in the order of the forward."""
        if self._order is None:
            self._order = self._measured_order()
        reasons = self.reasons(step)
        return [key for key in self._order if reasons[key] is None]

    def keys_of(self, name: str) -> list[str]:
        """All keys of one value of the vocabulary, served or not."""
        return [key for key in self.reasons() if key.rsplit(".", 1)[-1] == name]

    def _measured_order(self) -> list[str]:
        rank = {name: i for i, name in enumerate(_FIRST_GUESS)}
        served = [key for key, reason in self.reasons().items() if reason is None]

        def place(key: str) -> tuple[int, int]:
            name = key.rsplit(".", 1)[-1]
            if key.startswith("layers."):
                return int(key.split(".")[1]), rank[name]
            before = rank[name] < rank["layer_input"]
            return (-1 if before else self.layers), rank[name]

        def in_order(keys: Sequence[str]) -> bool:
            return can_be_read(self.model, PROMPTS["five"], keys)

        guess = sorted(served, key=place)
        try:
            if in_order(guess):
                return guess
        except Exception:
            # One value that cannot be read must not hide the others; its own tests say why.
            guess = [key for key in guess if self._can_read(key)]
        # Blocks are mostly alike, so the order of one is a good guess for the others.
        block = forward_order([key for key in guess if key.startswith("layers.0.")], in_order)
        names = {key.split(".", 2)[2]: i for i, key in enumerate(block)}

        def place_like_block(key: str) -> tuple[int, int]:
            if not key.startswith("layers."):
                return place(key)
            _, layer, name = key.split(".", 2)
            return int(layer), names.get(name, len(names))

        return forward_order(sorted(served, key=place_like_block), in_order)

    def _can_read(self, key: str) -> bool:
        try:
            read(self.model, PROMPTS["five"], [key])
        except Exception:
            return False
        return True

    # -- what was read -----------------------------------------------------------

    def prefill(self, prompt: str) -> Read:
        """Every served value of a prompt, read in one trace."""
        ids = PROMPTS[prompt]
        found: Read = self._once(("prefill", prompt), lambda: read(self.model, ids, self.keys()))
        return found

    def decode(self, prompt: str) -> list[Read]:
        """Every served value of a prompt and of its decode steps, read in one trace."""
        found: list[Read] = self._once(("decode", prompt), lambda: self._decoded(PROMPTS[prompt]))
        return found

    def _decoded(self, prompt: Sequence[int]) -> list[dict[str, Any]]:
        keys = [self.keys(), *[self.keys("decode")] * STEPS]
        try:
            return read_steps(self.model, prompt, keys)
        except Exception:
            # As above: what cannot be read is left out, the rest is tested.
            found: list[dict[str, Any]] = [{} for _ in keys]
            for key in self.keys():
                with contextlib.suppress(Exception):
                    alone = [[key] if key in served else [] for served in keys]
                    for step, values in enumerate(read_steps(self.model, prompt, alone)):
                        found[step] |= values
            return found

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._read:
            try:
                self._read[key] = make()
            except Exception as error:
                # Once is enough for a failure too.
                self._read[key] = error
        found = self._read[key]
        if isinstance(found, Exception):
            raise found
        return found

    # -- the reference -----------------------------------------------------------

    def expected(self, key: str, prompt: str, step: int = 0) -> Any:
        """The reference's value."""
        return reference_value(self.references, key, prompt, step)

    def allowed(self, key: str) -> float:
        """How far a row of a value may be off."""
        return max(self.bound, LOOSER.get(key.rsplit(".", 1)[-1], 0.0))

    def check(
        self, actual: Any, expected: Any, key: str, what: str = "", *, as_read: bool = False
    ) -> None:
        """Fail unless a value is what it must be, row by row.

        Args:
            actual: the engine's value.
            expected: the reference's.
            key: the value's key.
            what: where it was read.
            as_read: whether ``actual`` is the value itself, of an unedited run, and ``expected``
                the reference's, so that the error is one for the report.
        """
        label = f"{key} {what}".strip()

        def note(error: float) -> None:
            if as_read and (key not in self.errors or error > self.errors[key][0]):
                self.errors[key] = error, label

        if not isinstance(expected, Tensor):
            note(0.0 if actual == expected else math.inf)
            assert actual == expected, f"{label}: {actual}, not {expected}"
            return
        assert isinstance(actual, Tensor), f"{label} is a {type(actual).__name__}"
        name = key.rsplit(".", 1)[-1]
        expected = aligned(actual, expected, name)
        if actual.shape != expected.shape:
            note(math.inf)
        assert actual.shape == expected.shape, (
            f"{label}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
        )
        worst, bound = worst_row(actual, expected), self.allowed(key)
        note(worst.error)
        if name not in self.worst or worst.error > self.worst[name].error:
            self.worst[name] = Worst(worst.error, bound, label)
        assert worst.error <= bound, (
            f"{label}: row {list(worst.index)} is off by {worst.error:.2e} of its scale, "
            f"{bound:.0e} is allowed (difference {worst.difference:.2e}, scale "
            f"{worst.scale:.2e})"
        )

    def sizes(self, prompt_tokens: int, keys: int) -> dict[str, int]:
        """The length of each named axis, by the model's own sizes."""
        model: StandardModel = self.model
        return {
            "batch": 1,
            "seq": prompt_tokens,
            "query": prompt_tokens,
            "key": keys,
            "hidden": model.hidden_size,
            "vocab": model.vocab_size,
            "neurons": model.intermediate_size,
            "heads": model.num_heads,
            "kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "qk_head_dim": model.qk_head_dim,
        }


def reference_value(references: References, key: str, prompt: str, step: int = 0) -> Any:
    """A value of the reference."""
    record = references.records[prompt]
    if key == "input_size":
        return tuple(record.get("input_ids", step).shape)
    mlp, _, name = key.rpartition(".")
    if name not in ("expert_indices", "expert_weights", "expert_outputs"):
        return record.get(key, step)
    keys = (key, f"{mlp}.expert_indices")
    return by_expert({one: record.get(one, step) for one in keys})[key]


def layout_of(key: str) -> Layout:
    """The layout of a value, by its key."""
    return VOCABULARY[key.rsplit(".", 1)[-1]].layout


def aligned(actual: Tensor, expected: Tensor, name: str) -> Tensor:
    """The part of the reference that an engine serves.

    The last position, of logits; the keys that a window's cache still holds, on a decode step.
    """
    if actual.dim() != expected.dim():
        return expected
    if name in LAST_ALONE and actual.shape[1] == 1:
        return expected[:, -1:]
    layout = VOCABULARY[name].layout
    axis = layout.axis("key") if len(layout.axes) == actual.dim() else None
    if axis is not None and actual.shape[axis] < expected.shape[axis] > expected.shape[axis - 1]:
        count = actual.shape[axis]
        gone = expected[..., :-count]
        empty = gone == (-torch.inf if name == "attention_scores" else 0)
        assert bool(empty.all()), f"{name}: keys are missing that the reference attends to"
        return expected[..., -count:]
    return expected
