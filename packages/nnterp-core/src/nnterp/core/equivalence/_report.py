"""What a comparison found, as plain data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nnterp.core import engines, load

FORMAT = 1
"""The version of the JSON's layout."""


@dataclass(frozen=True)
class Spec:
    """A model to load for a comparison and to close after it.

    Attributes:
        engine: ``"hf"``, ``"vllm"``, or another installed engine.
        checkpoint: a model's name on the hub, or a folder.
        options: keyword arguments of the engine's class, ``{"dtype": "bfloat16"}``.
    """

    engine: str
    checkpoint: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """The model, ready to run.

        Raises:
            MissingBackend: the engine is not installed.
        """
        return load(self.checkpoint, self.engine, **{"dispatch": True, **self.options})

    def check_engine(self) -> None:
        """Load nothing, but see that the engine is there.

        Raises:
            MissingBackend: it is not installed; the message has the command that installs it.
        """
        if self.engine not in engines():
            self.load()


@dataclass(frozen=True)
class Side:
    """One of the two models, as it was loaded.

    Attributes:
        engine: the engine's name.
        checkpoint: what was loaded.
        options: the options it was loaded with, as text.
        model_type: transformers' name of its architecture.
        implementation: the class that computes.
        dtype: the dtype of its weights.
        device: where they are.
        attention: the attention implementation.
        versions: of the packages that compute, by distribution.
        layers: the number of its blocks.
    """

    engine: str
    checkpoint: str
    options: dict[str, str]
    model_type: str
    implementation: str
    dtype: str
    device: str
    attention: str
    versions: dict[str, str]
    layers: int


@dataclass(frozen=True)
class Prompt:
    """A prompt and its token ids.

    Attributes:
        text: what it was written as; ``None`` for token ids.
        ids: the token ids that both sides were given.
        other_ids: the ids that the other side makes of it, where they differ.
        continuation: the tokens that the decode steps were given.
    """

    text: str | None
    ids: list[int]
    other_ids: list[int] | None
    continuation: list[int]


@dataclass(frozen=True)
class Measure:
    """How far apart one value is on one step, over all prompts.

    Errors are relative to the row's largest magnitude; a row lies along the last axis.

    Attributes:
        shapes: a's and b's shape, of the prompt in which they differ most.
        error: the largest difference of a row.
        rms: the root mean square of all differences.
        cosine: the smallest cosine of two rows.
        rounding: what rounding does to this value on a and on b: their largest differences from
            their own float32 runs; ``None`` where there was none to measure it with.
        rounding_rms: likewise, root mean squares.
        bound: the largest ``error`` that the dtypes explain.
        bound_rms: the largest ``rms`` that they explain, or ``None`` where only ``bound`` counts.
        in_float32: the largest difference between the two float32 runs, or ``None``.
        prompt: the index of the prompt in which they differ most.
        row: where in the value, one index for each axis but the last.
        problem: why the two could not be subtracted, or ``None``.
    """

    shapes: tuple[list[int], list[int]]
    error: float
    rms: float
    cosine: float
    rounding: tuple[float | None, float | None]
    rounding_rms: tuple[float | None, float | None]
    bound: float
    bound_rms: float | None
    in_float32: float | None
    prompt: int
    row: list[int]
    problem: str | None = None

    @property
    def departs(self) -> bool:
        """Whether the difference is more than the dtypes explain."""
        beyond = self.bound_rms is not None and not self.rms <= self.bound_rms
        return self.problem is not None or not self.error <= self.bound or beyond

    @property
    def hidden(self) -> bool:
        """Whether the float32 runs are further apart than float32 explains, unseen in these."""
        if self.in_float32 is None or self.departs:
            return False
        left = self.bound - sum(one or 0.0 for one in self.rounding)
        return not self.in_float32 <= left * (1 + 1e-6)

    @property
    def excess(self) -> float:
        """The difference as a multiple of what the dtypes explain; above 1 it departs."""
        if self.problem is not None:
            return math.inf
        found = _ratio(self.error, self.bound)
        return found if self.bound_rms is None else max(found, _ratio(self.rms, self.bound_rms))


def _ratio(error: float, bound: float) -> float:
    if error == 0:
        return 0.0
    return error / bound if bound and math.isfinite(error) else math.inf


@dataclass(frozen=True)
class ValueReport:
    """One value of the vocabulary.

    Attributes:
        key: its standard path, ``"layers.3.mlp.mlp_output"``.
        dtypes: a's and b's dtype.
        steps: the prompt's step, then the decode steps; ``None`` where one side serves none.
    """

    key: str
    dtypes: tuple[str, str]
    steps: list[Measure | None]

    @property
    def layer(self) -> int | None:
        """Its block, or ``None`` for a value of the model."""
        return int(self.key.split(".")[1]) if self.key.startswith("layers.") else None

    @property
    def name(self) -> str:
        """The key without its block, ``"mlp.mlp_output"``."""
        return self.key.split(".", 2)[2] if self.key.startswith("layers.") else self.key

    @property
    def departs(self) -> bool:
        """Whether it departs on any step."""
        return any(measure is not None and measure.departs for measure in self.steps)

    def worst(self) -> tuple[int, Measure] | None:
        """The step, and what was measured there, at which the two are furthest apart."""
        found = [(i, one) for i, one in enumerate(self.steps) if one is not None]
        return max(found, key=lambda pair: (pair[1].excess, pair[1].error), default=None)


@dataclass(frozen=True)
class LogitsAgreement:
    """How alike the distributions of the next token are, on one step.

    Attributes:
        positions: how many positions were compared: each prompt's last, where a generation
            computes no other.
        kl: the largest Kullback-Leibler divergence of b's from a's, in nats.
        kl_mean: its mean.
        top1: in what share of the positions both choose one token.
        top5: what share of a's five likeliest tokens are among b's.
    """

    positions: int
    kl: float
    kl_mean: float
    top1: float
    top5: float


@dataclass(frozen=True)
class Departure:
    """The first value, in the order of the forward, that differs by more than the dtypes explain.

    Attributes:
        key: its standard path.
        step: 0 for the prompt, 1 for the first decode step, ...
        what: the difference, in words.
        faults: known faults of an engine that it matches, in words.
    """

    key: str
    step: int
    what: str
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """A comparison of two models, value by value.

    Attributes:
        a, b: the two.
        prompts: what both were given.
        together: how many prompts ran beside each other.
        seed: what prompts of random tokens were drawn with.
        values: every value that both serve, in the order of the forward.
        logits: the next token's distribution, step by step.
        unshared: the values that only one of the two serves, and why.
        first: the first value that departs, or ``None``.
        rule: what the bounds are, in words.
        notes: what else one must know, in words.
        versions: of the packages that compare, and of Python.
        seconds: how long it took.
    """

    a: Side
    b: Side
    prompts: list[Prompt]
    together: int
    seed: int
    values: list[ValueReport]
    logits: list[LogitsAgreement]
    unshared: dict[str, str]
    first: Departure | None
    rule: str
    notes: list[str]
    versions: dict[str, str]
    seconds: float

    @property
    def agree(self) -> bool:
        """Whether every shared value is within what the dtypes explain."""
        return self.first is None

    @property
    def steps(self) -> int:
        """How many decode steps followed the prompts."""
        return len(self.logits) - 1

    def __getitem__(self, key: str) -> ValueReport:
        """The report of one value, by its standard path."""
        for value in self.values:
            if value.key == key:
                return value
        raise KeyError(key)

    def __str__(self) -> str:
        from ._text import text

        return text(self)

    def to_json(self) -> str:
        """The report as JSON; what is not finite is written as text, ``"inf"``."""
        content = {"format": FORMAT, "agree": self.agree, **asdict(self)}
        return json.dumps(_plain(content), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that :meth:`to_json` wrote.

        Raises:
            ValueError: it is of another layout.
        """
        content = json.loads(text)
        if content.pop("format", None) != FORMAT:
            raise ValueError(f"this is no report of layout {FORMAT}")
        content.pop("agree")
        content["a"], content["b"] = Side(**content["a"]), Side(**content["b"])
        content["prompts"] = [Prompt(**one) for one in content["prompts"]]
        content["values"] = [
            ValueReport(
                one["key"],
                (one["dtypes"][0], one["dtypes"][1]),
                [None if step is None else _measure(step) for step in one["steps"]],
            )
            for one in content["values"]
        ]
        content["logits"] = [
            LogitsAgreement(**{name: _number(number) for name, number in one.items()})
            for one in content["logits"]
        ]
        content["first"] = None if content["first"] is None else Departure(**content["first"])
        return cls(**content)

    def to_html(self) -> str:
        """A page that needs nothing beside itself."""
        from ._html import page

        return page(self)

    def write(
        self,
        *,
        json: str | Path | None = None,
        html: str | Path | None = None,
        png: str | Path | None = None,
    ) -> None:
        """Write the report to files.

        Args:
            json: where the JSON goes.
            html: where the page goes.
            png: where the heat map goes, layer by value.

        Raises:
            ImportError: a heat map is asked for and matplotlib is not installed.
        """
        if json is not None:
            Path(json).write_text(self.to_json())
        if html is not None:
            Path(html).write_text(self.to_html())
        if png is not None:
            from ._plot import heat_map

            heat_map(self, Path(png))


def _measure(content: dict[str, Any]) -> Measure:
    for name in ("shapes", "rounding", "rounding_rms"):
        content[name] = tuple(_number(one) if name != "shapes" else one for one in content[name])
    for name in ("error", "rms", "cosine", "bound", "bound_rms", "in_float32"):
        content[name] = _number(content[name])
    return Measure(**content)


def _number(found: Any) -> Any:
    return float(found) if isinstance(found, str) else found


def _plain(found: Any) -> Any:
    """What JSON has words for: infinities become text."""
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    if isinstance(found, Mapping):
        return {key: _plain(one) for key, one in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(one) for one in found]
    return found
