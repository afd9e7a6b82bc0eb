"""Scores and pattern, recomputed from queries and keys, against a loop that is plainly right."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnterp.core.tracing import pattern, scores


def by_loop(queries, keys, *, scale, softcap=None, window=None, chunk=None, slopes=None):
    batch, heads, query, _ = queries.shape
    kv_heads, key = keys.shape[1:3]
    found = torch.full((batch, heads, query, key), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(query):
                row = key - query + i  # the last query is the last key's token
                for j in range(key):
                    if j > row:
                        continue
                    if window is not None and row - j >= window:
                        continue
                    if chunk is not None and row // chunk != j // chunk:
                        continue
                    q, k = queries[b, h, i].double(), keys[b, h * kv_heads // heads, j].double()
                    score = float(q @ k) * scale
                    if softcap is not None:
                        score = math.tanh(score / softcap) * softcap
                    if slopes is not None:
                        score += slopes[h] * j
                    found[b, h, i, j] = score
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 3), (4, 1)]),
    query=st.integers(1, 7),
    past=st.integers(0, 5),
    batch=st.integers(1, 2),
    softcap=st.sampled_from([None, 0.5, 5.0]),
    window=st.sampled_from([None, 1, 3, 20]),
    chunk=st.sampled_from([None, 2, 4]),
    alibi=st.booleans(),
)
def test_scores_are_the_loops(seed, groups, query, past, batch, softcap, window, chunk, alibi):
    heads, kv_heads = groups
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, heads, query, 8, generator=generator)
    keys = torch.randn(batch, kv_heads, query + past, 8, generator=generator)
    options = {
        "scale": 0.3,
        "softcap": softcap,
        "window": window,
        "chunk": chunk,
        "slopes": [0.5 ** (h + 1) for h in range(heads)] if alibi else None,
    }
    found, expected = scores(queries, keys, **options), by_loop(queries, keys, **options)
    assert found.shape == expected.shape
    assert torch.equal(found.isinf(), expected.isinf())
    finite = ~expected.isinf()
    assert torch.allclose(found[finite].double(), expected[finite], rtol=1e-5, atol=1e-6)
    rows = pattern(found)
    assert torch.allclose(rows.sum(-1), torch.ones(rows.shape[:-1]), atol=1e-5)
    assert not rows[expected.isinf()].any()
    assert torch.allclose(rows.double(), expected.softmax(-1), atol=1e-6)


def test_queries_and_keys_are_left_as_they_are():
    queries, keys = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    kept = queries.clone(), keys.clone()
    scores(queries, keys, scale=2.0, softcap=1.0, window=2)
    assert torch.equal(queries, kept[0])
    assert torch.equal(keys, kept[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_pattern_is_in_the_scores_own_dtype(dtype):
    found = pattern(torch.randn(1, 2, 3, 3, dtype=dtype))
    assert found.dtype == dtype
    assert torch.allclose(found.float().sum(-1), torch.ones(1, 2, 3), atol=1e-2)


def test_a_sink_takes_its_share_of_the_row():
    """Rows sum to less than one, and are what a softmax with one more score gives."""
    found = torch.randn(2, 3, 4, 5)
    sinks = torch.tensor([0.5, -1.0, 3.0])
    rows = pattern(found, sinks)
    beside = sinks.view(1, 3, 1, 1).expand(2, 3, 4, 1)
    expected = torch.cat([found, beside], -1).softmax(-1)[..., :-1]
    assert torch.allclose(rows, expected, atol=1e-6)
    assert (rows.sum(-1) < 1).all()


def test_gradients_pass():
    queries = torch.randn(1, 2, 3, 4, requires_grad=True)
    keys = torch.randn(1, 2, 3, 4, requires_grad=True)
    pattern(scores(queries, keys, scale=0.5, window=2))[..., 0].sum().backward()
    assert queries.grad.isfinite().all()
    assert keys.grad.isfinite().all()
