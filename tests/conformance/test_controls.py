"""Negative controls: a model with one thing wrong fails the tests of that thing, and no others.

The wrong thing is put into the family that the model is loaded with, as its author might have
written it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nnterp.core import VOCABULARY, OutsideTrace, families
from nnterp.core._vocabulary import MIXTURE
from nnterp.core.testing import RECIPES, build, conformance
from nnterp.core.testing.adapters import Subject
from nnterp.core.testing.bench import Bench
from nnterp.core.testing.references import references
from nnterp.core.tracing import Attention, Layer, Lens, Site, Value

pytestmark = pytest.mark.slow

DENSE = [name for name in VOCABULARY if name not in MIXTURE]

# -- every test on one model -----------------------------------------------------------------------


def _tests() -> Iterator[tuple[str, Callable[[Bench], None]]]:
    """Each conformance test of one model by a readable name."""
    for test in vars(conformance).values():
        if not getattr(test, "__name__", "").startswith("test_"):
            continue
        wanted = [name for name in inspect.signature(test).parameters if name != "bench"]
        choices: dict[str, list[Any]] = {"name": DENSE}
        for mark in getattr(test, "pytestmark", []):
            if mark.name == "parametrize":
                choices[mark.args[0]] = list(mark.args[1])
            elif mark.name == "values":
                choices["name"] = [name for name in mark.args if name in DENSE]
            elif mark.name == "checkpoints" and mark.kwargs["sparse"]:
                wanted.append("a mixture")
        if not set(wanted) <= set(choices):
            continue
        for values in itertools.product(*(choices[name] for name in wanted)):
            label = test.__name__.removeprefix("test_")
            if values:
                label += f"[{values[0]}]"
            yield label, partial(test, **dict(zip(wanted, values, strict=True)))


def failing(bench: Bench) -> set[str]:
    """The tests that fail on a model."""
    found = set()
    for label, test in _tests():
        try:
            test(bench)
        except (Exception, pytest.fail.Exception):
            found.add(label)
    return found


# -- ways to be wrong ------------------------------------------------------------------------------


class _Then(Lens):
    """A lens with something wrong after it, on the way out, on the way back, or both."""

    def __init__(self, lens: Lens, get: Any = None, put: Any = None) -> None:
        self.lens, self.wrong_get, self.wrong_put = lens, get, put

    def get(self, raw: Any, host: Any) -> Any:
        value = self.lens.get(raw, host)
        return value if self.wrong_get is None else self.wrong_get(value)

    def put(self, raw: Any, new: Any, host: Any) -> Any:
        return self.lens.put(raw, new if self.wrong_put is None else self.wrong_put(new), host)


class _Lost(Lens):
    """A lens whose writes get lost."""

    def __init__(self, lens: Lens) -> None:
        self.lens = lens

    def get(self, raw: Any, host: Any) -> Any:
        return self.lens.get(raw, host)

    def put(self, raw: Any, new: Any, host: Any) -> Any:
        return raw


def _transposed(heads: Tensor) -> Tensor:
    """``[1, seq, heads, width]`` read as if it were ``[1, seq, width, heads]``."""
    return heads.flatten(2).unflatten(2, (heads.shape[3], heads.shape[2])).transpose(2, 3)


def _transposed_back(heads: Tensor) -> Tensor:
    return heads.transpose(2, 3).flatten(2).unflatten(2, heads.shape[2:])


def _first_half(site: Site) -> Site:
    """A stream in two halves of which the second is forgotten."""
    halves = site.lens
    return replace(site, lens=halves.outer.first | halves.inner)  # type: ignore[attr-defined]


def _spoilt(name: str, change: Callable[[Site], Site]) -> Callable[[type], type]:
    """A host whose value ``name`` is elsewhere."""

    def of(host: type) -> type:
        resolve = getattr(host, name).resolve

        def resolved(one: Any) -> Site | str:
            site = resolve(one) if callable(resolve) else resolve
            return change(site) if isinstance(site, Site) else site

        value = Value(resolved)
        value.__set_name__(host, name)
        return type(host.__name__, (host,), {name: value, "__module__": __name__})

    return of


def _with_facts(host: type, facts: Any) -> type:
    return type(host.__name__, (host,), {"architecture": facts, "__module__": __name__})


def doctored(model_type: str, engine: str, control: Control) -> Any:
    """A family with what the control changes in it."""
    family = families.lookup(model_type, engine)
    facts = control.facts(family.ARCHITECTURE)
    envoys = {}
    for module, envoy in family.ENVOYS.items():
        found = _with_facts(envoy, facts)
        if control.host is not None and issubclass(found, control.host):
            found = control.spoil(found)
        envoys[module] = found
    return SimpleNamespace(RENAME=family.RENAME, ENVOYS=envoys, ARCHITECTURE=facts)


@dataclass(frozen=True)
class Control:
    """One thing that is wrong.

    Attributes:
        recipe: on which checkpoint.
        engines: the labels of the engines that it can be wrong on.
        fails: tests that must fail.
        may: tests that may: they use the wrong value on the way to something else.
        facts: what is wrong in the architecture's facts.
        host, spoil: which class of the family is another, and how.
    """

    recipe: str
    engines: tuple[str, ...]
    fails: frozenset[str]
    may: frozenset[str] = frozenset()
    facts: Callable[[Any], Any] = lambda facts: facts
    host: type | None = None
    spoil: Callable[[type], type] = lambda host: host


def _of(value: str) -> frozenset[str]:
    return frozenset(
        f"{test}[{value}]" for test in ("write", "write_on_a_step", "edit_is_a_difference")
    )


_SCORES = ("attention_scores", "attention_probabilities")
_STREAM = _of("layer_output") | {
    *("ablation[zero_block]", "skip", "steer", "saved_value_stays", "edit_of_one_of_two"),
    *("lens", "closest_tokens", "verify", "identity", "together[(0, 1, 2, 3)]"),
}

CONTROLS = {
    "contribution before its norm": Control(
        "gemma2",
        ("hf", "vllm"),
        fails=frozenset({"read[attention_output]", "identity", "write[attention_output]"}),
        may=_of("attention_output") | {"ablation[zero_attention]", "verify"},
        facts=lambda facts: replace(facts, attention_adds="self_attn"),
    ),
    "window one too long": Control(
        "mistral",
        ("hf-sdpa",),
        fails=frozenset({*(f"read[{name}]" for name in _SCORES), "pattern"}),
        facts=lambda facts: replace(
            facts,
            attention=replace(facts.attention, window=lambda config, i: config.sliding_window + 1),
        ),
    ),
    "no softcap in the scores": Control(
        "gemma2",
        ("vllm",),
        fails=frozenset({*(f"read[{name}]" for name in _SCORES), "pattern"}),
        may=frozenset(f"write_on_a_step[{name}]" for name in _SCORES),
        facts=lambda facts: replace(
            facts, attention=replace(facts.attention, softcap=lambda config: None)
        ),
    ),
    "no softcap in the lens": Control(
        "gemma2",
        ("hf",),
        fails=frozenset({"lens", "verify", "closest_tokens"}),
        facts=lambda facts: replace(facts, logits=None),
    ),
    "heads transposed": Control(
        "llama",
        ("hf", "vllm"),
        fails=frozenset({"read[attention_head_outputs]", "pattern"}),
        may=_of("attention_head_outputs") | {"ablation[zero_head]"},
        host=Attention,
        spoil=_spoilt(
            "attention_head_outputs",
            lambda site: replace(site, lens=_Then(site.lens, _transposed, _transposed_back)),
        ),
    ),
    "second half of the stream forgotten": Control(
        "llama",
        ("vllm",),
        fails=frozenset({"read[layer_output]", "identity", "lens", "write[layer_output]"}),
        may=_STREAM,
        host=Layer,
        spoil=_spoilt("layer_output", _first_half),
    ),
    "edit lost": Control(
        "llama",
        ("hf", "vllm"),
        fails=frozenset({"write[layer_output]", "skip", "steer", "ablation[zero_block]"}),
        may=_of("layer_output") | {"saved_value_stays", "edit_of_one_of_two"},
        host=Layer,
        spoil=_spoilt("layer_output", lambda site: replace(site, lens=_Lost(site.lens))),
    ),
}


@contextmanager
def opened(suite: Any, label: str, recipe: str, family: Any) -> Iterator[Bench]:
    """A model loaded with a family of one's own, under test."""
    (adapter,) = (one for one in suite.adapters if one.label == label)
    subject = Subject(RECIPES[recipe], adapter)
    path = build(subject.recipe)
    answers = references(path, subject.recipe)
    model = adapter.load(path, family=family)
    try:
        yield Bench(subject, model, answers)
    finally:
        adapter.close(model)


def _cases() -> list[Any]:
    return [
        pytest.param(name, label, id=f"{name}-{label}")
        for name, control in CONTROLS.items()
        for label in control.engines
    ]


@pytest.mark.parametrize(("name", "label"), _cases())
def test_control(suite: Any, name: str, label: str) -> None:
    """A fault that the suite is there to find is not found, or is found where it is not."""
    control = CONTROLS[name]
    recipe = RECIPES[control.recipe]
    engine = label.partition("-")[0]
    family = doctored(recipe.model_type, engine, control)
    with opened(suite, label, control.recipe, family) as bench:
        found = failing(bench)
    assert control.fails <= found
    assert found <= control.fails | control.may


def test_controls_pass_without_a_fault(suite: Any) -> None:
    """The tests fail on a sound model when they are run as the controls run them."""
    sound = doctored("llama", "hf", Control("llama", ("hf",), fails=frozenset()))
    with opened(suite, "hf", "llama", sound) as bench:
        assert failing(bench) == set()


def test_support_that_lies(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is served, though it is said not to be, passes."""
    with opened(suite, "hf", "llama", families.lookup("llama", "hf")) as bench:
        served = bench.reasons

        def denied(step: Any = "prefill") -> dict[str, str | None]:
            return {**served(step), "final_norm_output": "it is not there"}

        monkeypatch.setattr(bench, "reasons", denied)
        with pytest.raises((pytest.fail.Exception, OutsideTrace)):
            conformance.test_read(bench, "final_norm_output")
        conformance.test_read(bench, "logits")


def test_reading_that_changes(suite: Any) -> None:
    """A read that changes what the model computes passes."""

    def nudged(site: Site) -> Site:
        return replace(site, lens=_Then(site.lens, get=lambda value: value.mul_(1 + 1e-6)))

    control = Control(
        "llama", ("hf",), frozenset(), host=Layer, spoil=_spoilt("layer_output", nudged)
    )
    family = doctored("llama", "hf", control)
    with torch.no_grad(), opened(suite, "hf", "llama", family) as bench:
        with pytest.raises(AssertionError, match="reading changed the logits"):
            conformance.test_everything_in_one_trace(bench)
