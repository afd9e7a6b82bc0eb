"""Under one schedule a request beside an edited one is bit-equal to itself beside a plain one."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from nnterp.core import Preempted
from nnterp.vllm._runner import StandardRunner

P = [5, 17, 250, 9, 33]
LONG = list(range(30, 43))
STEPS = 4


@pytest.fixture(scope="module")
def model(only):
    return only("vllm", "llama")


def beside(model, what):
    """The values and tokens of a request beside one that does ``what``."""
    with model.decode(max_new_tokens=STEPS) as tracer:
        with tracer.invoke(P):
            for step in tracer.iter[0:STEPS]:
                stream = model.layers[0].layer_output
                if what == "assign":
                    model.layers[0].layer_output = stream * -3
                elif what == "in place":
                    model.layers[1].mlp.mlp_output[:] = 7
                elif what == "skip":
                    model.skip_layers(1, 1)
                elif what == "nan":
                    model.layers[1].layer_output[:] = float("nan")
                elif what == "keys" and step == 0:
                    model.layers[1].self_attn.attention_keys[:, :, 1] = 5
                elif what == "logits":
                    model.logits[:] = -model.logits
        with tracer.invoke(LONG):
            rows = [].save()
            for _ in tracer.iter[0:STEPS]:
                for layer in (0, 1, 2):
                    rows.append(model.layers[layer].layer_output)
                rows.append(model.logits)
        with tracer.invoke(P[::-1]):
            pass
    return rows


def raising(model, when):
    """The same beside one that fails on a step, by which time its rows are gone or not."""
    with pytest.raises(RuntimeError, match="here"):
        with model.decode(max_new_tokens=STEPS) as tracer:
            with tracer.invoke(P):
                for step in tracer.iter[0:STEPS]:
                    model.layers[0].layer_output.sum()
                    if step == when:
                        raise RuntimeError("here")
            with tracer.invoke(LONG):
                rows = [].save()
                for _ in tracer.iter[0:STEPS]:
                    for layer in (0, 1, 2):
                        rows.append(model.layers[layer].layer_output)
                    rows.append(model.logits)
            with tracer.invoke(P[::-1]):
                pass
    return rows


@pytest.mark.parametrize("what", ["assign", "in place", "skip", "nan", "keys", "logits"])
def test_beside_an_edit(model, what):
    expected = beside(model, "nothing")
    found = beside(model, what)
    assert len(found) == len(expected) == 4 * STEPS
    for row, plain in zip(found, expected, strict=True):
        assert torch.equal(row, plain)


def test_beside_one_that_fails_late(model):
    # Up to the failure the schedule is the same, and what came is kept.
    expected = beside(model, "nothing")
    found = raising(model, STEPS - 1)
    assert len(found) == len(expected)
    for row, plain in zip(found, expected, strict=True):
        assert torch.equal(row, plain)


def test_a_block_that_reads_leaves_the_logits(model):
    with model.prefill(LONG):
        read = model.logits.save()
        tokens = model.samples.save()  # noqa: F841
    with model.prefill(LONG):
        for layer in (0, 1, 2):
            model.layers[layer].layer_input.save()
            model.layers[layer].self_attn.attention_queries.save()
            model.layers[layer].self_attn.attention_output.save()
            model.layers[layer].mlp.mlp_output.save()
            model.layers[layer].layer_output.save()
        everything = model.logits.save()
    assert torch.equal(read, everything)


def after_nans(model):
    """Whether a request is still what it was, with blocks of the cache that held NaN."""

    def plain():
        with model.decode(P, max_new_tokens=6) as tracer:
            rows = [].save()
            for _ in tracer.iter[0:6]:
                rows.append(model.logits)
        return torch.cat(rows)

    before, found = plain(), []
    for _ in range(4):
        with model.decode([7] * 60, max_new_tokens=6):
            model.layers[0].layer_output[:] = float("nan")
            nan = model.logits.isnan().all().save()
        assert nan
        found.append(torch.equal(plain(), before))
    return found


@pytest.fixture
def small(only):
    return only("vllm", "llama", num_gpu_blocks_override=7, block_size=32)


def test_what_a_nan_leaves_in_the_cache_is_nobody_elses(small):
    """A kernel multiplies the unused rows of a block by zero, and NaN stays NaN."""
    assert after_nans(small) == [True] * 4


def test_a_preempted_request_whose_block_is_over_is_an_error(small):
    """Nothing of the block runs any more when the engine computes its prompt anew."""
    model = small
    prompts = [[(i * 7 + j * 13) % 290 + 3 for i in range(10)] for j in range(4)]

    def run(edited):
        with model.decode(max_new_tokens=60) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    if edited:
                        model.layers[1].layer_output[:] *= 0.5
                    result = tracer.result.save() if not edited else [].save()
        return [list(one.outputs[0].token_ids) for one in result] if not edited else result

    alone = []
    for prompt in prompts:
        with model.decode(prompt, max_new_tokens=60) as tracer:
            one = tracer.result.save()
        alone.append(list(one.outputs[0].token_ids))
    assert run(False) == alone
    with pytest.raises(Preempted):
        run(True)
    assert run(False) == alone


def test_uncleared_blocks_are_seen(small):
    # The last here, since it leaves its cache as it does.
    with mock.patch.object(StandardRunner, "_clear_cache", return_value=None):
        assert False in after_nans(small)
