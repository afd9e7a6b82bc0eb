"""One rule for how close is close, row by row: what it excuses and what it does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnterp.core.testing import assert_close, row_error, worst_row

INF = float("inf")


def test_equal_is_zero():
    value = torch.randn(2, 5, 7)
    assert row_error(value, value.clone()) == 0.0
    assert row_error(torch.zeros(3, 4), torch.zeros(3, 4)) == 0.0
    assert row_error(torch.tensor(2.0), torch.tensor(2.0)) == 0.0
    assert row_error(torch.empty(0, 4), torch.empty(0, 4)) == 0.0


def test_a_difference_is_relative_to_its_own_row():
    """An outlier position does not hide what is wrong in the others."""
    expected = torch.ones(3, 4)
    expected[0] *= 20000
    actual = expected.clone()
    actual[2, 1] += 0.01
    assert row_error(actual, expected) == pytest.approx(0.01, rel=1e-4)
    worst = worst_row(actual, expected)
    assert worst.index == (2,)
    assert worst.scale == 1.0
    assert worst.difference == pytest.approx(0.01, rel=1e-4)


def test_a_row_of_almost_nothing_is_held_to_the_median_row():
    expected = torch.ones(5, 4)
    expected[0] = 1e-9
    actual = expected.clone()
    actual[0] += 1e-6
    assert row_error(actual, expected) == pytest.approx(1e-6, rel=1e-2)


def test_minus_infinity_is_equal_to_itself_and_gives_no_scale():
    expected = torch.tensor([[1.0, -INF, -INF], [2.0, 1.0, -INF]])
    assert row_error(expected.clone(), expected) == 0.0
    actual = expected.clone()
    actual[1, 1] += 0.02
    assert row_error(actual, expected) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF, torch.finfo(torch.float32).min])
def test_what_no_scale_excuses(bad):
    expected = torch.ones(2, 3)
    actual = expected.clone()
    actual[1, 2] = bad
    assert row_error(actual, expected) > 1e6
    assert row_error(expected, actual) > 0.5
    with pytest.raises(AssertionError, match="the value"):
        assert_close(actual, expected, 1e-5, "the value")


def test_nan_on_both_sides_is_no_agreement():
    value = torch.tensor([[1.0, float("nan")]])
    assert row_error(value, value.clone()) == INF


def test_integers_are_equal_or_not():
    expected = torch.tensor([[1, 2, 3]])
    assert row_error(expected.int(), expected) == 0.0
    assert row_error(torch.tensor([[1, 2, 4]]), expected) == INF
    with pytest.raises(AssertionError, match="1 entries differ"):
        assert_close(torch.tensor([[1, 2, 4]]), expected, 1.0, "ids")


def test_shapes_and_kinds_have_to_agree():
    with pytest.raises(ValueError, match="shapes differ"):
        row_error(torch.ones(1, 3), torch.ones(3))
    with pytest.raises(ValueError, match="kinds differ"):
        row_error(torch.ones(3), torch.ones(3, dtype=torch.long))
    with pytest.raises(ValueError, match="the stream: shapes differ"):
        assert_close(torch.ones(1, 5, 4), torch.ones(5, 4), 1.0, "the stream")


def test_the_message_names_the_value_the_row_and_the_sizes():
    expected = torch.ones(2, 3, 4)
    actual = expected.clone()
    actual[1, 2, 3] = 1.5
    with pytest.raises(AssertionError) as raised:
        assert_close(actual, expected, 1e-5, "layers.1.layer_output")
    message = str(raised.value)
    assert message.startswith("layers.1.layer_output: row [1, 2] is off by 5.000e-01")
    assert "1.0e-05 is allowed" in message
    assert "(2, 3, 4)" in message


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-6, 1e6))
def test_the_scale_of_everything_does_not_matter(seed, factor):
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(4, 6, generator=generator)
    actual = expected + 1e-3 * torch.randn(4, 6, generator=generator)
    error = row_error(actual, expected)
    scaled = row_error(actual.double() * factor, expected.double() * factor)
    assert scaled == pytest.approx(error, rel=1e-6)
    assert error > 0
