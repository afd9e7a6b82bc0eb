"""What is wrong in a call is said clearly, by one type of error on both engines, and costs nothing:
the next trace of the same model is right."""

from __future__ import annotations

import importlib
import json
import re
from contextlib import contextmanager

import pytest
import torch

from nnterp.core import (
    OutOfOrder,
    OutsideTrace,
    Unavailable,
    UnsupportedFamily,
    WrongShape,
    families,
    load,
)
from nnterp.core.testing import assert_close

P = [5, 17, 250, 9, 33]
LONG = list(range(30, 43))
BOUND = 1e-5


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def model(engine, only):
    return lambda name="llama", **options: only(engine, name, **options)


@pytest.fixture
def refused(reference):
    """``with refused(model, Kind, "text"), model.trace(...):``; then the model still works."""

    @contextmanager
    def refusal(model, kind, match, name="llama"):
        with pytest.raises(kind, match=match):
            yield
        with model.prefill(P):
            logits = model.logits[:, -1].save()
        assert_close(logits, reference(name).run(P).get("logits")[:, -1], BOUND, "the next trace")

    return refusal


# -- what to load ------------------------------------------------------------------


def a_config(folder, model_type):
    content = {"model_type": model_type, "architectures": ["MptForCausalLM"], "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def test_a_model_type_without_a_family_is_named_with_the_way_out(engine, tmp_path):
    path = a_config(tmp_path, "mpt")
    with pytest.raises(UnsupportedFamily) as raised:
        load(path, engine=engine)
    message = str(raised.value)
    assert "'mpt'" in message
    assert f"'{engine}'" in message
    assert "family=" in message
    assert f"register(family, 'mpt', engine='{engine}')" in message
    for known in ("llama", "gpt2", "gemma2"):
        assert known in message


def test_every_way_out_that_is_named_exists(engine, tmp_path):
    with pytest.raises(UnsupportedFamily) as raised:
        load(a_config(tmp_path, "mpt"), engine=engine)
    named = set(re.findall(r"nnterp\.[\w.]+\w", str(raised.value)))
    named -= {f"nnterp.families.{engine}.mpt"}
    assert len(named) == 2
    for path in named:
        if path == "nnterp.core.families.register":
            assert callable(families.register)
        else:
            importlib.import_module(path)


def test_a_model_type_that_transformers_does_not_know_is_named(engine, tmp_path):
    with pytest.raises(ValueError, match="no_such_type"):
        load(a_config(tmp_path, "no_such_type"), engine=engine)


@pytest.mark.parametrize("path", ["/no/such/checkpoint", "./no-such", "~/no-such", "no/such/one"])
def test_a_path_that_does_not_exist(engine, path):
    with pytest.raises(FileNotFoundError, match=f"{path}.*does not exist"):
        load(path, engine=engine)


def test_a_name_that_is_not_in_the_cache(engine):
    with pytest.raises((OSError, ValueError), match=r"someone/no-such-model|huggingface"):
        load("someone/no-such-model", engine=engine)


def test_a_folder_without_a_checkpoint(engine, tmp_path):
    with pytest.raises((OSError, ValueError), match=re.escape(str(tmp_path))):
        load(str(tmp_path), engine=engine)


# -- prompts --------------------------------------------------------------------------

EMPTY = {
    "text": "",
    "list": [],
    "tuple": (),
    "tensor": torch.empty(0, dtype=torch.long),
    "tensor of one row": torch.empty(1, 0, dtype=torch.long),
    "row": [[]],
    "tokenizer's output": {"input_ids": []},
    "tokenizer's output of tensors": {
        "input_ids": torch.empty(1, 0, dtype=torch.long),
        "attention_mask": torch.empty(1, 0, dtype=torch.long),
    },
}


@pytest.mark.parametrize("prompt", EMPTY.values(), ids=EMPTY)
def test_an_empty_prompt(model, refused, prompt):
    llama = model()
    with refused(llama, ValueError, "prompt is empty"), llama.trace(prompt):
        _ = llama.logits.save()
    with refused(llama, ValueError, "prompt is empty"), llama.prefill(prompt):
        _ = llama.logits.save()


@pytest.mark.parametrize("prompt", EMPTY.values(), ids=EMPTY)
def test_an_empty_prompt_of_an_invoke(model, refused, prompt):
    llama = model()
    with refused(llama, ValueError, "prompt is empty"), llama.prefill() as tracer:
        with tracer.invoke(P):
            _ = llama.logits.save()
        with tracer.invoke(prompt):
            _ = llama.logits.save()


@pytest.mark.parametrize("prompt", ["", []], ids=["text", "list"])
def test_an_empty_prompt_of_a_generation(model, refused, prompt):
    llama = model()
    with refused(llama, ValueError, "prompt is empty"), llama.decode(prompt, max_new_tokens=2):
        _ = llama.logits.save()


NO_PROMPT = {
    "a number": 3.5,
    "an object": object(),
    "floats": [0.5, 1.5],
    "a tensor of floats": torch.zeros(1, 5),
    "booleans": [True, False],
    "another mapping": {"ids": [1, 2]},
}


@pytest.mark.parametrize("prompt", NO_PROMPT.values(), ids=NO_PROMPT)
def test_what_is_no_prompt(model, refused, prompt):
    llama = model()
    with refused(llama, TypeError, "(?i)prompt|token ids|input_ids"), llama.prefill(prompt):
        _ = llama.logits.save()


@pytest.mark.parametrize("wrong", [-1, 304, 10**6])
def test_a_token_id_out_of_the_vocabulary(model, refused, wrong):
    llama = model()
    with refused(llama, ValueError, rf"{wrong}\b.*vocabulary.*304"), llama.prefill([5, wrong, 9]):
        _ = llama.logits.save()
    with refused(llama, ValueError, rf"{wrong}\b.*vocabulary"), llama.prefill() as tracer:
        with tracer.invoke(P):
            _ = llama.logits.save()
        with tracer.invoke(torch.tensor([5, wrong])):
            _ = llama.logits.save()


def test_a_trace_without_a_prompt(model, refused):
    llama = model()
    with refused(llama, OutsideTrace, r"tracer\.invoke\(prompt\)"), llama.trace():
        _ = llama.logits.save()
    with refused(llama, OutsideTrace, r"tracer\.invoke\(prompt\)"), llama.prefill():
        _ = llama.logits.save()
    with refused(llama, ValueError, r"tracer\.invoke"), llama.prefill():
        _ = [1]


def test_several_prompts_in_one_invoke_are_one_each_on_vllm(engine, model, refused):
    llama = model()
    if engine == "vllm":
        for prompts in ([P, LONG], ["a", "b"], torch.tensor([P, P])):
            with refused(llama, (ValueError, TypeError), "one invoke|one tracer.invoke"):
                with llama.prefill(prompts):
                    _ = llama.logits.save()
    else:
        with llama.prefill([P, LONG]):
            logits = llama.logits.save()
        assert tuple(logits.shape) == (2, 13, 304)


def test_a_prompt_longer_than_the_engine_takes(engine, model, refused):
    """128 is ``max_model_len``, less the one token that a request makes; transformers has no
    such limit where positions are computed."""
    llama = model()
    ids = [7] * 128
    if engine == "vllm":
        with refused(llama, ValueError, "128 tokens.*at most 127"), llama.prefill(ids):
            _ = llama.logits.save()
        with refused(llama, ValueError, "128 tokens.*at most 127"), llama.prefill() as tracer:
            with tracer.invoke(P):
                _ = llama.logits.save()
            with tracer.invoke(ids):
                _ = llama.logits.save()
    with llama.prefill(ids[:127]):
        logits = llama.logits.save()
    assert logits.isfinite().all()


def test_a_generation_of_no_tokens(model, refused):
    llama = model()
    for count in (0, -1):
        with refused(llama, ValueError, "max_new_tokens|max_tokens"):
            with llama.decode(P, max_new_tokens=count):
                _ = llama.logits.save()


def test_decode_needs_a_number_of_tokens(model):
    with pytest.raises(TypeError, match="max_new_tokens"):
        model().decode(P)


# -- layers ---------------------------------------------------------------------------


@pytest.mark.parametrize("index", [3, 99, -4])
def test_a_layer_that_is_not_there(model, refused, index):
    llama = model()
    with pytest.raises(IndexError, match=f"{index} is out of range.*3"):
        _ = llama.layers[index]
    with refused(llama, IndexError, f"{index} is out of range.*3"), llama.prefill(P):
        _ = llama.layers[index].layer_output.save()
    with pytest.raises(IndexError):
        llama.support(index)
    with pytest.raises(IndexError):
        llama.require(f"layers.{index}.layer_output")


def test_negative_indices_and_slices(model, reference):
    llama = model()
    assert llama.layers[-1] is llama.layers[2]
    assert list(llama.layers[1:]) == [llama.layers[1], llama.layers[2]]
    assert list(llama.layers[::2]) == [llama.layers[0], llama.layers[2]]
    assert list(llama.layers[5:]) == []
    with llama.prefill(P):
        streams = [layer.layer_output for layer in llama.layers[1:]].save()
    record = reference("llama").run(P)
    for i, stream in enumerate(streams, 1):
        assert_close(stream, record.get(f"layers.{i}.layer_output"), BOUND, f"block {i}")


def test_a_key_that_is_no_value(model):
    with pytest.raises(KeyError, match="no_such_value"):
        model().require("layers.*.no_such_value")


def test_every_unavailable_value_that_is_required_is_reported_at_once(model):
    with pytest.raises(Unavailable) as raised:
        model().require(
            "layers.*.layer_output", "layers.1.mlp.router_logits", "layers.*.mlp_output"
        )
    assert "layers.1.mlp.router_logits: a dense block routes nothing" in str(raised.value)
    assert "layers.2.mlp_output" in str(raised.value)
    assert "layer_output" not in str(raised.value)


# -- writes ---------------------------------------------------------------------------

SHAPES = {
    "other rows": (1, 3, 96),
    "more rows": (1, 8, 96),
    "other width": (1, 5, 95),
    "no batch": (5, 96),
    "one row for all": (1, 1, 96),
    "two prompts": (2, 5, 96),
    "a number": (),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_write_of_another_shape(model, refused, shape):
    llama = model()
    with refused(llama, WrongShape, re.escape("(1, 5, 96)")) as _, llama.prefill(P):
        llama.layers[0].layer_output = torch.zeros(shape)
    assert issubclass(WrongShape, ValueError)


def test_a_write_of_another_shape_beside_another_prompt(model, reference):
    llama = model()
    with pytest.raises(WrongShape), llama.prefill() as tracer:
        with tracer.invoke(P):
            llama.layers[0].layer_output = torch.zeros(1, 13, 96)
        with tracer.invoke(LONG):
            _ = llama.logits[:, -1].save()
    with llama.prefill(LONG):
        after = llama.logits[:, -1].save()
    expected = reference("llama").run(LONG).get("logits")[:, -1]
    assert_close(after, expected, BOUND, "the next trace")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.long])
def test_a_write_of_another_dtype(model, refused, dtype):
    llama = model()
    with refused(llama, TypeError, rf"torch.float32, not {dtype}"), llama.prefill(P):
        llama.layers[0].layer_output = torch.zeros(1, 5, 96, dtype=dtype)


def test_a_write_of_another_device(model, refused):
    llama = model()
    with refused(llama, ValueError, "cpu, not meta"), llama.prefill(P):
        llama.layers[0].layer_output = torch.zeros(1, 5, 96, device="meta")


NO_TENSOR = {
    "a number": 0.0,
    "nothing": None,
    "a list": [[[0.0] * 96] * 5],
    "an array": torch.zeros(1, 5, 96).numpy(),
    "a tuple": (torch.zeros(1, 5, 96),),
}


@pytest.mark.parametrize("value", NO_TENSOR.values(), ids=NO_TENSOR)
def test_a_write_of_no_tensor(model, refused, value):
    llama = model()
    with refused(llama, TypeError, "layers.0.layer_output takes a tensor"), llama.prefill(P):
        llama.layers[0].layer_output = value


def test_an_edit_in_place_that_does_not_fit(model, refused):
    llama = model()
    with refused(llama, RuntimeError, "expand|size|shape"), llama.prefill(P):
        llama.layers[0].layer_output[:] = torch.zeros(3)
    with refused(llama, IndexError, "out of bounds|out of range"), llama.prefill(P):
        llama.layers[0].layer_output[0, 99] = 0


@pytest.mark.parametrize("name", ["input_size", "next_token_probs"])
def test_a_write_of_what_is_computed(model, refused, name):
    llama = model()
    with refused(llama, Unavailable, f"{name} is read-only"), llama.prefill(P):
        setattr(llama, name, torch.zeros(1, 304))


def test_an_edit_in_place_of_what_is_computed(model, refused):
    llama = model()
    with refused(llama, Unavailable, "next_token_probs is read-only"), llama.prefill(P):
        llama.next_token_probs[:] = 0


# -- order ----------------------------------------------------------------------------


def test_values_read_out_of_order(model, refused):
    llama = model()
    message = r"layers\.0\.layer_output.*at layers\.2\.layer_output"
    with refused(llama, OutOfOrder, message), llama.prefill(P):
        _ = llama.layers[2].layer_output.save()
        _ = llama.layers[0].layer_output.save()
    with refused(llama, OutOfOrder, "mlp_output"), llama.prefill(P):
        _ = llama.logits.save()
        _ = llama.layers[2].mlp.mlp_output.save()
    assert issubclass(OutOfOrder, RuntimeError)


def test_values_written_out_of_order(model, refused):
    llama = model()
    with refused(llama, OutOfOrder, r"layers\.0\.layer_output"), llama.prefill(P):
        _ = llama.layers[2].layer_output.save()
        llama.layers[0].layer_output = torch.zeros(1, 5, 96)


def test_values_read_out_of_order_in_a_later_step(model, refused):
    llama = model()
    with refused(llama, OutOfOrder, r"layers\.0\.layer_output"):
        with llama.decode(P, max_new_tokens=4) as tracer:
            for _ in tracer.iter[1:4]:
                _ = llama.layers[1].layer_output
                _ = llama.layers[0].layer_output


def test_values_of_the_prompt_read_after_a_later_step(model, refused):
    llama = model()
    with refused(llama, OutOfOrder, r"layers\.0\.layer_output"):
        with llama.decode(P, max_new_tokens=3) as tracer:
            for _ in tracer.iter[1:2]:
                _ = llama.layers[1].layer_output
            _ = llama.layers[0].layer_output


def test_an_available_value_outside_of_a_trace(model):
    llama = model()
    for read in (
        lambda: llama.logits,
        lambda: llama.layers[0].layer_output,
        lambda: llama.layers[0].self_attn.attention_queries,
    ):
        with pytest.raises(OutsideTrace, match=r"model\.trace"):
            read()
    with pytest.raises(OutsideTrace):
        llama.layers[0].layer_output = torch.zeros(1, 5, 96)
    assert not hasattr(llama, "logits")


# -- methods --------------------------------------------------------------------------

STEERING = {
    "a layer that is not there": ((99, torch.zeros(96)), IndexError, "99.*3 layers"),
    "a negative one": ((-4, torch.zeros(96)), IndexError, "-4.*3 layers"),
    "one of several": (([0, 7], torch.zeros(96)), IndexError, "7.*3 layers"),
    "a layer twice": (([1, 1], torch.zeros(96)), ValueError, "twice"),
    "a layer twice, from the end": (([2, -1], torch.zeros(96)), ValueError, "twice"),
    "no layer": (([], torch.zeros(96)), ValueError, "no layer"),
    "a narrow vector": ((1, torch.zeros(95)), WrongShape, "96 wide"),
    "a wide vector": ((1, torch.zeros(1, 5, 97)), WrongShape, "96 wide"),
    "a number": ((1, torch.tensor(1.0)), WrongShape, "96 wide"),
    "other rows": ((1, torch.zeros(1, 3, 96)), (WrongShape, RuntimeError), "size|shape|3"),
}


@pytest.mark.parametrize(("arguments", "kind", "match"), STEERING.values(), ids=STEERING)
def test_bad_steering(model, refused, arguments, kind, match):
    llama = model()
    with refused(llama, kind, match), llama.prefill(P):
        llama.steer(*arguments)
        _ = llama.logits.save()


def test_steering_of_a_position_that_is_not_there(model, refused):
    llama = model()
    with refused(llama, IndexError, "9"), llama.prefill(P):
        llama.steer(1, torch.ones(96), positions=9)
        _ = llama.logits.save()
    for positions in ([1.5], torch.tensor([1, 0], dtype=torch.uint8), True):
        with refused(llama, TypeError, "whole numbers"), llama.prefill(P):
            llama.steer(1, torch.ones(96), positions=positions)
            _ = llama.logits.save()


def test_bad_skips(model, refused):
    llama = model()
    with refused(llama, ValueError, "end < start"), llama.prefill(P):
        llama.skip_layers(2, 1)
    with refused(llama, IndexError, "99"), llama.prefill(P):
        llama.skip_layer(99)
    with refused(llama, WrongShape, re.escape("(1, 5, 96)")), llama.prefill(P):
        llama.skip_layers(0, 1, skip_with=torch.zeros(1, 4, 96))


def test_a_lens_on_something_else(model, refused):
    llama = model()
    with refused(llama, WrongShape, "96 wide, not 95"), llama.prefill(P):
        _ = llama.project_on_vocab(torch.zeros(1, 5, 95))
    with refused(llama, WrongShape, "not a number"), llama.prefill(P):
        _ = llama.project_on_vocab(torch.tensor(1.0))
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        with refused(llama, TypeError, f"not {dtype}"), llama.prefill(P):
            _ = llama.project_on_vocab(torch.zeros(1, 5, 96, dtype=dtype))
    with pytest.raises(WrongShape, match="one distribution"):
        llama.probs_to_dict(torch.ones(2, 304) / 304)


def test_an_error_of_the_callers_own(model, refused):
    llama = model()
    with refused(llama, ZeroDivisionError, "division"), llama.prefill(P):
        _ = llama.layers[1].layer_output
        _ = 1 / 0
    with refused(llama, KeyError, "missing"), llama.prefill(P):
        _ = {}["missing"]


def test_a_trace_inside_of_a_block(model, refused):
    llama = model()
    with refused(llama, RuntimeError, "inside a block"), llama.prefill(P):
        _ = llama.layers[0].layer_output
        with llama.prefill(P):
            _ = llama.logits.save()
    with refused(llama, RuntimeError, "inside a block"), llama.prefill(P):
        _ = llama.layers[0].layer_output
        llama.verify()


# -- checkpoints of another kind, last: each is another engine --------------------------


def test_a_prompt_longer_than_the_learned_positions(engine, model, refused):
    gpt2 = model("gpt2", **({"max_model_len": 256} if engine == "vllm" else {}))
    too_long = [7] * 257
    with refused(gpt2, ValueError, "257 tokens.*at most", "gpt2"), gpt2.prefill(too_long):
        _ = gpt2.logits.save()
    with refused(gpt2, ValueError, "257 tokens.*at most", "gpt2"):
        with gpt2.prefill(torch.tensor([too_long])):
            _ = gpt2.logits.save()
    with refused(gpt2, ValueError, "257 tokens.*at most", "gpt2"), gpt2.prefill() as tracer:
        with tracer.invoke(P):
            _ = gpt2.logits.save()
        with tracer.invoke({"input_ids": too_long}):
            _ = gpt2.logits.save()


def test_a_generation_past_the_learned_positions(engine, model, refused):
    """It ends at the limit on vLLM; transformers would index past its table."""
    gpt2 = model("gpt2", **({"max_model_len": 256} if engine == "vllm" else {}))
    ids = [7] * 250
    if engine == "hf":
        with refused(gpt2, ValueError, "positions|at most", "gpt2"):
            with gpt2.decode(ids, max_new_tokens=10) as tracer:
                _ = tracer.result.save()
    else:
        with gpt2.decode(ids, max_new_tokens=10) as tracer:
            request = tracer.result.save()
        assert len(request.outputs[0].token_ids) == 6
    with gpt2.decode(ids, max_new_tokens=6) as tracer:
        _ = tracer.result.save()


@pytest.fixture(scope="module")
def textless(engine, checkpoint, open_model):
    with open_model(engine, checkpoint("llama", tokenizer=False)) as found:
        yield found


def test_a_checkpoint_without_a_tokenizer_takes_token_ids(textless, reference):
    assert textless.tokenizer is None
    record = reference("llama").run(P, steps=2)
    for prompt in (P, torch.tensor(P), torch.tensor([P]), {"input_ids": P}):
        with textless.prefill(prompt):
            logits = textless.logits[:, -1].save()
        assert_close(logits, record.get("logits")[:, -1], BOUND, "logits")
    with textless.decode(P, max_new_tokens=3) as tracer:
        tokens = [].save()
        for _ in tracer.iter[0:3]:
            tokens.append(textless.logits[0, -1].argmax().item())
    assert tokens[:2] == record.tokens


def test_a_checkpoint_without_a_tokenizer_takes_several_prompts(textless, reference):
    with textless.prefill() as tracer:
        with tracer.invoke(P):
            stream = textless.layers[1].layer_output.save()
        with tracer.invoke(LONG):
            stream = textless.layers[1].layer_output.save()
    for found, ids in zip(stream, (P, LONG), strict=True):
        expected = reference("llama").run(ids).get("layers.1.layer_output")
        assert_close(found, expected, BOUND, "layer_output")


def test_a_checkpoint_without_a_tokenizer_says_what_is_missing(textless, refused):
    for prompt in ("the cat", [{"role": "user", "content": "hello"}]):
        with refused(textless, ValueError, "has no tokenizer.*token ids"):
            with textless.prefill(prompt):
                _ = textless.logits.save()


def test_a_checkpoint_without_a_tokenizer_names_tokens_by_their_ids(textless):
    probs = torch.zeros(304)
    probs[7], probs[9] = 0.75, 0.25
    assert textless.probs_to_dict(probs, k=2) == {"7": 0.75, "9": 0.25}


def test_an_error_ends_a_request_of_a_checkpoint_without_a_tokenizer(textless, refused):
    with refused(textless, WrongShape, "layer_output"):
        with textless.decode(P, max_new_tokens=50):
            textless.layers[0].layer_output = torch.zeros(1, 3, 96)


def test_a_checkpoint_without_a_tokenizer_is_loaded_when_it_is_run(checkpoint):
    """What a lazily built model can be asked needs no weights."""
    lazy = load(checkpoint("llama", tokenizer=False), engine="hf")
    assert not lazy.dispatched
    assert lazy.num_layers == 3
    assert lazy.tokenizer is None
    with lazy.prefill(P):
        logits = lazy.logits.save()
    assert lazy.dispatched
    assert lazy.tokenizer is None
    eager = load(checkpoint("llama", tokenizer=False), engine="hf", dispatch=True)
    assert eager.dispatched
    with eager.prefill(P):
        again = eager.logits.save()
    assert torch.equal(logits, again)
