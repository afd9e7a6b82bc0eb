"""Lenses hold the laws of lenses: what is put is what is got, what is got can be put back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nnterp.core.tracing import (
    KEEP,
    Argument,
    Batched,
    Derived,
    Field,
    First,
    Halves,
    Heads,
    InPlace,
    Item,
    Lens,
    Scaled,
    Summed,
)


class Module(nn.Module):
    def forward(self, positions, hidden_states, residual=None, *, scale=1.0):
        return hidden_states


HOST = SimpleNamespace(_module=Module(), heads=4)


class Output(dict):
    """A mapping that is built from its fields, as transformers' outputs are."""


def tensors(*shape):
    return st.builds(
        lambda seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)),
        st.integers(0, 2**31),
    )


HIDDEN = tensors(5, 8)
FACTOR = st.sampled_from([0.25, 3.0, 0.1, -7.0, 1e-3, 12.0])


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a is b or a == b


def copied(raw):
    if isinstance(raw, torch.Tensor):
        return raw.clone()
    if isinstance(raw, (tuple, list)):
        return type(raw)(map(copied, raw))
    if isinstance(raw, dict):
        return type(raw)({key: copied(value) for key, value in raw.items()})
    return raw


def calls(*, names=()):
    """Arguments of a call, some of them by name."""
    return st.builds(
        lambda p, h, r, scale: (
            (p, *(v for n, v in (("hidden_states", h), ("residual", r)) if n not in names)),
            {
                **{n: v for n, v in (("hidden_states", h), ("residual", r)) if n in names},
                "scale": scale,
            },
        ),
        tensors(5),
        HIDDEN,
        HIDDEN,
        st.floats(0.5, 2),
    )


EXACT = {
    "whole": (Lens(), HIDDEN),
    "first of a tuple": (First(), st.tuples(HIDDEN, HIDDEN, st.none())),
    "first of a list": (First(), st.lists(HIDDEN, min_size=1, max_size=3)),
    "first of itself": (First(), HIDDEN),
    "field": (Field("logits"), st.builds(lambda a, b: Output(logits=a, loss=b), HIDDEN, HIDDEN)),
    "item": (Item(1), st.tuples(HIDDEN, HIDDEN, HIDDEN)),
    "argument by position": (Argument(1), calls()),
    "argument by its name": (Argument("hidden_states"), calls()),
    "argument given by name": (Argument("hidden_states"), calls(names=("hidden_states",))),
    "second argument given by name": (Argument("residual"), calls(names=("residual",))),
    "batched": (Batched(), HIDDEN),
    "heads": (Heads(lambda host: host.heads), HIDDEN),
    "heads inside": (Heads(lambda host: host.heads, inside=True), HIDDEN),
    "heads of an argument": (Argument(1) | Heads(lambda host: host.heads), calls()),
    "batched first of a tuple": (First() | Batched(), st.tuples(HIDDEN, HIDDEN)),
    "three of them": (Item(0) | Argument("residual") | Batched(), st.tuples(calls(), HIDDEN)),
}


@pytest.mark.parametrize(("lens", "raws"), EXACT.values(), ids=EXACT)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_laws(lens, raws, data):
    raw = data.draw(raws)
    before = copied(raw)
    value = lens.get(raw, HOST)
    one, other = torch.randn_like(value), torch.randn_like(value)
    # What was put is what is got.
    put = lens.put(raw, one, HOST)
    assert torch.equal(lens.get(put, HOST), one)
    # What was got, put back, changes nothing.
    assert same(lens.put(raw, value, HOST), before)
    # The last put counts.
    assert same(lens.put(put, other, HOST), lens.put(raw, other, HOST))
    # Nothing of it touches the raw object.
    assert same(raw, before)


@settings(max_examples=50, deadline=None)
@given(HIDDEN, HIDDEN, HIDDEN, st.booleans())
def test_halves_are_a_sum_that_a_write_puts_into_the_first(hidden, residual, new, whole):
    lens = Halves(Item(0), Item(1))
    raw = (hidden, None if whole else residual)
    before = copied(raw)
    assert torch.equal(lens.get(raw, HOST), hidden if whole else hidden + residual)
    put = lens.put(raw, new, HOST)
    assert torch.equal(lens.get(put, HOST), new)
    assert torch.equal(put[0], new)
    assert put[1] is None if whole else not put[1].any()
    # What was got, put back, is the same stream.
    again = lens.put(raw, lens.get(raw, HOST), HOST)
    assert torch.equal(lens.get(again, HOST), lens.get(raw, HOST))
    assert same(raw, before)


@settings(max_examples=50, deadline=None)
@given(HIDDEN, HIDDEN, FACTOR, st.integers(0, 4))
def test_a_factor_leaves_what_a_write_leaves_equal_bit_equal(raw, new, factor, row):
    lens = Scaled(lambda host: factor)
    assert torch.equal(lens.get(raw, HOST), raw * factor)
    assert torch.equal(lens.put(raw, lens.get(raw, HOST), HOST), raw)
    assert torch.allclose(lens.get(lens.put(raw, new, HOST), HOST), new, rtol=1e-6, atol=1e-9)
    edited = lens.get(raw, HOST).clone()
    edited[row] = new[row]
    put = lens.put(raw, edited, HOST)
    others = [i for i in range(5) if i != row]
    assert torch.equal(put[others], raw[others])


@settings(max_examples=50, deadline=None)
@given(HIDDEN, tensors(8), HIDDEN, st.integers(0, 4), st.booleans())
def test_a_bias_that_the_caller_adds(output, bias, new, row, without):
    lens = Summed()
    raw = (output, None if without else bias)
    whole = output if without else output + bias
    assert torch.equal(lens.get(raw, HOST), whole)
    assert same(lens.put(raw, whole, HOST), raw)
    assert torch.allclose(lens.get(lens.put(raw, new, HOST), HOST), new, rtol=1e-5, atol=1e-6)
    edited = whole.clone()
    edited[row] = new[row]
    put = lens.put(raw, edited, HOST)
    others = [i for i in range(5) if i != row]
    assert torch.equal(put[0][others], output[others])
    assert same(put[1], raw[1])


@given(HIDDEN, HIDDEN)
@settings(max_examples=20, deadline=None)
def test_in_place_fills_what_the_model_holds_and_hands_nothing_back(raw, new):
    lens = InPlace()
    held = raw
    assert lens.get(raw, HOST) is held
    assert lens.put(raw, new, HOST) is KEEP
    assert torch.equal(held, new)


@given(HIDDEN, HIDDEN)
@settings(max_examples=20, deadline=None)
def test_what_is_kept_inside_is_kept_outside(raw, new):
    lens = Item(0) | Batched() | InPlace()
    pair = (raw.clone(), new)
    assert lens.put(pair, new.unsqueeze(0), HOST) is KEEP
    assert torch.equal(pair[0], new)


def test_a_factor_carries_the_gradient_of_what_is_written():
    raw = torch.randn(5, 8)
    new = (raw * 3).clone()
    new[0] += 1
    new.requires_grad_()
    Scaled(lambda host: 3.0).put(raw, new, HOST).sum().backward()
    assert torch.allclose(new.grad, torch.full_like(new, 1 / 3))


def test_a_derived_value_is_computed_and_says_what_to_write_instead():
    lens = Derived(lambda raw, host: raw.sum(-1), "write the parts")
    raw = torch.ones(5, 8)
    assert torch.equal(lens.get(raw, HOST), torch.full((5,), 8.0))
    assert lens.instead == "write the parts"


def test_an_argument_that_the_call_has_not():
    with pytest.raises((ValueError, LookupError)):
        Argument("no_such_argument").get(((torch.ones(5),), {}), HOST)
