"""Edits that silently did nothing, or reached somebody else: each a report of this field."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nnterp.core import VOCABULARY, Unavailable, WrongShape
from nnterp.core.testing import Edit, assert_close

P = [5, 17, 250, 9, 33]
OTHER = [8, 77, 120, 3, 291]
LONG = list(range(30, 43))
BOUND = 1e-5

ORDER = (
    "input_ids",
    "token_embeddings",
    "layers.1.layer_input",
    "layers.1.self_attn.attention_queries",
    "layers.1.self_attn.attention_keys",
    "layers.1.self_attn.attention_values",
    "layers.1.self_attn.attention_scores",
    "layers.1.self_attn.attention_probabilities",
    "layers.1.self_attn.attention_head_outputs",
    "layers.1.self_attn.attention_output",
    "layers.1.layer_mid",
    "layers.1.mlp.mlp_neurons",
    "layers.1.mlp.mlp_output",
    "layers.1.layer_output",
    "final_norm_output",
    "lm_head_output",
    "logits",
    "next_token_probs",
)


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine(request):
    return request.param


@pytest.fixture
def model(engine, only):
    options = {"attn_implementation": "eager"} if engine == "hf" else {}
    return only(engine, "llama", **options)


@pytest.fixture(scope="module")
def oracle(reference):
    return reference("llama")


def last_logits(model, ids):
    with model.prefill(ids):
        logits = model.logits[:, -1].save()
    return logits


def where(model, key):
    """The object that a value is on, and its name."""
    path, _, name = key.rpartition(".")
    host = model
    for part in filter(None, path.split(".")):
        host = host[int(part)] if part.isdigit() else getattr(host, part)
    return host, name


# -- every write ----------------------------------------------------------------------


@pytest.mark.parametrize("key", ORDER)
def test_a_write_changes_the_logits_or_is_refused(engine, model, key):
    plain = last_logits(model, P)
    host, name = where(model, key)
    refused = type(host).__dict__.get(name) or getattr(type(host), name)
    reason = refused.read_only(host)
    if model.support(1).get(key.removeprefix("layers.1."), model.support().get(key)) is not None:
        with pytest.raises(Unavailable), model.prefill(P):
            on, value = where(model, key)
            setattr(on, value, torch.zeros(1))
        return
    if reason is not None:
        with pytest.raises(Unavailable, match="is read-only"), model.prefill(P):
            on, value = where(model, key)
            setattr(on, value, getattr(on, value))
        return
    assert VOCABULARY[name].writable
    for in_place in (False, True):
        with model.prefill(P):
            on, value = where(model, key)
            old = getattr(on, value)
            # A constant on scores or on a norm's input would change nothing.
            new = old + 1 if old.dtype == torch.int64 or old.dtype == torch.int32 else old * 0.5
            if in_place:
                old[:] = new
            else:
                setattr(on, value, new)
            logits = model.logits[:, -1].save()
        assert not torch.equal(logits, plain), f"{key} in place: {in_place}"


def test_an_edit_in_place_and_an_assignment_do_the_same(model, oracle):
    expected = oracle.edited(P, [Edit("layers.1.layer_output", lambda x: x * 2)]).get("logits")
    with model.prefill(P):
        model.layers[1].layer_output *= 2
        augmented = model.logits[:, -1].save()
    with model.prefill(P):
        model.layers[1].layer_output.mul_(2)
        in_place = model.logits[:, -1].save()
    with model.prefill(P):
        model.layers[1].layer_output = model.layers[1].layer_output * 2
        assigned = model.logits[:, -1].save()
    with model.prefill(P):
        stream = model.layers[1].layer_output
        stream[:] = stream * 2
        filled = model.logits[:, -1].save()
    for found in (augmented, in_place, assigned, filled):
        assert_close(found, expected[:, -1], BOUND, "logits")


def test_what_was_written_is_what_is_read_after(model):
    with model.prefill(P):
        model.layers[1].layer_output = torch.full((1, 5, 96), 0.25)
        read = model.layers[1].layer_output.save()
        into_next = model.layers[2].layer_input.save()
    assert torch.equal(read, torch.full((1, 5, 96), 0.25))
    assert torch.equal(read, into_next)


def test_one_position_is_edited_and_the_rows_before_it_are_as_they_were(model):
    with model.prefill(P):
        plain = model.layers[2].layer_output.save()
    with model.prefill(P):
        model.layers[0].self_attn.attention_output[:, 3] += 1
        edited = model.layers[2].layer_output.save()
    assert torch.equal(edited[:, :3], plain[:, :3])
    assert (edited[:, 3:] - plain[:, 3:]).abs().amax(-1).min() > 0


# -- patching ---------------------------------------------------------------------------


def test_a_stream_patched_into_another_prompt_gives_the_first_ones_logits(model):
    with model.prefill(P):
        stream = model.layers[1].layer_output.save()
        expected = model.logits[:, -1].save()
    with model.prefill(OTHER):
        model.layers[1].layer_output = stream
        patched = model.logits[:, -1].save()
    assert not torch.equal(patched, last_logits(model, OTHER))
    assert_close(patched, expected, BOUND, "the patched prompt's logits")


def test_patching_one_position(model, oracle):
    with model.prefill(P):
        stream = model.layers[1].layer_output.save()
    source = oracle.run(P).get("layers.1.layer_output")

    def patch(value):
        value[:, 2] = source[:, 2]
        return value

    expected = oracle.edited(OTHER, [Edit("layers.1.layer_output", patch)]).get("logits")
    with model.prefill(OTHER):
        model.layers[1].layer_output[:, 2] = stream[:, 2]
        patched = model.logits[:, -1].save()
    assert_close(patched, expected[:, -1], BOUND, "logits")


def test_a_value_of_one_invoke_reaches_another_at_a_barrier_or_that_is_refused(engine, model):
    expected = last_logits(model, P)
    # Without one the second block is asked for a name that nobody has bound yet.
    with pytest.raises(NameError, match="handed_on"), model.prefill() as tracer:
        with tracer.invoke(P):
            handed_on = model.layers[1].layer_output
        with tracer.invoke(OTHER):
            model.layers[1].layer_output = handed_on
    assert_close(last_logits(model, P), expected, BOUND, "the next trace")
    if engine == "hf":
        with model.prefill() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(P):
                stream = model.layers[1].layer_output
                barrier()
            with tracer.invoke(OTHER):
                barrier()
                model.layers[1].layer_output = stream
                patched = model.logits[:, -1].save()
        assert_close(patched, expected, BOUND, "the patched prompt's logits")
        return
    # Each invoke is a request of its own there.
    with pytest.raises(NotImplementedError, match="barrier"), model.prefill() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(P):
            barrier()
    assert_close(last_logits(model, P), expected, BOUND, "the next trace")


def test_an_edit_of_one_prompt_leaves_the_one_beside_it(model, oracle):
    alone = {len(ids): oracle.run(ids).get("logits")[:, -1] for ids in (P, LONG)}
    for order in ((P, LONG), (LONG, P)):
        with model.prefill() as tracer:
            with tracer.invoke(order[0]):
                model.layers[0].layer_output[:] = 0
                logits = model.logits[:, -1].save()
            with tracer.invoke(order[1]):
                logits = model.logits[:, -1].save()
        assert (logits[0] - alone[len(order[0])]).abs().max() > 0.1
        assert_close(logits[1], alone[len(order[1])], BOUND, "the other prompt")


# -- steering -----------------------------------------------------------------------------


def vector():
    return torch.randn(96, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_steering_adds_exactly_the_vector_to_the_whole_stream(model, factor):
    direction = vector()
    with model.prefill(P):
        before = model.layers[1].layer_output.save()
    with model.prefill(P):
        model.steer(layers=1, vector=direction, factor=factor)
        after = model.layers[1].layer_output.save()
        entering = model.layers[2].layer_input.save()
    assert_close(after - before, (factor * direction).expand(1, 5, 96), BOUND, "the difference")
    assert torch.equal(after, entering)


def test_steering_of_several_layers_and_of_some_positions(model, oracle):
    direction = vector()

    def add(value):
        value[:, [1, 4]] += 2 * direction
        return value

    edits = [Edit(f"layers.{i}.layer_output", add) for i in (0, 2)]
    expected = oracle.edited(P, edits).get("logits")
    with model.prefill(P):
        model.steer([-1, 0], direction, factor=2.0, positions=[1, -1])
        logits = model.logits[:, -1].save()
    assert_close(logits, expected[:, -1], BOUND, "logits")


CHAT = [{"role": "user", "content": "hello there"}]


@pytest.mark.parametrize("form", ["text", "ids", "tensor", "row", "tokenizer's output", "chat"])
def test_steering_reaches_every_form_of_a_prompt(model, oracle, form):
    direction = vector()
    prompt = {
        "text": "hello there",
        "ids": P,
        "tensor": torch.tensor(P),
        "row": torch.tensor([P]),
        "tokenizer's output": model.tokenizer("hello there"),
        "chat": CHAT,
    }[form]
    ids = model.encode(prompt)
    edit = Edit("layers.1.layer_output", lambda value: value + 4 * direction)
    expected = oracle.edited(ids, [edit]).get("logits")
    with model.prefill(prompt):
        seen = model.input_ids.save()
        model.steer(1, direction, factor=4.0)
        logits = model.logits[:, -1].save()
    assert seen.tolist() == [ids]
    assert_close(logits, expected[:, -1], BOUND, "logits")


def test_steering_while_generating_for_some_of_the_steps(model, oracle):
    direction = vector()
    steered = (0, 1)
    edits = [
        Edit("layers.1.layer_output", lambda value: value + 3 * direction, step=step)
        for step in steered
    ]
    record = oracle.edited(P, edits, steps=3)
    with model.decode(P, max_new_tokens=4) as tracer:
        streams, logits = [].save(), [].save()
        for step in tracer.iter[0:4]:
            if step in steered:
                model.steer(1, direction, factor=3.0)
            streams.append(model.layers[1].layer_output)
            logits.append(model.logits[:, -1])
    for step in range(4):
        assert_close(streams[step], record.get("layers.1.layer_output", step), BOUND, f"{step}")
        assert_close(logits[step], record.get("logits", step)[:, -1], BOUND, f"logits {step}")


def test_an_edit_at_every_step_of_a_loop_takes_effect_at_every_step(model, oracle):
    edits = [Edit("layers.1.layer_output", lambda value: value * 0, step=step) for step in range(3)]
    record = oracle.edited(P, edits, steps=2)
    with model.decode(P, max_new_tokens=3) as tracer:
        logits = [].save()
        for _ in tracer.iter[0:3]:
            model.layers[1].layer_output[:] = 0
            logits.append(model.logits[:, -1])
    for step in range(3):
        assert_close(logits[step], record.get("logits", step)[:, -1], BOUND, f"step {step}")


# -- skipping -------------------------------------------------------------------------------


def test_skipped_blocks_hand_the_stream_on(model, oracle):
    source = oracle.run(P).get("layers.0.layer_output")
    edit = Edit("layers.2.layer_output", lambda value: source)
    expected = oracle.edited(P, [edit]).get("logits")
    with model.prefill(P):
        model.skip_layers(1, 2)
        logits = model.logits[:, -1].save()
    assert_close(logits, expected[:, -1], BOUND, "logits")


def test_skipping_for_one_of_two_prompts_leaves_the_other(model, oracle):
    source = oracle.run(P).get("layers.0.layer_output")
    edit = Edit("layers.1.layer_output", lambda value: source)
    skipped = oracle.edited(P, [edit]).get("logits")[:, -1]
    plain = oracle.run(LONG).get("logits")[:, -1]
    with model.prefill() as tracer:
        with tracer.invoke(P):
            model.skip_layers(1, 1)
            logits = model.logits[:, -1].save()
        with tracer.invoke(LONG):
            logits = model.logits[:, -1].save()
    assert_close(logits[0], skipped, BOUND, "the one that skips")
    assert_close(logits[1], plain, BOUND, "the other")
    assert_close(last_logits(model, LONG), plain, BOUND, "the next trace")


# -- a feed-forward that is no module ----------------------------------------------------------


def test_a_feed_forward_of_two_linears_on_the_block_is_read_and_edited(engine, only, reference):
    opt = only(engine, "opt")
    oracle = reference("opt")
    keys = ("mlp.mlp_neurons", "mlp.mlp_output")
    assert [opt.support(1)[key] for key in keys] == [None, None]
    record = oracle.run(P)
    with opt.prefill(P):
        neurons = opt.layers[1].mlp.mlp_neurons.save()
        output = opt.layers[1].mlp.mlp_output.save()
    assert_close(neurons, record.get("layers.1.mlp.mlp_neurons"), BOUND, "neurons")
    assert_close(output, record.get("layers.1.mlp.mlp_output"), BOUND, "output")
    for key in keys:
        edit = Edit(f"layers.1.{key}", lambda value: value * -2)
        expected = oracle.edited(P, [edit]).get("logits")
        with opt.prefill(P):
            on, name = where(opt, f"layers.1.{key}")
            getattr(on, name).mul_(-2)
            logits = opt.logits[:, -1].save()
        assert_close(logits, expected[:, -1], BOUND, key)


def _autocast():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(device, dtype=torch.bfloat16)


def _meta():
    return torch.device("meta")


class _Doubling(TorchFunctionMode):
    """Doubles what a linear layer gives."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return 2 * made if func is torch.nn.functional.linear else made


@pytest.mark.parametrize("settings", [_autocast, torch.no_grad, _meta, _Doubling])
def test_what_torch_is_told_inside_a_block_does_not_reach_the_model(model, settings):
    alone, other = last_logits(model, P), last_logits(model, OTHER)
    with model.prefill() as tracer:
        with tracer.invoke(P):
            with settings():
                hidden = model.layers[0].layer_output
                mine = torch.nn.functional.linear(hidden, hidden[0]).save()
                model.layers[1].layer_output.save()
            here = model.logits[:, -1].save()
        with tracer.invoke(OTHER):
            beside = model.logits[:, -1].save()
    assert_close(here, alone, BOUND, "its own")
    assert_close(beside, other, BOUND, "beside it")
    assert here.requires_grad == alone.requires_grad
    assert (mine.dtype is torch.bfloat16) == (settings is _autocast), "the block has them"


def test_what_torch_is_told_inside_a_stored_edit_does_not_reach_the_model(model):
    alone = last_logits(model, P)
    with model.edit():
        with _autocast():
            model.layers[0].layer_output[:] *= 1
            model.layers[1].layer_output[:] *= 1
    try:
        assert_close(last_logits(model, P), alone, BOUND, "beside the edit")
    finally:
        model.clear_edits()


def test_what_a_block_leaves_set_ends_with_it(model):
    """In an engine that many share, the next block is somebody else's."""
    alone = last_logits(model, P)
    with model.prefill(P):
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)
        torch.set_grad_enabled(False)
        model.layers[0].layer_output.save()
        own = str((torch.ones(1).dtype, torch.ones(1).device.type))
        own.save()
        here = model.logits[:, -1].save()
    assert own == "(torch.float64, 'meta')"
    assert_close(here, alone, BOUND, "its own")
    with model.prefill(P):
        fresh = torch.ones(1).save()
        later = model.logits[:, -1].save()
    assert fresh.dtype is torch.float32
    assert fresh.device.type == "cpu"
    assert_close(later, alone, BOUND, "the next")
    assert later.requires_grad == alone.requires_grad
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("key", ["layer_input", "layer_mid", "layer_output"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_an_edit_of_the_stream_leaves_the_other_rows_bit_equal_in_half_precision(
    engine, only, name, key
):
    """A block may hand the stream on in two halves, whose sum is rounded where it is read."""
    options = {"attn_implementation": "eager"} if engine == "hf" else {}
    model = only(engine, name, dtype="bfloat16", **options)

    def run(edit):
        with model.prefill(P):
            value = getattr(model.layers[1], key)
            if edit is not None:
                value[:, edit] += 1
            stream = model.layers[-1].layer_output.save()
        return stream

    plain, edited = run(None), run(3)
    assert torch.equal(edited[:, :3], plain[:, :3])
    assert not torch.allclose(edited[:, 3:], plain[:, 3:])


@pytest.mark.parametrize(
    ("host", "name", "where"),
    [
        ("layers.1", "mlp_output", "it is a value of mlp"),
        ("layers.1", "layer_outptu", ""),
        ("layers", "layer_output", "it is a value of layer"),
        ("layers.1.mlp", "layer_output", "it is a value of layer"),
        ("", "layer_output", "it is a value of layer"),
        ("layers.1", "self_attn", ""),
    ],
)
def test_a_write_under_a_name_that_is_none_is_refused(model, host, name, where):
    """It would reach nothing, and be read back from there ever after."""
    zeros = torch.zeros(1, 5, 96)
    with (
        pytest.raises(AttributeError, match=f"has no value '{name}' to write.*{where}"),
        model.prefill(P),
    ):
        setattr(model.get(host) if host else model, name, zeros)
    assert model.layers[1].self_attn is not zeros
    with pytest.raises(AttributeError), model.prefill(P):
        _ = model.layers[1].mlp_output


@pytest.mark.parametrize("reshaped", ["transpose_(0, 1)", "squeeze_(0)", "resize_(1, 5, 3)"])
def test_an_edit_in_place_keeps_the_shape(model, reshaped):
    with (
        pytest.raises(WrongShape, match=r"layers.1.mlp.mlp_output is .* a write keeps the shape"),
        torch.no_grad(),
        model.prefill(P),
    ):
        value = model.layers[1].mlp.mlp_output
        exec(f"value.{reshaped}", {"value": value})
        _ = model.layers[1].layer_output
