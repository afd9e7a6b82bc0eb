"""vLLM's default mode, in which the engine has processes of its own: what holds there as well.

One engine serves the whole file. It is given everything that a caller can give, from a module that
the engine's processes cannot import: what is defined here has to travel by itself.
"""

from __future__ import annotations

import dataclasses
import os
import traceback

import psutil
import pytest
import torch
from nnsight.intervention.serialization import dumps

from nnterp.core import OutOfOrder, Unavailable, WrongShape
from nnterp.core.testing import RECIPES, Edit, assert_close, build
from nnterp.core.tracing import Mlp
from nnterp.families.vllm import llama
from nnterp.vllm import StandardizedVLLM

pytestmark = pytest.mark.slow

P = [5, 17, 250, 9, 33]
LONG = list(range(30, 43))
EOS = 1
BOUND = 1e-5
MODE = "VLLM_ENABLE_V1_MULTIPROCESSING"


class Mine(Exception):
    """An exception of the caller's."""


class Detailed(Exception):
    """One that its arguments alone do not make."""

    def __init__(self, first, *, second):
        Exception.__init__(self, f"{first} and {second}")
        self.second = second


class Doubling(Mlp):
    """An envoy of the caller's."""

    def doubled(self):
        return self.mlp_output * 2


class Family:
    """A family of the caller's."""

    ARCHITECTURE = llama.ARCHITECTURE
    RENAME = llama.RENAME
    ENVOYS = llama.ENVOYS

    @staticmethod
    def intermediate_size(model):
        return 1000 + len(model.layers)

    @staticmethod
    def project_on_vocab(model, hidden):
        return hidden[..., :7]


def a_helper(value):
    return value * 3


def envoys():
    from vllm.model_executor.models.llama import LlamaMLP

    return {LlamaMLP: type("Wrapped", (Doubling, llama.ENVOYS[LlamaMLP]), {})}


@pytest.fixture(scope="module")
def model(checkpoint):
    before = os.environ.get(MODE)
    os.environ[MODE] = "1"
    try:
        with StandardizedVLLM(
            checkpoint("llama"),
            dtype="float32",
            max_model_len=128,
            dispatch=True,
            family=Family(),
            rename={"self_attn": "mixer"},
            envoys=envoys(),
        ) as found:
            yield found
    finally:
        os.environ.pop(MODE)
        if before is not None:
            os.environ[MODE] = before


@pytest.fixture(scope="module")
def record(reference):
    return reference("llama").run(P, steps=2)


def lines_here(error):
    """The lines of this file in the error's traceback."""
    return [
        frame.line
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == __file__
    ]


def working(model, record):
    with model.prefill(P):
        logits = model.logits.save()
    assert_close(logits[:, -1], record.get("logits")[:, -1], BOUND, "the next trace")


# -- values ------------------------------------------------------------------------


def test_the_engine_is_in_another_process(model):
    with model.prefill(P):
        _ = model.logits
        there = [os.getpid()].save()
    assert there != [os.getpid()]
    children = psutil.Process().children(recursive=True)
    assert there[0] in [child.pid for child in children]


def test_every_value_is_the_references(model, record):
    with model.prefill(P):
        found = {}.save()
        found["input_ids"] = model.input_ids
        found["token_embeddings"] = model.token_embeddings
        for i, layer in enumerate(model.layers):
            attention, key = layer.self_attn, f"layers.{i}"
            found[f"{key}.layer_input"] = layer.layer_input
            found[f"{key}.self_attn.attention_input"] = attention.attention_input
            found[f"{key}.self_attn.attention_queries"] = attention.attention_queries
            found[f"{key}.self_attn.attention_keys"] = attention.attention_keys
            found[f"{key}.self_attn.attention_values"] = attention.attention_values
            found[f"{key}.self_attn.attention_scores"] = attention.attention_scores
            found[f"{key}.self_attn.attention_probabilities"] = attention.attention_probabilities
            found[f"{key}.self_attn.attention_head_outputs"] = attention.attention_head_outputs
            found[f"{key}.self_attn.attention_output"] = attention.attention_output
            found[f"{key}.layer_mid"] = layer.layer_mid
            found[f"{key}.mlp.mlp_input"] = layer.mlp.mlp_input
            found[f"{key}.mlp.mlp_neurons"] = layer.mlp.mlp_neurons
            found[f"{key}.mlp.mlp_output"] = layer.mlp.mlp_output
            found[f"{key}.layer_output"] = layer.layer_output
        found["final_norm_output"] = model.final_norm_output
        last = {"logits": model.logits, "next_token_probs": model.next_token_probs}.save()
    for key, value in found.items():
        assert type(value) is torch.Tensor
        assert_close(value, record.get(key), BOUND, key)
    assert_close(last["logits"], record.get("logits")[:, -1:], BOUND, "logits")
    assert_close(last["next_token_probs"], record.get("next_token_probs"), BOUND, "probabilities")
    served = {key for key, reason in model.support(0).items() if reason is None}
    assert {f"layers.0.{key}" for key in served} <= found.keys()


def test_a_block_that_only_reads_leaves_the_logits_bit_equal(model):
    with model.prefill(P):
        plain = model.logits.save()
    with model.prefill(P):
        for layer in model.layers:
            _ = layer.self_attn.attention_probabilities
            _ = layer.mlp.mlp_output
            _ = layer.layer_output
        read = model.logits.save()
    assert torch.equal(plain, read)


def test_writes_reach_the_model(model, reference):
    def edit(value):
        value[:, -1] *= 3
        return value

    for key in ("layers.1.self_attn.attention_head_outputs", "layers.1.layer_output"):
        expected = reference("llama").edited(P, [Edit(key, edit)]).get("logits")
        with model.prefill(P):
            if key.endswith("layer_output"):
                model.layers[1].layer_output[:, -1] *= 3
            else:
                model.layers[1].self_attn.attention_head_outputs[:, -1] *= 3
            logits = model.logits.save()
        assert_close(logits[:, -1], expected[:, -1], BOUND, key)


def test_a_saved_value_stays_what_it_was(model, record):
    with model.prefill(P):
        stream = model.layers[1].layer_output
        before = stream.save()
        stream[:] = 0
        after = stream.save()
    assert_close(before, record.get("layers.1.layer_output"), BOUND, "before the edit")
    assert not after.any()


def test_saved_values_are_on_the_cpu(model):
    with model.prefill(P):
        stream = model.layers[1].layer_output.save()
        inside = {"a": [model.logits, (model.next_token_probs,)]}.save()
    assert stream.device == torch.device("cpu")
    assert inside["a"][0].device == inside["a"][1][0].device == torch.device("cpu")
    version = stream._version
    stream[:] = 0  # an ordinary tensor, whatever mode it was made under
    assert stream._version == version + 1


def test_several_prompts_at_once(model, reference):
    with model.prefill() as tracer:
        for ids in (P, LONG, P[:1]):
            with tracer.invoke(ids):
                stream = model.layers[2].layer_output.save()
    for found, ids in zip(stream, (P, LONG, P[:1]), strict=True):
        expected = reference("llama").run(ids).get("layers.2.layer_output")
        assert_close(found, expected, BOUND, f"{len(ids)} tokens")


# -- generation ---------------------------------------------------------------------


def test_decode_steps(model, record):
    with model.decode(P, max_new_tokens=3) as tracer:
        rows = [].save()
        for _ in tracer.iter[0:3]:
            rows.append((model.layers[1].layer_output, model.logits))
        result = tracer.result.save()
    for step, (stream, logits) in enumerate(rows):
        assert_close(stream, record.get("layers.1.layer_output", step), BOUND, f"step {step}")
        assert_close(logits, record.get("logits", step)[:, -1:], BOUND, f"logits {step}")
    assert list(result.outputs[0].token_ids[:2]) == record.tokens
    assert list(result.prompt_token_ids) == P


def test_the_result_of_each_invoke(model, record):
    with model.decode(max_new_tokens=2) as tracer:
        with tracer.invoke(P):
            result = tracer.result.save()
        with tracer.invoke(LONG):
            result = tracer.result.save()
    assert [list(one.prompt_token_ids) for one in result] == [P, LONG]
    assert list(result[0].outputs[0].token_ids) == record.tokens


def test_a_stop_ends_the_block_and_not_the_engine(model, record):
    with model.decode(P, max_new_tokens=60) as tracer:
        stream = model.layers[0].layer_output.save()
        tracer.stop()
    assert_close(stream, record.get("layers.0.layer_output"), BOUND, "what was read before")
    working(model, record)


def test_an_early_end_of_text_keeps_what_the_steps_gave(model, record):
    with model.decode(P, max_new_tokens=8) as tracer:
        rows = [].save()
        for step in tracer.iter[0:8]:
            rows.append(model.layers[1].layer_output)
            if step == 2:
                model.logits[..., EOS] = 1e6
    assert [tuple(row.shape[:2]) for row in rows] == [(1, 5), (1, 1), (1, 1)]
    for step, row in enumerate(rows):
        assert_close(row, record.get("layers.1.layer_output", step), BOUND, f"step {step}")
    working(model, record)


# -- errors ---------------------------------------------------------------------------


def test_the_pattern_on_a_decode_step_can_be_caught_around_the_block(model, record):
    caught = None
    try:
        with model.decode(P, max_new_tokens=3) as tracer:
            patterns = [].save()
            for _ in tracer.iter[0:3]:
                patterns.append(model.layers[1].self_attn.attention_probabilities)
    except Unavailable as error:
        caught = error
    assert "decode step" in str(caught)
    assert "attention_probabilities" in str(caught)
    assert lines_here(caught)[-1] == (
        "patterns.append(model.layers[1].self_attn.attention_probabilities)"
    )
    # What the prefill gave is there.
    expected = record.get("layers.1.self_attn.attention_probabilities")
    assert_close(patterns[0], expected, BOUND, "the prefill's pattern")
    working(model, record)


def test_unavailable_of_its_own_type_with_the_line(model, record):
    with pytest.raises(Unavailable) as raised, model.prefill(P):
        _ = model.layers[0].layer_output
        _ = model.attention_mask
    assert lines_here(raised.value)[-1] == "_ = model.attention_mask"
    assert str(raised.value).endswith("a vLLM request is one unpadded sequence; there is no mask")
    assert not hasattr(model, "attention_mask")
    working(model, record)


def test_out_of_order_of_its_own_type_with_the_line(model, record):
    with pytest.raises(OutOfOrder) as raised, model.prefill(P):
        _ = model.layers[2].layer_output
        _ = model.layers[0].layer_output.save()
    assert lines_here(raised.value)[-1] == "_ = model.layers[0].layer_output.save()"
    working(model, record)


def test_wrong_shape_of_its_own_type_with_the_line(model, record):
    with pytest.raises(WrongShape, match=r"\(1, 5, 96\).*\(1, 3, 96\)") as raised:
        with model.prefill(P):
            model.layers[0].layer_output = torch.zeros(1, 3, 96)
    assert lines_here(raised.value)[-1] == ("model.layers[0].layer_output = torch.zeros(1, 3, 96)")
    working(model, record)


def test_an_edit_that_comes_too_late(model, record):
    with pytest.raises(OutOfOrder, match=r"layers\.1\.layer_output was edited in place after"):
        with model.prefill(P):
            stream = model.layers[1].layer_output
            _ = model.layers[2].layer_output
            stream[:] = 0
    working(model, record)


def test_an_index_error_with_the_line(model, record):
    with pytest.raises(IndexError, match=r"99 is out of range.*3") as raised, model.prefill(P):
        _ = model.layers[99].layer_output
    assert lines_here(raised.value)[-1] == "_ = model.layers[99].layer_output"
    working(model, record)


def test_exceptions_of_pythons_own(model, record):
    with pytest.raises(KeyError) as raised, model.prefill(P):
        _ = model.layers[0].layer_output
        _ = {}["missing"]
    assert raised.value.args == ("missing",)
    assert lines_here(raised.value)[-1] == '_ = {}["missing"]'
    with pytest.raises(ZeroDivisionError), model.prefill(P):
        _ = 1 / 0
    with pytest.raises(UnicodeDecodeError), model.prefill(P):
        _ = b"\xff".decode()
    with pytest.raises(AttributeError, match="no_such_attribute"), model.prefill(P):
        _ = model.logits.no_such_attribute
    working(model, record)


def test_exceptions_of_the_test_module(model, record):
    with pytest.raises(Mine) as raised, model.prefill(P):
        _ = model.layers[0].layer_output
        raise Mine("one", 2)
    assert type(raised.value) is Mine
    assert raised.value.args == ("one", 2)
    assert lines_here(raised.value)[-1] == 'raise Mine("one", 2)'
    with pytest.raises(Detailed) as raised, model.prefill(P):
        raise Detailed("a", second=3)
    assert (str(raised.value), raised.value.second) == ("a and 3", 3)
    working(model, record)


def test_an_exception_that_cannot_travel(model, record):
    """Its type, text and line are what is left of it."""
    with pytest.raises(ValueError, match="held") as raised, model.prefill(P):
        error = ValueError("held")
        error.lock = __import__("threading").Lock()
        raise error
    assert lines_here(raised.value)[-1] == "raise error"
    working(model, record)


def test_the_error_shows_where_it_was_in_the_engine(model):
    with pytest.raises(Mine) as raised, model.prefill(P):
        raise Mine("here")
    shown = "".join(traceback.format_exception(raised.value))
    assert "Traceback in the engine's process" in shown
    assert shown.count("raise Mine(") >= 2
    assert "<edit-" not in shown


def test_an_error_of_one_prompt_leaves_the_others_values(model, record):
    with pytest.raises(WrongShape), model.prefill() as tracer:
        with tracer.invoke(LONG):
            model.layers[0].layer_output = torch.zeros(1, 3, 96)
        with tracer.invoke(P):
            kept = model.logits.save()
    assert_close(kept[:, -1], record.get("logits")[:, -1], BOUND, "the other prompt")
    working(model, record)


def test_an_error_ends_its_request(model, record):
    with pytest.raises(Mine), model.decode(P, max_new_tokens=100) as tracer:
        for _ in tracer.iter[0:100]:
            _ = model.logits
            raise Mine("at once")
    working(model, record)


def test_a_bad_prompt_raises_before_anything_is_asked(model, record):
    with pytest.raises(ValueError, match="empty"), model.prefill([]):
        _ = model.logits
    with pytest.raises(ValueError, match="at most 127"), model.prefill([7] * 200):
        _ = model.logits
    working(model, record)


# -- what the caller gave ---------------------------------------------------------------


def test_rename_reaches_the_worker(model, record):
    with model.prefill(P):
        output = model.layers[1].mixer.attention_output.save()
        same = [model.layers[1].mixer is model.layers[1].self_attn].save()
    assert same == [True]
    assert_close(output, record.get("layers.1.self_attn.attention_output"), BOUND, "the alias")


def test_envoys_reach_the_worker(model, record):
    assert isinstance(model.layers[1].mlp, Doubling)
    with model.prefill(P):
        name = [type(model.layers[1].mlp).__name__].save()
        twice = model.layers[1].mlp.doubled().save()
    assert name == ["Wrapped"]
    assert_close(twice / 2, record.get("layers.1.mlp.mlp_output"), BOUND, "the envoy's own method")


def test_family_reaches_the_worker(model):
    assert model.intermediate_size == 1003
    with model.prefill(P):
        sizes = [model.intermediate_size, model.num_heads].save()
        stream = model.layers[2].layer_output
        lens = model.project_on_vocab(stream).save()
        kept = stream.save()
    assert sizes == [1003, 4]
    assert torch.equal(lens, kept[..., :7])


def test_functions_of_the_test_module_reach_the_worker(model, record):
    with model.prefill(P):
        found = a_helper(model.layers[1].layer_output).save()
    assert_close(found / 3, record.get("layers.1.layer_output"), BOUND, "the helper's")


def test_functions_of_the_test_itself_reach_the_worker(model, record):
    factor = 5

    def scaled(value):
        return value * factor

    with model.prefill(P):
        found = scaled(model.layers[1].layer_output).save()
        also = (lambda value: value * factor)(model.layers[2].layer_output).save()
    assert_close(found / 5, record.get("layers.1.layer_output"), BOUND, "the function's")
    assert_close(also / 5, record.get("layers.2.layer_output"), BOUND, "the lambda's")


# -- how a block travels ------------------------------------------------------------------


def payload(model):
    """The bytes that one block goes to the engine in."""
    sizes = []

    def measure(*args, **kwargs):
        sizes.extend(len(dumps(mediator)) for mediator in model.interleaver.mediators)

    with model.trace(P, fn=measure, max_tokens=1):
        layer = model.layers[1]
        stream = layer.layer_output
        stream[:, -1] += layer.mlp.mlp_output[:, -1]
        model.layers[2].self_attn.attention_output = torch.zeros_like(stream)
        _ = model.logits.save()
    (size,) = sizes
    return size


def test_a_block_travels_in_less_than_two_kilobytes_whatever_the_depth(checkpoint):
    recipe = RECIPES["llama"]
    deep = dataclasses.replace(
        recipe, name="llama-12", config={**recipe.config, "num_hidden_layers": 12}
    )
    shallow_model, deep_model = (
        StandardizedVLLM(path) for path in (checkpoint("llama"), str(build(deep)))
    )
    assert (shallow_model.num_layers, deep_model.num_layers) == (3, 12)
    for one in (shallow_model, deep_model):
        one.dispatched = True  # no engine is needed to see what would be sent
    sizes = payload(shallow_model), payload(deep_model)
    assert sizes[0] == sizes[1]
    assert sizes[0] < 2048


# -- the end, last ------------------------------------------------------------------------


def test_close_ends_every_process(model):
    here = psutil.Process()
    with model.prefill(P):
        _ = model.logits
        there = [os.getpid()].save()
    assert here.children(recursive=True)
    model.close()
    assert not psutil.pid_exists(there[0]) or psutil.Process(there[0]).status() == "zombie"
    left = [child for child in here.children(recursive=True) if child.status() != "zombie"]
    trackers = [child for child in left if "resource_tracker" in " ".join(child.cmdline())]
    assert left == trackers
    model.close()
    with pytest.raises(RuntimeError, match="closed"), model.prefill(P):
        _ = model.logits
