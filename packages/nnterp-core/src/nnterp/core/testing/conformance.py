"""The conformance tests: what every engine must hold, whatever it is and whatever it runs.

The tests take two fixtures of :mod:`nnterp.core.testing.plugin`: ``bench``, a checkpoint on an
engine beside the oracle's answers, and ``name``, a value of the vocabulary. A test module of an
engine imports them all and says nothing more.

What an engine serves is what its ``support()`` says. A value that it does not serve is tested to be
refused; none is passed over.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nnterp.core import VOCABULARY, OutOfOrder, OutsideTrace, Unavailable, WrongShape
from nnterp.core._vocabulary import MIXTURE
from nnterp.core.faults import Missing
from nnterp.core.reading import by_expert, copied, host_of, saved, value_at
from nnterp.core.testing.adapters import Subject
from nnterp.core.testing.bench import (
    Bench,
    aligned,
    layout_of,
    read,
    read_steps,
    reference_value,
)
from nnterp.core.testing.cases import (
    LONGEST,
    PROMPTS,
    STEER_FACTOR,
    STEER_POSITIONS,
    STEPS,
    Case,
    Change,
    perform,
    steering_vector,
)
from nnterp.core.testing.checkpoints import build
from nnterp.core.testing.faults import Fault
from nnterp.core.testing.oracle import PATCHES
from nnterp.core.testing.recipes import RECIPES
from nnterp.core.testing.tolerance import worst_row

LONG = "forty"
SHORT = "five"
SINGLE = ("one", SHORT, LONG)
BATCH = (SHORT, LONG, "one", "thirteen")

WRITABLE = [name for name, term in VOCABULARY.items() if term.writable]
ROWS = [
    name
    for name in WRITABLE
    if VOCABULARY[name].hosts != ("model",) and "seq" in VOCABULARY[name].layout.axes
]


# A model may do without one of these; then it does not serve the value either.
MODULES = {
    "token_embeddings": "embed_tokens",
    "final_norm_output": "norm",
    "lm_head_output": "lm_head",
}


# -- what is served --------------------------------------------------------------------------------


def test_support(bench: Bench) -> None:
    """``support()`` contradicts itself, or the vocabulary: nothing it says can be relied on."""
    model = bench.model
    for step in ("prefill", "decode"):
        whole = model.support(step=step)
        single = bench.reasons(step)
        hosted = {key: reason for key, reason in single.items() if key.startswith("layers.")}
        expanded: dict[str, str | None] = {}
        for key, reason in whole.items():
            head, _, rest = key.partition(".*.")
            if rest:
                expanded |= {f"{head}.{i}.{rest}": reason for i in range(bench.layers)}
            elif key.startswith("layers."):
                expanded[key] = reason
        assert expanded == hosted
        on_model = {key for key in single if not key.startswith("layers.")}
        assert on_model == {t.name for t in VOCABULARY.values() if "model" in t.hosts}
        on_block = {key for t in VOCABULARY.values() for key in t.keys()} - on_model  # noqa: SIM118
        for i in range(bench.layers):
            assert set(model.support(i, step=step)) == on_block
        assert all(reason is None or reason.strip() for reason in single.values())
    for layer in (bench.layers, -bench.layers - 1):
        with pytest.raises(IndexError):
            model.support(layer)


def test_read(bench: Bench, name: str) -> None:
    """A value is wrong, or is served where it was said to be unavailable, or the other way round.

    Wrong at one prompt's length only: a window or a position. On decode steps only: the cache.
    From one layer on: look at the first.
    """
    prefill, decode = bench.reasons(), bench.reasons("decode")
    keys = bench.keys_of(name)
    served = [key for key in keys if prefill[key] is None]
    # All is measured before anything fails, so that the report has the largest error of each.
    failures = [*_unlike_the_reference(bench, served)]
    if failures:
        raise failures[0]
    for key in keys:
        if (reason := prefill[key]) is not None:
            _assert_refused(bench, key, reason)
        elif (reason := decode[key]) is not None:
            _assert_refused_on_a_step(bench, key, reason)


def _unlike_the_reference(bench: Bench, keys: Sequence[str]) -> Iterator[AssertionError]:
    """Measure served values of every prompt and step; what is wrong with them."""
    decode = bench.reasons("decode")
    for key in keys:
        runs = [(prompt, 0, f"of {prompt}", bench.prefill(prompt)) for prompt in SINGLE]
        if decode[key] is None:
            for prompt in (SHORT, LONG):
                for step, found in enumerate(bench.decode(prompt)):
                    what = f"of {prompt}, step {step} of a generation"
                    runs.append((prompt, step, what, found))
        for prompt, step, what, found in runs:
            try:
                if key not in found:
                    bench.errors[key] = math.inf, f"{key} {what}"
                    _read_on_step(bench.model, PROMPTS[prompt], key, step)
                    raise AssertionError(f"{key} can be read by itself, but not with the others")
                expected = bench.expected(key, prompt, step)
                bench.check(found[key], expected, key, what, as_read=True)
            except AssertionError as error:
                yield error


def _assert_refused(bench: Bench, key: str, reason: str) -> None:
    model = bench.model
    with pytest.raises(Unavailable) as outside:
        value_at(model, key)
    with pytest.raises(Unavailable) as inside, model.prefill(PROMPTS[SHORT]):
        value_at(model, key)
    for error in (outside, inside):
        assert reason in str(error.value), f"{key}: {error.value} does not say {reason!r}"
    path, _, name = key.rpartition(".")
    try:
        host, _ = host_of(model, key)
    except Unavailable:
        # The module itself is not there; it is that which the block has not.
        path, _, name = path.rpartition(".")
        host = value_at(model, path)
    assert not hasattr(host, name)
    assert getattr(host, name, "default") == "default"
    with model.prefill(PROMPTS[SHORT]):
        found = saved([hasattr(host, name), getattr(host, name, "default")])
        logits = model.logits.save()
    assert list(found) == [False, "default"]
    own = bench.prefill(SHORT)["logits"]
    assert torch.equal(logits, own), f"asking for {key} changed the logits"


def _assert_refused_on_a_step(bench: Bench, key: str, reason: str) -> None:
    model = bench.model
    with pytest.raises(Unavailable) as error:
        _read_on_step(model, PROMPTS[SHORT], key, 1)
    assert reason in str(error.value)
    own = bench.prefill(SHORT)[key]
    bench.check(_read_on_step(model, PROMPTS[SHORT], key, 0), own, key, "in decode")


def _read_on_step(model: Any, prompt: Sequence[int], key: str, wanted: int) -> Any:
    with model.decode(prompt, max_new_tokens=wanted + 1) as tracer:
        found = saved([])
        for step in tracer.iter[0 : wanted + 1]:
            if step == wanted:
                found.append(copied(value_at(model, key)))
    return found[0]


@pytest.mark.checkpoints(sparse=False)
def test_dense(bench: Bench) -> None:
    """A model without experts has a value of theirs, or takes one."""
    reasons = bench.reasons()
    for layer in (0, bench.layers - 1):
        for name in sorted(MIXTURE):
            key = f"layers.{layer}.mlp.{name}"
            reason = reasons[key]
            assert reason is not None
            _assert_refused(bench, key, reason)
            _assert_no_write(bench, key, reason)


def test_what_was_loaded(bench: Bench) -> None:
    """The model is another engine's, of another dtype, or has not its modules by their names."""
    model = bench.model
    assert model.engine == bench.subject.adapter.name
    assert model.dtype == torch.float32
    assert len(model.layers) == bench.layers
    for key, reason in bench.reasons().items():
        if reason is None:
            assert host_of(model, key)[0] is not None, f"the module of {key} is not there"
            if key in MODULES:
                name = MODULES[key]
                assert getattr(model, name) is not None, f"there is no model.{name}"


def test_longest_prompt(bench: Bench) -> None:
    """A long prompt goes wrong where short ones do not: its positions, a window, or the room."""
    found = read(bench.model, LONGEST, ["logits"])["logits"]
    what = f"of {len(LONGEST)} tokens"
    bench.check(found, bench.references.longest, "logits", what)


def test_layout(bench: Bench) -> None:
    """A value's axes are not the ones that the vocabulary names, or are of another length."""
    runs = [(prompt, 0, bench.prefill(prompt)) for prompt in SINGLE]
    runs += [(SHORT, step, values) for step, values in enumerate(bench.decode(SHORT))]
    for prompt, step, values in runs:
        so_far = len(PROMPTS[prompt]) + step
        sizes = bench.sizes(so_far if step == 0 else 1, so_far)
        for key, value in values.items():
            layout = layout_of(key)
            if layout.kind == "sizes":
                assert value == tuple(sizes[axis] for axis in layout.axes), key
                continue
            assert value.dim() == len(layout.axes), f"{key}: {tuple(value.shape)} is no {layout}"
            assert value.is_floating_point() == (layout.kind == "float"), f"{key}: {value.dtype}"
            for axis, length in zip(layout.axes, value.shape, strict=True):
                allowed = {sizes.get(axis, length)}
                if key == "token_embeddings" and axis == "hidden":
                    # A table may be narrower than the stream, with a projection between them.
                    allowed = {bench.expected(key, prompt, step).shape[-1]}
                if axis == "seq" and key in ("logits", "lm_head_output"):
                    allowed.add(1)
                if key == "attention_mask" and axis == "seq":
                    allowed = {so_far}
                assert length in allowed, f"{key} is {tuple(value.shape)}; {axis} is not {allowed}"


def test_everything_in_one_trace(bench: Bench) -> None:
    """Values that ``support()`` promises are missing when all are read together, or reading them
    changed what the model computes."""
    served = [key for key, reason in bench.reasons().items() if reason is None]
    for prompt in SINGLE:
        found = bench.prefill(prompt)
        assert sorted(found) == sorted(served)
        plain = read(bench.model, PROMPTS[prompt], ["logits"])["logits"]
        assert torch.equal(plain, found["logits"]), f"{prompt}: reading changed the logits"
    plain_steps = read_steps(bench.model, PROMPTS[SHORT], [["logits"]] * (STEPS + 1))
    for step, (plain_step, found) in enumerate(zip(plain_steps, bench.decode(SHORT), strict=True)):
        assert torch.equal(plain_step["logits"], found["logits"]), f"step {step}: logits changed"


def test_outside_a_trace(bench: Bench) -> None:
    """A served value is given, or crashes, where no model runs."""
    for key, reason in bench.reasons().items():
        if reason is None:
            with pytest.raises(OutsideTrace):
                value_at(bench.model, key)


def test_same_on_every_engine(bench: Bench, peer: Bench) -> None:
    """This engine and the first one differ: a study that moves between them would change."""
    for prompt in SINGLE:
        own, other = bench.prefill(prompt), peer.prefill(prompt)
        for key in own:
            if key in other:
                bench.check(own[key], _last(own[key], other[key], key), key, f"of {prompt}")
        last = own["logits"][:, -1], other["logits"][:, -1]
        assert last[0].shape == last[1].shape
        bench.check(own["logits"][:, -1:], other["logits"][:, -1:], "logits", f"of {prompt}, last")
    for step, (own, other) in enumerate(zip(bench.decode(SHORT), peer.decode(SHORT), strict=True)):
        last_own, last_other = own["logits"][:, -1:], other["logits"][:, -1:]
        assert torch.equal(last_own.argmax(-1).cpu(), last_other.argmax(-1).cpu())
        bench.check(last_own, last_other, "logits", f"on step {step}")


def _last(own: Any, other: Any, key: str) -> Any:
    """Another engine's value, where this one or that one has the last position alone."""
    if isinstance(other, Tensor) and key in ("logits", "lm_head_output"):
        return other[:, -own.shape[1] :]
    return other


# -- what is written -------------------------------------------------------------------------------


def _run(
    model: Any,
    prompt: Sequence[int],
    changes: Sequence[Change],
    sources: Sequence[Tensor | None],
    steps: int,
) -> list[Tensor]:
    """The logits of each step of a run with edits."""
    if steps == 0:
        with model.prefill(prompt):
            for change, source in zip(changes, sources, strict=True):
                perform(model, change, source)
            logits = model.logits.save()
        return [logits]
    with model.decode(prompt, max_new_tokens=steps + 1) as tracer:
        found = saved([])
        for step in tracer.iter[0 : steps + 1]:
            for change, source in zip(changes, sources, strict=True):
                if change.step == step:
                    perform(model, change, source)
            found.append(copied(model.logits))
    return list(found)


def _assert_case(bench: Bench, name: str) -> None:
    """An engine's logits of a case are the oracle's."""
    edited = bench.references.edited[name]
    case = edited.case
    record = bench.references.records[case.prompt]
    sources = [
        None if change.source is None else record.get(change.source) for change in case.changes
    ]
    found = _run(bench.model, PROMPTS[case.prompt], case.changes, sources, len(edited.logits) - 1)
    for step, (logits, expected) in enumerate(zip(found, edited.logits, strict=True)):
        bench.check(logits, expected, "logits", f"on step {step} of {name}")


def _cases(bench: Bench, kind: str, key: str) -> list[Case]:
    return [
        edited.case
        for edited in bench.references.edited.values()
        if edited.case.kind == kind and edited.case.changes[0].key == key
    ]


def test_write(bench: Bench, name: str) -> None:
    """An edit is lost, lands elsewhere, or has another effect than the same edit of plain modules;
    or a value that cannot be written takes the write without a word."""
    for key in bench.keys_of(name):
        reason = bench.reasons()[key]
        if reason is not None:
            _assert_no_write(bench, key, reason)
        elif not VOCABULARY[name].writable or not _takes_writes(bench, key):
            _assert_read_only(bench, key)


def _takes_writes(bench: Bench, key: str) -> bool:
    """Write a value in every way that there is a case of; whether the model lets it be written."""
    written = _cases(bench, "write", key)
    idle = [case for case in bench.references.idle if case.startswith(f"{key}:")]
    assert written or idle, f"no case writes {key}"
    if not written:
        return not is_read_only(bench, key)
    try:
        for case in written:
            _assert_case(bench, case.name)
    except Unavailable:
        bench.writable[key] = False
    else:
        bench.writable[key] = True
    return bench.writable[key]


@pytest.mark.values(*WRITABLE)
def test_write_on_a_step(bench: Bench, name: str) -> None:
    """An edit on the way through a generation is lost, comes at another step, or is not seen by the
    steps after it, through the cache and the token it chose."""
    for key in bench.keys_of(name):
        reason = bench.reasons("decode")[key]
        if reason is not None:
            if bench.reasons()[key] is None:
                _assert_refused_on_a_step(bench, key, reason)
            continue
        if not is_read_only(bench, key):
            for case in _cases(bench, "decode", key):
                _assert_case(bench, case.name)


def is_read_only(bench: Bench, key: str) -> bool:
    """Whether the model refuses to have a value assigned; it is asked once."""
    if key not in bench.writable:
        try:
            _assign_to(bench.model, key, copied(bench.prefill(SHORT)[key]))
            bench.writable[key] = True
        except Unavailable:
            bench.writable[key] = False
    return not bench.writable[key]


def _assign_to(model: Any, key: str, value: Any) -> None:
    host, name = host_of(model, key)
    with model.prefill(PROMPTS[SHORT]):
        setattr(host, name, value)
        model.logits.save()


def _assert_no_write(bench: Bench, key: str, reason: str) -> None:
    with pytest.raises(Unavailable) as refused:
        _assign_to(bench.model, key, torch.zeros(1))
    assert reason in str(refused.value)


def _assert_read_only(bench: Bench, key: str) -> None:
    """Every way of writing a value is refused, and the model computes what it did."""
    model = bench.model
    value = copied(bench.prefill(SHORT)[key])
    with pytest.raises(Unavailable, match="read-only"):
        _assign_to(model, key, value)
    if isinstance(value, Tensor):
        with pytest.raises(Unavailable, match="read-only"):
            _fill(model, key, slice(None))
        with pytest.raises(Unavailable, match="read-only"):
            _fill(model, key, (slice(None), 0))
    plain = read(model, PROMPTS[SHORT], ["logits"])["logits"]
    assert torch.equal(plain, bench.prefill(SHORT)["logits"])


def _fill(model: Any, key: str, where: Any) -> None:
    with model.prefill(PROMPTS[SHORT]):
        value_at(model, key)[where] = 0


@pytest.mark.values(*ROWS)
def test_edit_is_a_difference(bench: Bench, name: str) -> None:
    """An edit of one position disturbed rows that it does not reach: the write was not of that
    position alone, or rounded what it left alone."""
    position = 3
    last = f"layers.{bench.layers - 1}.layer_output"
    for key in bench.keys_of(name):
        layout = layout_of(key)
        if (
            bench.reasons()[key] is not None
            or layout.kind != "float"
            or f"{key}:in_place" not in bench.references.edited
            or is_read_only(bench, key)
        ):
            continue
        change = Change(key, "position", position=position)
        found = _read_edited(bench.model, PROMPTS[SHORT], change, last)
        before = bench.prefill(SHORT)[last]
        _assert_same(bench, found[:, :position], before[:, :position], last, f"after {key}")
        # A router may choose the same experts with the same weights.
        moved = not torch.equal(found[:, position], before[:, position])
        assert moved or name == "router_logits", f"{key}: nothing moved"


def _assert_same(bench: Bench, actual: Tensor, before: Tensor, key: str, what: str) -> None:
    """To the last bit; but experts compute their tokens together, and so round together."""
    if bench.subject.sparse:
        bench.check(actual, before, key, what)
    else:
        assert torch.equal(actual, before), f"{key} {what}: rows moved that it does not reach"


def _read_edited(model: Any, prompt: Sequence[int], change: Change, key: str) -> Tensor:
    with model.prefill(prompt):
        perform(model, change)
        found: Tensor = value_at(model, key).save()
    return found


def test_saved_value_stays(bench: Bench) -> None:
    """What was saved changed when the value was edited afterwards."""
    model, layer = bench.model, bench.middle
    with model.prefill(PROMPTS[SHORT]):
        stream = model.layers[layer].layer_output
        before = stream.save()
        stream[:] = 0
        after = stream.save()
        logits = model.logits.save()
    key = f"layers.{layer}.layer_output"
    assert torch.equal(before, bench.prefill(SHORT)[key])
    assert not after.any()
    assert not torch.equal(logits, bench.prefill(SHORT)["logits"])


@pytest.mark.parametrize("case", ["zero_attention", "zero_mlp", "zero_head", "zero_block"])
def test_ablation(bench: Bench, case: str) -> None:
    """Taking out a part of the model does not do what it does in plain transformers."""
    key = bench.references.edited[case].case.changes[0].key
    reason = bench.reasons()[key]
    if reason is None:
        _assert_case(bench, case)
    else:
        _assert_no_write(bench, key, reason)


# -- what must hold between values -----------------------------------------------------------------


def test_identity(bench: Bench) -> None:
    """A contribution is not what its sublayer adds to the stream, or the stream is not the stream.

    Not tested where a norm makes the output of a block: there the contributions sum to what goes
    into it, and the reference alone tells.
    """
    for prompt, i in itertools.product(SINGLE, range(bench.layers)):
        values = bench.prefill(prompt)
        parts = [
            values[key]
            for name in ("self_attn.attention_output", "linear_attn.attention_output")
            if (key := f"layers.{i}.{name}") in values
        ]
        parts.append(values[f"layers.{i}.mlp.mlp_output"])
        total = values[f"layers.{i}.layer_input"] + sum(parts)
        whole = values[f"layers.{i}.layer_output"]
        if bench.subject.recipe.reference.normed_output:
            assert worst_row(total, whole).error > bench.bound
            continue
        bench.check(total, whole, f"layers.{i}.layer_output", f"as a sum, of {prompt}")
        if f"layers.{i}.layer_mid" in values:
            mid = values[f"layers.{i}.layer_mid"]
            sum_to_mid = values[f"layers.{i}.layer_input"] + parts[0]
            bench.check(sum_to_mid, mid, f"layers.{i}.layer_mid", f"as a sum, of {prompt}")


@pytest.mark.checkpoints(sparse=True)
def test_mixture(bench: Bench) -> None:
    """The parts of a mixture do not add up to it, or the routing is not the one that was used."""
    sparse = 0
    for prompt, i in itertools.product(SINGLE, range(bench.layers)):
        values, at = bench.prefill(prompt), f"layers.{i}.mlp"
        if f"{at}.routed_output" not in values:
            continue
        sparse += 1
        routed = values[f"{at}.routed_output"]
        shared = values.get(f"{at}.shared_expert_output", torch.zeros_like(routed))
        what = f"as a sum, of {prompt}"
        bench.check(routed + shared, values[f"{at}.mlp_output"], f"{at}.mlp_output", what)
        if f"{at}.expert_outputs" in values:
            weights = values[f"{at}.expert_weights"].unsqueeze(-1)
            total = (weights * values[f"{at}.expert_outputs"]).sum(2)
            bench.check(total, routed, f"{at}.routed_output", what)
        indices = values[f"{at}.expert_indices"]
        assert (indices.diff(dim=-1) > 0).all(), f"{at}: a token has one expert twice"
        assert indices.max() < values[f"{at}.router_logits"].shape[-1]
    assert sparse, "no block of the checkpoint is a mixture"


def test_pattern(bench: Bench) -> None:
    """The pattern is not the one that the head outputs were made with, or sees what it must not."""
    window = bench.subject.recipe.window
    shortened: list[bool] = []
    for prompt, i in itertools.product(SINGLE, range(bench.layers)):
        values = bench.prefill(prompt)
        at = f"layers.{i}.self_attn"
        if bench.reasons()[f"{at}.attention_probabilities"] is not None:
            continue  # that it is refused is tested with the other values
        pattern = values[f"{at}.attention_probabilities"]
        scores = values[f"{at}.attention_scores"]
        head_values = values[f"{at}.attention_values"]
        count = pattern.shape[-1]
        groups = pattern.shape[1] // head_values.shape[1]
        outputs = (pattern @ head_values.repeat_interleave(groups, 1)).transpose(1, 2)
        bench.check(
            outputs,
            values[f"{at}.attention_head_outputs"],
            f"{at}.attention_head_outputs",
            f"as pattern times values, of {prompt}",
        )
        if bench.subject.recipe.reference.sinks:
            # A sink takes its share of every row; what is left is as without it.
            total = pattern.sum(-1, keepdim=True)
            assert (total < 1).all(), f"{at}: a sink takes nothing"
            pattern = pattern / total
        ones = torch.ones_like(pattern[..., 0])
        bench.check(pattern.sum(-1), ones, f"{at}.attention_probabilities", "summed over the keys")
        soft = torch.softmax(scores.float(), -1)
        bench.check(pattern, soft, f"{at}.attention_probabilities", "as a softmax of the scores")
        rows = torch.arange(count, device=pattern.device).unsqueeze(1)
        ahead = torch.arange(count, device=pattern.device) > rows
        assert not pattern[:, :, ahead].any(), f"{at} attends to what comes later"
        expected = bench.expected(f"{at}.attention_scores", prompt) == -torch.inf
        hidden = expected.to(pattern.device)
        assert not pattern[hidden].any(), f"{at} attends outside its window"
        assert torch.equal(scores == -torch.inf, hidden), f"{at}: other scores are masked"
        shortened.append(bool((hidden & ~ahead).any()))
    if shortened:
        assert any(shortened) == (window is not None and window < len(PROMPTS[LONG]))


def test_lens(bench: Bench) -> None:
    """The lens is not the model's own end: a norm, a scale, a softcap or a bias is missing."""
    model = bench.model
    last = bench.layers - 1
    for prompt in SINGLE:
        found, logits = _lens_of_all(model, PROMPTS[prompt], bench.layers)
        assert len(found) == bench.layers
        own = aligned(logits, found[last], "logits")
        bench.check(own, logits, "logits", f"of {prompt}, as the lens of the last block")
        expected = bench.expected("logits", prompt)
        assert found[last].shape == expected.shape
        bench.check(found[last], expected, "logits", f"of {prompt}, as the lens, all positions")
    found, _ = _lens_of_all(model, PROMPTS[SHORT], bench.layers)
    for i in range(last):
        expected = bench.references.edited[f"lens:{i}"].logits[0]
        bench.check(found[i], expected, "logits", f"as the lens of block {i}")
    stream = bench.prefill(SHORT)[f"layers.{last}.layer_output"]
    try:
        outside = model.project_on_vocab(stream)
    except OutsideTrace:
        return
    bench.check(outside, bench.expected("logits", SHORT), "logits", "as the lens outside a trace")


def _lens_of_all(model: Any, prompt: Sequence[int], layers: int) -> tuple[list[Tensor], Tensor]:
    with model.prefill(prompt):
        found = saved([])
        for i in range(layers):
            found.append(copied(model.project_on_vocab(model.layers[i].layer_output)))
        logits = model.logits.save()
    return list(found), logits


# -- methods ---------------------------------------------------------------------------------------


def _assert_method(bench: Bench, case: str, logits: Tensor) -> None:
    expected = bench.references.edited[case].logits[0]
    bench.check(logits, expected, "logits", f"after {case}")


def test_skip(bench: Bench) -> None:
    """A skipped block does not pass its input on, or what it was to be skipped with."""
    model, middle, count = bench.model, bench.middle, bench.layers
    other = bench.references.records[SHORT].get(f"layers.{count - 1}.layer_output")
    with model.prefill(PROMPTS[SHORT]):
        model.skip_layer(middle)
        one = model.logits.save()
    _assert_method(bench, "skip_layer", one)
    with model.prefill(PROMPTS[SHORT]):
        model.skip_layer(middle - count)
        negative = model.logits.save()
    assert torch.equal(one, negative)
    with model.prefill(PROMPTS[SHORT]):
        model.skip_layers(0, middle)
        several = model.logits.save()
    _assert_method(bench, "skip_layers", several)
    with model.prefill(PROMPTS[SHORT]):
        model.skip_layer(middle, skip_with=other)
        replaced = model.logits.save()
    _assert_method(bench, "skip_with", replaced)
    # What the inner blocks leave in the cache shows one step later.
    assert torch.equal(_step_after_skip(bench, True), _step_after_skip(bench, False))


def _step_after_skip(bench: Bench, by_hand: bool) -> Tensor:
    """The last logits of a generation in which the prompt skipped the first blocks."""
    model, middle = bench.model, bench.middle
    with model.decode(PROMPTS[SHORT], max_new_tokens=2) as tracer:
        found = saved([])
        for step in tracer.iter[0:2]:
            if step == 0 and by_hand:
                stream = copied(model.layers[0].layer_input)
                for i in range(middle + 1):
                    model.layers[i].layer_output = stream
            elif step == 0:
                model.skip_layers(0, middle)
            found.append(copied(model.logits[:, -1:]))
    return torch.cat(list(found), 1)


def test_steer(bench: Bench) -> None:
    """Steering adds something else, elsewhere, or nothing."""
    model, middle, count = bench.model, bench.middle, bench.layers
    vector = steering_vector(model.hidden_size)
    factor, positions = STEER_FACTOR, list(STEER_POSITIONS)
    with model.prefill(PROMPTS[SHORT]):
        model.steer(middle, vector, factor=factor)
        everywhere = model.logits.save()
    _assert_method(bench, "steer", everywhere)
    with model.prefill(PROMPTS[SHORT]):
        model.steer(middle, vector, factor=factor, positions=positions)
        somewhere = model.logits.save()
    _assert_method(bench, "steer_positions", somewhere)
    with model.prefill(PROMPTS[SHORT]):
        model.steer(list(range(count)), vector, factor=factor)
        several = model.logits.save()
    _assert_method(bench, "steer_layers", several)


def test_closest_tokens(bench: Bench) -> None:
    """The most likely tokens under the lens are others, or not in their order."""
    model, last = bench.model, bench.layers - 1
    with model.prefill(PROMPTS[SHORT]):
        found = saved(model.get_topk_closest_tokens(model.layers[0].layer_output, k=3))
        probs = model.next_token_probs.save()
    expected = (
        bench.references.edited["lens:0"].logits[0] if last else bench.expected("logits", SHORT)
    )
    assert len(found) == len(PROMPTS[SHORT])
    for row, logits in zip(found, expected[0], strict=True):
        _assert_tokens(bench, row, logits.softmax(-1))
    top = model.probs_to_dict(probs, k=4)
    assert len(top) == 4
    _assert_tokens(bench, top, bench.expected("next_token_probs", SHORT)[0])


def _assert_tokens(bench: Bench, found: dict[str, float], probs: Tensor) -> None:
    values, ids = probs.topk(len(found))
    tokenizer = bench.model.tokenizer
    decode = str if tokenizer is None else lambda token: tokenizer.decode([token])
    texts = [decode(token) for token in ids.tolist()]
    # Bytes that are no text of their own are told apart by their id.
    named = [
        f"{text}<{token}>" if text in texts[:i] else text
        for i, (text, token) in enumerate(zip(texts, ids.tolist(), strict=True))
    ]
    assert list(found) == named
    assert list(found.values()) == pytest.approx(values.tolist(), rel=1e-4)


def test_verify(bench: Bench) -> None:
    """The model's own check of itself fails where it should pass, or leaves something out."""
    errors = bench.model.verify()
    assert set(errors) == {f"layers.{i}" for i in range(bench.layers)} | {"project_on_vocab"}
    assert all(0 <= error <= 1e-4 for error in errors.values()), errors


def test_require(bench: Bench) -> None:
    """A list of values is accepted that the model does not serve, or refused though it does."""
    reasons = bench.reasons()
    served = [key for key, reason in reasons.items() if reason is None]
    bench.model.require(*served, "layers.*.layer_output")
    refused = {key: reason for key, reason in reasons.items() if reason is not None}
    if refused:
        with pytest.raises(Unavailable) as error:
            bench.model.require(*reasons)
        for key, reason in refused.items():
            assert key in str(error.value)
            assert reason in str(error.value)
    for name in ("layers.*.layer_outptu", "logist"):
        with pytest.raises(KeyError):
            bench.model.require(name)


# -- several prompts -------------------------------------------------------------------------------


def _read_together(
    model: Any, prompts: Sequence[Sequence[int]], keys: Sequence[str]
) -> list[dict[str, Any]]:
    with model.prefill() as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                found = saved({})
                for key in keys:
                    found[key] = copied(value_at(model, key))
    return [by_expert(values) for values in found]


def _decode_together(model: Any, prompts: Sequence[Sequence[int]], steps: int) -> list[Any]:
    with model.decode(max_new_tokens=steps) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = saved([])
                for _ in tracer.iter[0:steps]:
                    rows.append(copied(model.logits[:, -1:]))
    return [list(logits) for logits in rows]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_together(bench: Bench, order: tuple[int, ...]) -> None:
    """A prompt that runs beside others gets their rows, padding, or other values than alone."""
    prompts = [BATCH[i] for i in order]
    keys = bench.keys()
    together = _read_together(bench.model, [PROMPTS[prompt] for prompt in prompts], keys)
    assert len(together) == len(prompts)
    for prompt, found in zip(prompts, together, strict=True):
        alone = bench.prefill(prompt)
        assert list(found) == keys
        for key in keys:
            expected = _own(alone[key], found[key], key)
            bench.check(found[key], expected, key, f"of {prompt} beside others")


def _own(alone: Any, found: Any, key: str) -> Any:
    return _last(found, alone, key) if isinstance(found, Tensor) else alone


def test_end_token(bench: Bench) -> None:
    """A generation goes on after an end token of the checkpoint's generation config."""
    model = bench.model
    config = json.loads((build(bench.subject.recipe) / "generation_config.json").read_text())
    ends = config["eos_token_id"]
    end = ends[0] if isinstance(ends, list) else ends
    with warnings.catch_warnings():
        # An engine may tell that the loop was cut short.
        warnings.filterwarnings("ignore", ".*was never reached", UserWarning)
        with model.decode(PROMPTS[SHORT], max_new_tokens=3) as tracer:
            found = saved([])
            for step in tracer.iter[0:3]:
                if step == 1:
                    model.logits[:, -1, end] = 1e4
                found.append(copied(model.logits))
    assert len(found) == 2, f"{len(found)} steps, of which the second chose an end token"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)], ids=str)
def test_decode_together(bench: Bench, order: tuple[int, ...]) -> None:
    """A prompt decoded beside others goes on with other tokens than alone."""
    prompts = [BATCH[i] for i in order]
    together = _decode_together(bench.model, [PROMPTS[prompt] for prompt in prompts], STEPS + 1)
    assert len(together) == len(prompts)
    for prompt, rows in zip(prompts, together, strict=True):
        assert len(rows) == STEPS + 1
        tokens = [int(row.argmax()) for row in rows]
        assert tokens[:STEPS] == bench.references.records[prompt].tokens
        for step, row in enumerate(rows):
            expected = bench.expected("logits", prompt, step)[:, -1:]
            bench.check(row, expected, "logits", f"of {prompt} beside others, step {step}")


def _edit_first(model: Any, prompts: Sequence[Sequence[int]], layer: int, factor: float) -> Any:
    with model.prefill() as tracer:
        with tracer.invoke(prompts[0]):
            model.layers[layer].layer_output *= factor
            logits = model.logits.save()
        with tracer.invoke(prompts[1]):
            logits = model.logits.save()
    return logits


def test_edit_of_one_of_two(bench: Bench) -> None:
    """An edit of one prompt reached another one that ran beside it."""
    prompts = [PROMPTS[SHORT], PROMPTS["thirteen"]]
    kept = _edit_first(bench.model, prompts, bench.middle, 1.0)
    edited = _edit_first(bench.model, prompts, bench.middle, 0.0)
    assert not torch.equal(kept[0], edited[0])
    _assert_same(bench, edited[1], kept[1], "logits", "beside an edited prompt")
    bench.check(
        edited[1], bench.expected("logits", "thirteen"), "logits", "beside an edited prompt"
    )


def test_saved_in_several_invokes(bench: Bench) -> None:
    """A name saved in several invokes is no list, or not in the order of the invokes."""
    names = [LONG, "one", SHORT]
    prompts = [PROMPTS[name] for name in names]
    model = bench.model
    with model.prefill() as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                size = saved(model.input_size)
                stream = model.layers[0].layer_output.save()
    assert isinstance(size, list)
    assert isinstance(stream, list)
    assert [tuple(one) for one in size] == [(1, len(prompt)) for prompt in prompts]
    for name, value in zip(names, stream, strict=True):
        key = "layers.0.layer_output"
        bench.check(value, bench.prefill(name)[key], key, f"of {name} beside others")


# -- what is refused -------------------------------------------------------------------------------


def test_out_of_order(bench: Bench) -> None:
    """A value that the model has run past is given, waited for, or refused by another error."""
    model, last = bench.model, bench.layers - 1
    keys = [f"layers.{last}.layer_output", "layers.0.layer_output"]
    with pytest.raises(OutOfOrder):
        read(model, PROMPTS[SHORT], keys)
    _assert_usable(bench)


def test_late_edit(bench: Bench) -> None:
    """An edit in place of a value that the model has run past is lost without a word."""
    model, last = bench.model, bench.layers - 1
    with pytest.raises(OutOfOrder), model.prefill(PROMPTS[SHORT]):  # noqa: PT012, one block
        stream = model.layers[0].layer_output
        model.layers[last].layer_output.save()
        stream[:] = 0
        model.logits.save()
    _assert_usable(bench)


def test_wrong_dtype(bench: Bench) -> None:
    """A write of another dtype, or of no tensor, is taken, or is refused by another error."""
    model = bench.model
    size = (1, len(PROMPTS[SHORT]), model.hidden_size)
    for wrong in (torch.zeros(size, dtype=torch.float16), 0.0):
        with pytest.raises(TypeError), model.prefill(PROMPTS[SHORT]):
            model.layers[0].layer_output = wrong
    _assert_usable(bench)


def test_no_prompt(bench: Bench) -> None:
    """A prompt that is empty, or has an id that is not in the vocabulary, is run."""
    model = bench.model
    for prompt in ([], [5, model.vocab_size], [5, -1]):
        with pytest.raises(ValueError):  # noqa: PT011, the message is the engine's own
            model.encode(prompt)
        with pytest.raises(ValueError), model.prefill(prompt):  # noqa: PT011
            model.logits.save()
    _assert_usable(bench)


def test_wrong_shape(bench: Bench) -> None:
    """A write of another shape is taken, or ends more than the block that made it."""
    model = bench.model
    wrong = torch.zeros(1, 3, model.hidden_size)
    with pytest.raises(WrongShape), model.prefill(PROMPTS[SHORT]):
        model.layers[0].layer_output = wrong
    _assert_usable(bench)


def test_no_such_layer(bench: Bench) -> None:
    """A layer that is not there is given, or refused by another error."""
    model, count = bench.model, bench.layers
    for layer in (count, -count - 1):
        with pytest.raises(IndexError):
            model.layers[layer]
        with pytest.raises(IndexError), model.prefill(PROMPTS[SHORT]):
            model.layers[layer].layer_output.save()
    with pytest.raises(IndexError), model.prefill(PROMPTS[SHORT]):
        model.steer(count, steering_vector(model.hidden_size))
    _assert_usable(bench)


def _assert_usable(bench: Bench) -> None:
    logits = read(bench.model, PROMPTS[SHORT], ["logits"])["logits"]
    assert torch.equal(logits, bench.prefill(SHORT)["logits"])


# -- known faults ----------------------------------------------------------------------------------


def test_known_fault(bench: Bench, fault: Fault, unpatched: Any) -> None:
    """A fault of an engine does not show any more, or has another size or place: change its entry.

    ``unpatched`` is what plain transformers computes, without the patch that reproduces the fault.
    """
    errors: dict[str, float] = {}
    order = bench.keys()
    for prompt in SINGLE:
        for key, value in bench.prefill(prompt).items():
            if key == "input_size":
                continue
            name = key.rsplit(".", 1)[-1]
            plain = aligned(value, reference_value(unpatched, key, prompt), name)
            errors[key] = max(errors.get(key, 0.0), worst_row(value, plain).error)
    first = next((key for key in order if errors.get(key, 0.0) > bench.allowed(key)), None)
    assert first == fault.value, f"the first value that departs is {first}"
    assert fault.size / 2 <= errors[first] <= fault.size * 2, f"it is off by {errors[first]:.1e}"


def test_missing(missing: tuple[Subject, Missing]) -> None:
    """An engine can load a checkpoint that it could not, or refuses it for another reason."""
    subject, entry = missing
    with pytest.raises(Exception, match=entry.error):
        subject.adapter.load(build(subject.recipe))


def test_known_entries(suite: Any) -> None:
    """An entry of the known faults is of no checkpoint and engine that are tested, or its patch is
    none of the oracle's."""
    assert suite.known.unmatched(suite.subjects) == []
    assert suite.known.unpatched(PATCHES) == []


def test_subjects(suite: Any) -> None:
    """An engine is tested on no checkpoint, or a checkpoint of one's own on no engine."""
    tested = {one.adapter.label for one in suite.subjects}
    assert [one.label for one in suite.adapters if one.label not in tested] == []
    built = {one.recipe.name for one in suite.subjects}
    assert [one.name for one in suite.recipes if one.name not in {*built, *RECIPES}] == []
