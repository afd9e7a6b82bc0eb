"""The rules of layouts and shapes, for whatever tensors there are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nnsight.modeling.vllm.batching import VLLMBatcher

from nnterp.core import VOCABULARY, WrongShape
from nnterp.core.tracing import KEEP, Argument, Batched, First, Lens
from nnterp.core.tracing._lenses import Halves, Heads, Item, Scaled, Summed
from nnterp.vllm._runner import TokenBatcher

HOST = SimpleNamespace(count=2)
P = [5, 17, 250, 9, 33]

sizes = st.integers(1, 7)


def tensors(*shape):
    seeds = st.integers(0, 2**31)
    return seeds.map(lambda seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


@st.composite
def laid_out(draw):
    """A lens, and a raw object that it is for."""
    rows, width = draw(sizes), 2 * draw(sizes)
    a, b = draw(tensors(rows, width)), draw(tensors(rows, width))
    lens, raw = draw(
        st.sampled_from(
            [
                (Lens(), a),
                (Batched(), a),
                (First(), a),
                (First(), (a, b)),
                (First() | Batched(), (a, b)),
                (Item(1), (b, a)),
                (Argument(0), ((a, b), {})),
                (Argument("hidden"), ((b,), {"hidden": a})),
                (Argument(1) | Batched(), ((b, a), {})),
                (Halves(Item(0), Item(1)), (a, b)),
                (Halves(Item(0), Item(1)) | Batched(), (a, b)),
                (Halves(Argument(0), Argument(1)), ((a, b), {})),
                (Halves(Item(0), Item(1)), (a, None)),
                (Heads(lambda host: host.count), a),
                (Heads(lambda host: host.count, inside=True), a),
                (Scaled(lambda host: 0.25), a),
                (Summed(), (a, b)),
                (Summed(), (a, None)),
            ]
        )
    )
    return lens, raw


def copied(raw):
    if isinstance(raw, torch.Tensor):
        return raw.clone()
    if isinstance(raw, dict):
        return {name: copied(value) for name, value in raw.items()}
    return type(raw)(map(copied, raw)) if isinstance(raw, tuple) else raw


def same(one, other, exactly=True):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) if exactly else torch.allclose(one, other, atol=1e-6)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k], exactly) for k in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other, [exactly] * len(one)))
    return one is other


@given(laid_out(), st.integers(0, 2**31))
def test_what_was_put_is_found_and_the_rest_is_as_it_was(case, seed):
    lens, raw = case
    before = copied(raw)
    value = lens.get(raw, HOST)
    new = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
    put = lens.put(raw, new, HOST)
    assert put is not KEEP
    assert same(lens.get(put, HOST), new, exactly=False)
    assert same(raw, before), "a write makes a new object"


@given(laid_out())
def test_a_value_put_back_changes_nothing(case):
    lens, raw = case
    value = lens.get(raw, HOST).clone()
    assert same(lens.get(lens.put(raw, value, HOST), HOST), value)


@given(st.lists(sizes, min_size=1, max_size=5), st.integers(0, 4), st.data())
def test_a_write_reaches_its_own_rows_alone(spans, which, data):
    which %= len(spans)
    total, start, size = sum(spans), sum(spans[:which]), spans[which]
    whole = data.draw(tensors(total, 6))
    batcher = TokenBatcher(SimpleNamespace(mediators=[]))
    assert isinstance(batcher, VLLMBatcher)
    batcher.total = total
    group = [start, size]
    own = batcher.narrow((whole, whole * 2), group)
    assert torch.equal(own[0], whole[start : start + size])
    edited = tuple(part + 1 for part in own)
    found = batcher.widen((whole, whole * 2), group, edited)
    for part, before in zip(found, (whole, whole * 2), strict=True):
        assert torch.equal(part[start : start + size], before[start : start + size] + 1)
        assert torch.equal(part[:start], before[:start])
        assert torch.equal(part[start + size :], before[start + size :])
    assert batcher.widen(whole, group, KEEP) is whole


@given(st.lists(sizes, min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 12))
def test_a_write_of_other_rows_or_columns_is_refused(spans, rows, columns):
    total, size = sum(spans), spans[0]
    batcher = TokenBatcher(SimpleNamespace(mediators=[]))
    batcher.total = total
    whole, new = torch.zeros(total, 6), torch.zeros(rows, columns)
    if (rows, columns) == (size, 6):
        assert batcher.widen(whole, [0, size], new).shape == whole.shape
        return
    with pytest.raises((WrongShape, RuntimeError)):
        batcher.widen(whole, [0, size], new)


WRITABLE = [
    "token_embeddings",
    "layers.1.layer_input",
    "layers.1.self_attn.attention_queries",
    "layers.1.self_attn.attention_values",
    "layers.1.self_attn.attention_head_outputs",
    "layers.1.mlp.mlp_neurons",
    "layers.2.layer_output",
]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    key=st.sampled_from(WRITABLE),
    change=st.lists(st.integers(-2, 2), min_size=4, max_size=4),
    dims=st.integers(-1, 1),
)
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_write_keeps_its_shape_on_both_engines(only, engine, key, change, dims):
    from nnterp.core.reading import host_of

    options = {"dispatch": True} if engine == "hf" else {}
    model = only(engine, "llama", **options)
    axes = len(VOCABULARY[key.rsplit(".", 1)[-1]].layout.axes)

    def write():
        with model.prefill(P):
            host, name = host_of(model, key)
            old = getattr(host, name)
            shape = [max(1, size + by) for size, by in zip(old.shape, change[:axes], strict=True)]
            shape = shape[1:] if dims < 0 else [1, *shape] if dims > 0 else shape
            right = tuple(shape) == tuple(old.shape)
            told = [right].save()
            setattr(host, name, torch.zeros(shape))
        return told[0]

    try:
        sound = write()
    except WrongShape:
        sound = bool(any(change[:axes]) or dims)
    assert sound, "refused if, and only if, the shape is another"
