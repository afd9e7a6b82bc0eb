"""Values that were lost, or came back as something else, around loops and invokes."""

from __future__ import annotations

import warnings
from collections import namedtuple

import nnsight
import pytest
import torch

from nnterp.core import OutOfOrder
from nnterp.core.testing import assert_close

P = [5, 17, 250, 9, 33]
LONG = list(range(30, 43))
EOS = 1
BOUND = 1e-5

Pair = namedtuple("Pair", "first second")


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine(request):
    return request.param


@pytest.fixture
def model(engine, only):
    return only(engine, "llama")


@pytest.fixture(scope="module")
def record(reference):
    return reference("llama").run(P, steps=4)


# -- loops ------------------------------------------------------------------------------


def test_a_generation_that_ends_early_keeps_the_rows_of_the_steps_it_made(model, record):
    """The end of the text is forced at the third step; the loop asked for eight."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the loop asked for a step the run did not make")
        with model.decode(P, max_new_tokens=8) as tracer:
            rows = [].save()
            for step in tracer.iter[0:8]:
                rows.append(model.layers[1].layer_output)
                if step == 2:
                    model.logits[..., EOS] = 1e6
    assert len(rows) == 3
    for step, row in enumerate(rows):
        assert_close(row, record.get("layers.1.layer_output", step), BOUND, f"step {step}")


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:.*the loop asked for a step the run did not make")
def test_what_has_ended_is_at_an_end_beside_what_goes_on(model, place):
    """transformers pads it and computes on; what it computes is of no prompt's."""
    others = [list(range(30, 43)), [8, 77, 120]]
    prompts = [*others[:place], P, *others[place:]]

    def decode(*prompts):
        with model.decode(max_new_tokens=4) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    steps = [].save()
                    for step in tracer.iter[0:4]:
                        taken = model.input_ids[0, -1].item()
                        if prompt is P and step == 1:
                            model.logits[:, -1, EOS] = 1e6
                        steps.append((taken, model.logits[0, -1].argmax().item()))
        return steps

    together = decode(*prompts)
    assert [len(steps) for steps in together] == [2 if one is P else 4 for one in prompts]
    assert together == [decode(prompt) for prompt in prompts]


def test_an_open_loop_keeps_what_it_saved(model, record):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the loop asked for a step the run did not make")
        with model.decode(P, max_new_tokens=3) as tracer:
            rows = [].save()
            for _ in tracer.iter[:]:
                rows.append(model.layers[1].layer_output)
    assert len(rows) == 3
    for step, row in enumerate(rows):
        assert_close(row, record.get("layers.1.layer_output", step), BOUND, f"step {step}")


def test_what_comes_after_an_open_loop_does_not_run_and_a_warning_says_so(model):
    after = None
    with pytest.warns(UserWarning, match="statements after it did not run"):
        with model.decode(P, max_new_tokens=2) as tracer:
            rows = [].save()
            for _ in tracer.iter[:]:
                rows.append(model.logits)
            after = [1].save()
    assert len(rows) == 2
    assert after is None


def test_what_comes_after_a_bounded_loop_runs(model):
    with model.decode(P, max_new_tokens=3) as tracer:
        rows = [].save()
        for _ in tracer.iter[0:3]:
            rows.append(model.logits[0, -1].argmax().item())
        after = [len(rows)].save()
    assert after == [3]


def test_some_of_the_steps(model, record):
    with model.decode(P, max_new_tokens=5) as tracer:
        rows = [].save()
        for _ in tracer.iter[[1, 3]]:
            rows.append(model.layers[1].layer_output)
        for _ in tracer.iter[4]:
            rows.append(model.layers[1].layer_output)
    for step, row in zip((1, 3, 4), rows, strict=True):
        assert_close(row, record.get("layers.1.layer_output", step), BOUND, f"step {step}")


def test_several_values_of_each_step_are_of_that_step(model, record):
    names = ("layer_input", "layer_output")
    with model.decode(P, max_new_tokens=4) as tracer:
        rows = [].save()
        for _ in tracer.iter[1:4]:
            rows.append([getattr(model.layers[i], name) for i in (0, 1, 2) for name in names])
    for step, row in enumerate(rows, 1):
        keys = [f"layers.{i}.{name}" for i in (0, 1, 2) for name in names]
        for key, value in zip(keys, row, strict=True):
            assert_close(value, record.get(key, step), BOUND, f"{key} of step {step}")


def test_values_in_the_wrong_order_are_not_shifted_to_the_next_step(model):
    """A list that is one step behind, and no error, is what this was reported as."""
    with pytest.raises(OutOfOrder, match=r"layers\.0\.layer_output"):
        with model.decode(P, max_new_tokens=4) as tracer:
            rows = [].save()
            for _ in tracer.iter[1:4]:
                _ = model.layers[1].layer_output
                rows.append(model.layers[0].layer_output)


def test_a_native_read_first_in_a_step_does_not_confuse_the_standard_ones(model, record):
    with model.decode(P, max_new_tokens=3) as tracer:
        rows = [].save()
        for _ in tracer.iter[0:3]:
            _ = model.layers[0].mlp.output
            rows.append((model.layers[1].layer_output, model.layers[2].layer_output))
    for step, (one, two) in enumerate(rows):
        assert_close(one, record.get("layers.1.layer_output", step), BOUND, f"step {step}")
        assert_close(two, record.get("layers.2.layer_output", step), BOUND, f"step {step}")


def test_greedy_tokens_are_those_of_the_raw_logits(engine, model, record):
    with model.decode(P, max_new_tokens=4) as tracer:
        chosen = [].save()
        for _ in tracer.iter[0:4]:
            chosen.append(model.logits[0, -1].argmax().item())
        result = tracer.result.save()
    assert chosen == record.tokens
    made = result[0, 5:].tolist() if engine == "hf" else list(result.outputs[0].token_ids)
    assert made == record.tokens


# -- invokes ------------------------------------------------------------------------------


def test_a_name_saved_in_two_invokes_is_a_list_in_their_order(model, reference):
    with model.prefill() as tracer:
        with tracer.invoke(LONG):
            logits = model.logits[:, -1].save()
        with tracer.invoke(P):
            logits = model.logits[:, -1].save()
    assert isinstance(logits, list)
    assert len(logits) == 2
    for found, ids in zip(logits, (LONG, P), strict=True):
        expected = reference("llama").run(ids).get("logits")[:, -1]
        assert_close(found, expected, BOUND, f"{len(ids)} tokens")


def test_a_name_saved_in_one_of_two_invokes_is_the_value(model, record):
    with model.prefill() as tracer:
        with tracer.invoke(LONG):
            _ = model.logits
        with tracer.invoke(P):
            logits = model.logits[:, -1].save()
    assert_close(logits, record.get("logits")[:, -1], BOUND, "logits")


def test_a_name_saved_in_one_invoke_alone_is_the_value(model, record):
    with model.prefill() as tracer:
        with tracer.invoke(P):
            logits = model.logits[:, -1].save()
    assert_close(logits, record.get("logits")[:, -1], BOUND, "logits")


def test_names_of_two_invokes_keep_apart(model, reference):
    with model.prefill() as tracer:
        with tracer.invoke(P):
            first = model.logits[:, -1].save()
        with tracer.invoke(LONG):
            second = model.logits[:, -1].save()
    for found, ids in ((first, P), (second, LONG)):
        expected = reference("llama").run(ids).get("logits")[:, -1]
        assert_close(found, expected, BOUND, f"{len(ids)} tokens")


def test_one_list_for_all_invokes_holds_what_each_put_in(model, reference):
    with model.prefill() as tracer:
        rows = [].save()
        for ids in (P, LONG):
            with tracer.invoke(ids):
                rows.append(model.logits[:, -1])
    assert len(rows) == 2
    for found, ids in zip(rows, (P, LONG), strict=True):
        expected = reference("llama").run(ids).get("logits")[:, -1]
        assert_close(found, expected, BOUND, f"{len(ids)} tokens")


def test_loops_in_several_invokes(model, reference):
    with model.decode(max_new_tokens=3) as tracer:
        for ids in (P, LONG):
            with tracer.invoke(ids):
                rows = [].save()
                for _ in tracer.iter[0:3]:
                    rows.append(model.layers[1].layer_output)
    for found, ids in zip(rows, (P, LONG), strict=True):
        expected = reference("llama").run(ids, steps=2)
        for step, row in enumerate(found):
            assert_close(row, expected.get("layers.1.layer_output", step), BOUND, f"step {step}")


# -- saving ----------------------------------------------------------------------------------


def test_a_value_saved_and_then_edited_is_what_it_was(model, record):
    with model.prefill(P):
        before = model.layers[1].layer_output.save()
        model.layers[1].layer_output[:] = 0
        same = model.layers[1].layer_output
        after = same.save()
    assert_close(before, record.get("layers.1.layer_output"), BOUND, "before")
    assert not after.any()


def test_logits_alone_and_in_containers_come_home_as_plain_tensors(model, record):
    with model.prefill(P):
        logits = model.logits
        alone = logits.save()
        in_list = [logits, [model.next_token_probs]].save()
        in_tuple = nnsight.save((logits, 3))
        in_dict = nnsight.save({"logits": logits, "deep": {"probs": in_list[1][0]}})
        in_named = nnsight.save(Pair(logits, "text"))
    tensors = [alone, in_list[0], in_list[1][0], in_tuple[0], in_dict["logits"], in_named.first]
    tensors.append(in_dict["deep"]["probs"])
    assert [type(tensor) for tensor in tensors] == [torch.Tensor] * 7
    assert type(in_named) is Pair
    assert in_named.second == "text"
    assert in_tuple[1] == 3
    for tensor in (alone, in_list[0], in_tuple[0], in_dict["logits"], in_named.first):
        assert_close(tensor[:, -1], record.get("logits")[:, -1], BOUND, "logits")


def test_what_is_computed_from_values_is_plain(model):
    with model.prefill(P):
        stream = model.layers[1].layer_output
        norm = stream.norm().save()
        mean = (stream * 2).mean(-1).save()
        number = nnsight.save([stream.sum().item()])
        array = nnsight.save([stream.detach().cpu().numpy()])
    assert type(norm) is type(mean) is torch.Tensor
    assert isinstance(number[0], float)
    assert array[0].shape == (1, 5, 96)


def test_an_unsaved_value_does_not_leave_the_block(model):
    with model.prefill(P):
        kept_inside = model.layers[1].layer_output
        _ = kept_inside.sum()
    with pytest.raises(NameError):
        _ = kept_inside.shape


def test_a_stop_keeps_what_was_saved_and_the_model_goes_on(model, record):
    with model.prefill(P) as tracer:
        stream = model.layers[0].layer_output.save()
        tracer.stop()
    assert_close(stream, record.get("layers.0.layer_output"), BOUND, "before the stop")
    with model.prefill(P):
        logits = model.logits[:, -1].save()
    assert_close(logits, record.get("logits")[:, -1], BOUND, "the next trace")
