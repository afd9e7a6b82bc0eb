"""StandardizedTransformer beside nnsight and transformers: what each of them can do still works."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import warnings

import nnsight
import pytest
import torch

from nnterp.core import OutOfOrder, OutsideTrace, Unavailable, load
from nnterp.core.testing import RECIPES, Edit, Oracle, assert_close, build
from nnterp.core.tracing import Mlp
from nnterp.families.hf import llama as module
from nnterp.hf import StandardizedTransformer

P = [5, 17, 250, 9, 33]
LONG = list(range(30, 43))
BOUND = 1e-5


@pytest.fixture(scope="module")
def model(only):
    return only("hf", "llama")


@pytest.fixture(scope="module")
def plain(checkpoint):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint("llama")).eval()


@pytest.fixture(scope="module")
def oracle(reference):
    return reference("llama")


@pytest.fixture(scope="module")
def record(oracle):
    return oracle.run(P, steps=2)


# -- a saved value is what it was -----------------------------------------------------


def test_save_keeps_what_the_value_was_before_an_edit_of_it(model, record):
    with model.prefill(P):
        stream = model.layers[1].layer_output
        before = stream.save()
        stream[:] = 0
        after = stream.save()
    assert_close(before, record.get("layers.1.layer_output"), BOUND, "before")
    assert not after.any()


@pytest.mark.parametrize("how", ["method", "function", "list", "dict"])
def test_a_kept_value_is_not_touched_by_edits_of_a_later_read(model, record, how):
    with model.prefill(P):
        kept = {}.save()
        if how == "method":
            kept["value"] = model.layers[1].layer_output.save()
        elif how == "function":
            kept["value"] = nnsight.save(model.layers[1].layer_output)
        elif how == "list":
            rows = []
            rows.append(model.layers[1].layer_output)
            kept["value"] = rows[0]
        else:
            kept["value"] = model.layers[1].layer_output
        model.layers[1].layer_output[:] = 0
        model.layers[1].layer_output += 1
        entering = model.layers[2].layer_input.save()
    assert_close(kept["value"], record.get("layers.1.layer_output"), BOUND, "what was kept")
    assert torch.equal(entering, torch.ones_like(entering))


def test_a_kept_value_is_not_touched_by_an_assignment(model, record):
    with model.prefill(P):
        kept = nnsight.save(model.layers[1].layer_output)
        model.layers[1].layer_output = torch.zeros(1, 5, 96)
    assert_close(kept, record.get("layers.1.layer_output"), BOUND, "what was kept")


def test_what_was_assigned_is_the_callers_and_stays_as_it_is(model):
    mine = torch.full((1, 5, 96), 0.5)
    with model.prefill(P):
        model.layers[1].layer_output = mine
        model.layers[1].layer_output[:] = 2
        read = model.layers[1].layer_output.save()
    assert torch.equal(mine, torch.full((1, 5, 96), 0.5))
    assert torch.equal(read, torch.full((1, 5, 96), 2.0))


# -- edits in place -----------------------------------------------------------------------


def test_edits_of_successive_reads_all_land(model, oracle):
    def edit(value):
        value[:, 0] = 0
        value[:, 1] *= 2
        value[:, 2] += 1
        return value

    expected = oracle.edited(P, [Edit("layers.1.layer_output", edit)])
    with model.prefill(P):
        first = model.layers[1].layer_output
        first[:, 0] = 0
        second = model.layers[1].layer_output
        second[:, 1] *= 2
        model.layers[1].layer_output[:, 2] += 1
        after = model.layers[1].layer_output.save()
        logits = model.logits.save()
    assert_close(after, expected.get("layers.1.layer_output"), BOUND, "the stream")
    assert_close(logits, expected.get("logits"), BOUND, "logits")


def test_edits_of_two_copies_that_do_not_know_of_each_other_are_refused(model):
    with pytest.raises((ValueError, OutOfOrder), match=r"layers\.1\.layer_output|two copies"):
        with model.prefill(P):
            first = model.layers[1].layer_output
            second = model.layers[1].layer_output
            first[:, 0] = 0
            second[:, 1] = 0
            _ = model.logits


def test_edits_of_two_values_of_one_point_both_land(model, oracle):
    key = "layers.1.self_attn.attention_"
    edits = [
        Edit(f"{key}queries", lambda value: value * 2),
        Edit(f"{key}keys", lambda value: value * -1),
        Edit(f"{key}values", lambda value: value * 3),
    ]
    expected = oracle.edited(P, edits).get("logits")
    with model.prefill(P):
        attention = model.layers[1].self_attn
        queries, keys = attention.attention_queries, attention.attention_keys
        queries.mul_(2)
        keys.neg_()
        attention.attention_values *= 3
        logits = model.logits.save()
    assert_close(logits, expected, BOUND, "logits")


FORMS = {
    "setitem": lambda value: value.__setitem__(slice(None), value * 2),
    "augmented slice": lambda value: value[:, :].__imul__(2),
    "method": lambda value: value.mul_(2),
    "copy_": lambda value: value.copy_(value * 2),
    "out=": lambda value: torch.mul(value, 2, out=value),
    "a view": lambda value: value.view(5, 96).mul_(2),
    "a transposed view": lambda value: value[0].T.mul_(2),
    "chunks": lambda value: [part.mul_(2) for part in value.chunk(2, dim=-1)],
    "detached": lambda value: value.detach().mul_(2),
    "data": lambda value: value.data.mul_(2),
    "numpy": lambda value: value.detach().numpy().__imul__(2),
    "index_fill and add": lambda value: value.add_(value.clone()),
    "masked": lambda value: value.masked_scatter_(torch.ones_like(value) > 0, value * 2),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no gradients"])
def test_an_edit_in_place_lands_however_it_is_written(model, oracle, form, gradients):
    expected = oracle.edited(P, [Edit("layers.1.layer_output", lambda x: x * 2)]).get("logits")
    with torch.set_grad_enabled(gradients), model.prefill(P):
        with torch.no_grad():
            form(model.layers[1].layer_output)
        logits = model.logits.save()
    assert_close(logits, expected, BOUND, "logits")


def test_a_late_edit_is_refused_at_the_next_read(model):
    with pytest.raises(OutOfOrder, match=r"layers\.1\.layer_output was edited in place after"):
        with model.prefill(P):
            stream = model.layers[1].layer_output
            _ = model.layers[2].layer_output
            stream[:] = 0
            _ = model.logits


def test_a_late_edit_is_refused_at_the_end_of_the_block(model):
    with pytest.raises(OutOfOrder, match=r"layers\.1\.layer_output was edited in place after"):
        with model.prefill(P):
            stream = model.layers[1].layer_output
            _ = model.layers[2].layer_output
            stream[:] = 0


def test_a_late_edit_of_a_clone_is_nobodys_business(model, record):
    with model.prefill(P):
        stream = model.layers[1].layer_output.clone()
        logits = model.logits.save()
        stream[:] = 0
    assert_close(logits, record.get("logits"), BOUND, "logits")


# -- asking ---------------------------------------------------------------------------------


def test_asking_for_what_is_unavailable(model):
    mlp = model.layers[1].mlp
    assert not hasattr(mlp, "router_logits")
    assert getattr(mlp, "router_logits", "none") == "none"
    assert not hasattr(model.layers[1], "linear_attn")
    with pytest.raises(Unavailable, match="a dense block routes nothing"):
        _ = mlp.router_logits
    with pytest.raises(Unavailable, match="no recurrent mixer"):
        _ = model.layers[1].linear_attn
    with model.prefill(P):
        inside = [hasattr(model.layers[1].mlp, "router_logits")].save()
        _ = model.logits
    assert inside == [False]


def test_asking_for_what_is_available(model):
    assert not hasattr(model, "logits")
    assert getattr(model, "logits", None) is None
    with pytest.raises(OutsideTrace):
        _ = model.logits
    with model.prefill(P):
        inside = [hasattr(model.layers[1], "layer_output"), hasattr(model, "logits")].save()
    assert inside == [True, True]


def test_an_attribute_that_nothing_has(model):
    assert not hasattr(model, "no_such_thing")
    assert not hasattr(model.layers[0], "no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.layers[0].self_attn.no_such_thing


def test_support_and_require_say_the_same_as_a_read(model):
    support = model.support()
    assert support["logits"] is None
    assert support["layers.*.layer_output"] is None
    assert support["layers.*.mlp.router_logits"].startswith("a dense block routes nothing")
    model.require("logits", "layers.*.layer_output", "layers.2.self_attn.attention_scores")
    with pytest.raises(Unavailable, match=r"layers\.0\.mlp\.router_logits: a dense block"):
        model.require("layers.*.mlp.router_logits")
    assert model.support(-1) == model.support(2)


def test_an_attribute_error_inside_a_block_is_itself(model):
    with pytest.raises(AttributeError, match="no_such_method"), model.prefill(P):
        model.layers[1].layer_output.no_such_method()


# -- nnsight's own ways --------------------------------------------------------------------------


def test_edit_runs_for_every_trace_until_it_is_cleared(model, oracle):
    expected = oracle.edited(P, [Edit("layers.1.layer_output", lambda x: x * 0)]).get("logits")
    plain_logits = oracle.run(P).get("logits")
    with model.edit() as (_tracer, edited):
        model.layers[1].layer_output[:] = 0
    with edited.prefill(P):
        logits = edited.logits.save()
    assert_close(logits, expected, BOUND, "edited")
    with model.prefill(P):
        logits = model.logits.save()
    assert_close(logits, plain_logits, BOUND, "the model itself")


def test_edit_in_place_is_cleared(model, oracle):
    expected = oracle.edited(P, [Edit("layers.1.layer_output", lambda x: x * 0)]).get("logits")
    with model.edit(inplace=True):
        model.layers[1].layer_output = torch.zeros_like(model.layers[1].layer_output)
    try:
        with model.prefill(P):
            stream = model.layers[2].layer_input.save()
            logits = model.logits.save()
        assert not stream.any()
        assert_close(logits, expected, BOUND, "edited")
    finally:
        model.clear_edits()
    with model.prefill(P):
        logits = model.logits.save()
    assert_close(logits, oracle.run(P).get("logits"), BOUND, "cleared")


def test_a_session_hands_values_from_trace_to_trace(model, record):
    with model.session():
        with model.prefill(P):
            stream = model.layers[1].layer_output
        with model.prefill(LONG[:5]):
            model.layers[1].layer_output = stream
            logits = model.logits.save()
    assert_close(logits[:, -1], record.get("logits")[:, -1], BOUND, "the patched prompt's logits")


def test_scan_gives_shapes_without_weights(checkpoint):
    lazy = StandardizedTransformer(checkpoint("llama"), attn_implementation="eager")
    with lazy.scan(P):
        shapes = {}.save()
        attention = lazy.layers[1].self_attn
        shapes["layer_input"] = tuple(lazy.layers[1].layer_input.shape)
        shapes["queries"] = tuple(attention.attention_queries.shape)
        shapes["head_outputs"] = tuple(attention.attention_head_outputs.shape)
        shapes["mlp_output"] = tuple(lazy.layers[1].mlp.mlp_output.shape)
        shapes["layer_output"] = tuple(lazy.layers[1].layer_output.shape)
        shapes["logits"] = tuple(lazy.logits.shape)
        shapes["probabilities"] = tuple(lazy.next_token_probs.shape)
    assert not lazy.dispatched
    assert shapes == {
        "layer_input": (1, 5, 96),
        "queries": (1, 4, 5, 32),
        "head_outputs": (1, 5, 4, 32),
        "mlp_output": (1, 5, 96),
        "layer_output": (1, 5, 96),
        "logits": (1, 5, 304),
        "probabilities": (1, 304),
    }


def test_scan_gives_each_prompts_own_shape(checkpoint):
    lazy = StandardizedTransformer(checkpoint("llama"))
    with lazy.scan() as tracer:
        for prompt in (P, LONG):
            with tracer.invoke(prompt):
                shape = [tuple(lazy.layers[1].layer_output.shape)].save()
    assert shape == [[(1, 5, 96)], [(1, 13, 96)]]


def test_generate_is_nnsights_own(model, plain):
    with model.generate(P, max_new_tokens=4, do_sample=False) as tracer:
        streams = [].save()
        for _ in tracer.iter[0:4]:
            streams.append(model.layers[1].layer_output)
        ids = tracer.result.save()
    expected = plain.generate(torch.tensor([P]), max_new_tokens=4, do_sample=False)
    assert torch.equal(ids, expected)
    assert [stream.shape[1] for stream in streams] == [5, 1, 1, 1]


def test_native_names_reach_the_same_modules(model):
    assert model.model.layers[1].self_attn is model.layers[1].self_attn
    with model.prefill(P):
        native = model.model.layers[1].output
        native = (native[0] if isinstance(native, tuple) else native).clone().save()
        standard = model.layers[1].layer_output.save()
    assert torch.equal(native, standard)


def test_several_prompts_of_one_invoke_are_nnsights_padded_batch(model, oracle):
    with model.prefill([P, LONG]):
        mask = model.attention_mask.save()
        stream = model.layers[1].layer_output.save()
    assert tuple(stream.shape) == (2, 13, 96)
    assert mask.sum(1).tolist() == [5, 13]
    expected = oracle.run(P).get("layers.1.layer_output")
    assert_close(stream[:1, 8:], expected, BOUND, "the short one's own rows")


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_count_from_the_first_token_behind_padding(name, reference, checkpoint):
    """A padded batch of nnsight's, whose short prompt begins at position 0."""
    learned, answers = load(checkpoint(name), engine="hf", dispatch=True), reference(name).run(P)
    with learned.trace([P, LONG]):
        stream = learned.layers[1].layer_output[0, -len(P) :].save()
        logits = learned.logits[0, -len(P) :].save()
    assert_close(stream[None], answers.get("layers.1.layer_output"), BOUND, "the stream")
    assert_close(logits[None], answers.get("logits"), BOUND, "logits")


def test_padding_behind_is_refused(checkpoint):
    padded = StandardizedTransformer(
        checkpoint("llama"), tokenizer_kwargs={"padding_side": "right"}
    )
    assert padded.tokenizer.padding_side == "right"
    with padded.prefill(P):
        alone = padded.logits.save()
    assert alone.shape[1] == 5
    with pytest.raises(ValueError, match="padding_side to 'left'"), padded.prefill() as tracer:
        with tracer.invoke(P):
            _ = padded.logits.save()
        with tracer.invoke(LONG):
            _ = padded.logits.save()


def test_a_prompt_that_hides_some_of_its_tokens(model, plain):
    """A mask with holes is not padding: the rows stay where they are."""
    mask = [1, 1, 0, 1, 1]
    with model.trace(P, attention_mask=torch.tensor([mask])):
        stream = model.layers[1].layer_output.save()
        logits = model.logits.save()
    expected = plain(torch.tensor([P]), attention_mask=torch.tensor([mask])).logits
    assert tuple(stream.shape) == (1, 5, 96)
    assert_close(logits, expected, BOUND, "logits")


def test_more_rows_than_prompts(model):
    """A lone prompt's are all its own; those of several are not told apart, and not served."""
    with model.generate(P, max_new_tokens=2, num_beams=2, do_sample=False):
        stream = model.layers[1].layer_output.save()
    assert tuple(stream.shape) == (2, 5, 96)
    for options in ({"num_return_sequences": 2, "do_sample": True}, {"num_beams": 2}):
        with pytest.raises(Unavailable, match="more rows than prompts"):
            with model.generate(max_new_tokens=2, **options) as tracer:
                for prompt in (P, LONG):
                    with tracer.invoke(prompt):
                        _ = model.layers[1].layer_output.save()


def test_a_prompt_of_embeddings(model, plain):
    embeddings = torch.randn(1, 5, 96, generator=torch.Generator().manual_seed(0))
    with model.trace(inputs_embeds=embeddings):
        size = nnsight.save([model.input_size])
        entering = model.layers[0].layer_input.save()
        logits = model.logits.save()
    assert size == [(1, 5)]
    assert torch.equal(entering, embeddings)
    assert_close(logits, plain(inputs_embeds=embeddings).logits, BOUND, "logits")
    with pytest.raises(Unavailable, match="called with embeddings"):
        with model.trace(inputs_embeds=embeddings):
            _ = model.input_ids


# -- loading -----------------------------------------------------------------------------------


def test_the_attention_implementation_is_transformers_own_choice(checkpoint, plain):
    ours = StandardizedTransformer(checkpoint("llama"))
    assert plain.config._attn_implementation == "sdpa"
    with ours.prefill(P):
        pattern = ours.layers[1].self_attn.attention_probabilities.save()
        scores = ours.layers[2].self_attn.attention_scores.save()
        logits = ours.logits.save()
    assert ours.attn_implementation == "sdpa"
    assert torch.equal(logits, plain(torch.tensor([P])).logits)
    assert pattern.shape == scores.shape == (1, 4, 5, 5)
    attention = ours.layers[1].self_attn
    reason = type(attention).attention_probabilities.read_only(attention)
    assert "sdpa" in reason
    assert "attn_implementation='eager'" in reason


def test_a_model_is_asked_about_before_it_is_loaded(checkpoint):
    lazy = load(checkpoint("llama"), engine="hf")
    assert (lazy.num_layers, lazy.hidden_size, lazy.vocab_size) == (3, 96, 304)
    assert (lazy.num_heads, lazy.num_kv_heads, lazy.head_dim, lazy.qk_head_dim) == (4, 2, 32, 32)
    assert lazy.intermediate_size == 160
    assert lazy.support()["logits"] is None
    assert not lazy.dispatched


def test_a_loaded_module_is_wrapped(plain, record, model):
    wrapped = StandardizedTransformer(plain, tokenizer=model.tokenizer)
    with wrapped.prefill(P):
        stream = wrapped.layers[1].layer_output.save()
    assert_close(stream, record.get("layers.1.layer_output"), BOUND, "layer_output")
    assert plain(torch.tensor([P])).logits.shape == (1, 5, 304)


def test_a_path_object_is_a_path(checkpoint):
    lazy = StandardizedTransformer(pathlib.Path(checkpoint("llama")))
    assert lazy.num_layers == 3


def test_two_models_in_one_process_do_not_mix(checkpoint, record, reference):
    one, other = (load(checkpoint(name), engine="hf") for name in ("llama", "gpt2"))
    with one.prefill(P):
        a = one.layers[1].layer_output.save()
    with other.prefill(P):
        b = other.layers[1].layer_output.save()
    assert_close(a, record.get("layers.1.layer_output"), BOUND, "llama")
    assert_close(b, reference("gpt2").run(P).get("layers.1.layer_output"), BOUND, "gpt2")


class Doubling(Mlp):
    def doubled(self):
        return self.mlp_output * 2


def test_family_rename_and_envoys_of_the_caller(checkpoint, record):
    from transformers.models.llama.modeling_llama import LlamaMLP

    wrapped = type("Wrapped", (Doubling, module.ENVOYS[LlamaMLP]), {})
    family = type(
        "Family",
        (),
        {
            "RENAME": module.RENAME,
            "ENVOYS": module.ENVOYS,
            "ARCHITECTURE": module.ARCHITECTURE,
            "num_heads": staticmethod(lambda model: 17),
            "project_on_vocab": staticmethod(lambda model, hidden: hidden[..., :7]),
        },
    )
    model = StandardizedTransformer(
        checkpoint("llama"),
        family=family,
        rename={"self_attn": "mixer", "model.norm": ["norm", "last_norm"]},
        envoys={LlamaMLP: wrapped},
    )
    assert model.family is family
    assert model.num_heads == 17
    assert model.last_norm is model.norm
    with model.prefill(P):
        output = model.layers[1].mixer.attention_output.save()
        twice = model.layers[1].mlp.doubled().save()
    key = "layers.1."
    assert_close(output, record.get(f"{key}self_attn.attention_output"), BOUND, "the alias's")
    assert_close(twice / 2, record.get(f"{key}mlp.mlp_output"), BOUND, "the envoy's")
    assert model.project_on_vocab(torch.zeros(2, 96)).shape == (2, 7)


def test_the_lens_works_outside_of_a_trace_too(model, record):
    stream = record.get("layers.2.layer_output")
    assert_close(model.project_on_vocab(stream), record.get("logits"), BOUND, "the lens")


def test_a_missing_operation_costs_its_values_alone(checkpoint, record, monkeypatch):
    """A release of transformers that names the attention's call otherwise."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    from nnterp.hf import _interior

    found = _interior.operations
    monkeypatch.setattr(
        _interior,
        "operations",
        lambda function: () if function is LlamaAttention.forward else found(function),
    )
    model = StandardizedTransformer(checkpoint("llama"))
    reason = model.support(1)["self_attn.attention_queries"]
    assert "LlamaAttention.forward" in reason
    assert "transformers" in reason
    with pytest.raises(Unavailable, match="LlamaAttention"), model.prefill(P):
        _ = model.layers[1].self_attn.attention_queries
    with model.prefill(P):
        stream = model.layers[1].layer_output.save()
    assert_close(stream, record.get("layers.1.layer_output"), BOUND, "the others")


# -- compiled modules -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single():
    """A model of one block, since compiling takes its time, and its oracle."""
    recipe = RECIPES["llama"]
    config = {**recipe.config, "num_hidden_layers": 1}
    path = build(dataclasses.replace(recipe, name="llama-1", config=config))
    return str(path), Oracle(path, "llama")


def compiled(path, how):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(path).eval()
    if how == "whole":
        return torch.compile(loaded, backend="eager")
    if how == "whole, in place":
        loaded.compile(backend="eager")
    elif how == "a block":
        loaded.model.layers[0] = torch.compile(loaded.model.layers[0], backend="eager")
    elif how == "a forward":
        part = loaded.model.layers[0]
        part.forward = torch.compile(part.forward, backend="eager")
    else:
        loaded.model.layers[0].compile(backend="eager")
    return loaded


COMPILED = ["whole", "whole, in place", "a block", "a block, in place", "a forward"]


@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_module_works_or_is_refused(single, model, how):
    """An edit that is silently dropped is what this was reported as."""
    path, oracle = single
    record = oracle.run(P)
    expected = oracle.edited(P, [Edit("layers.0.layer_output", lambda x: x * 0)])
    kept = edited = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = StandardizedTransformer(compiled(path, how), tokenizer=model.tokenizer)
        except ValueError as error:
            if "compile" in str(error) and "in place" not in how:
                return
            raise
        with found.prefill(P):
            kept = found.layers[0].layer_output.save()
            found.layers[0].layer_output[:] = 0
            edited = found.logits.save()
    assert_close(kept, record.get("layers.0.layer_output"), BOUND, "what was read")
    assert_close(edited, expected.get("logits"), BOUND, "what was edited")


@pytest.mark.parametrize("how", ["call", "forward"])
def test_in_a_trace_what_was_compiled_later_runs_as_it_is_written(single, model, how):
    """A compiler that follows a block leaves the thread's autograd state behind now and then."""
    path, oracle = single
    found = StandardizedTransformer(path, tokenizer=model.tokenizer, dispatch=True)
    compiled_frames = []

    def backend(graph, inputs):
        compiled_frames.append(graph)
        return graph.forward

    module = found._module
    if how == "call":
        module.compile(backend=backend)
    else:
        module.forward = torch.compile(module.forward, backend=backend)
    with found.prefill(P):
        found.layers[0].layer_output[:] = 0
        edited = found.logits.save()
    expected = oracle.edited(P, [Edit("layers.0.layer_output", lambda x: x * 0)])
    assert_close(edited, expected.get("logits"), BOUND, "what was edited")
    assert not compiled_frames
    with torch.no_grad():
        module(torch.tensor([P]))
    assert compiled_frames, "outside of a trace it runs compiled"


# -- order -----------------------------------------------------------------------------------------


def test_values_are_read_in_the_order_that_order_gives(model):
    for layer in (None, 0, 2):
        order = model.order(layer)
        served = {key for key, reason in model.support(layer).items() if reason is None}
        served = {key for key in served if layer is not None or not key.startswith("layers.")}
        assert order.keys() == served
        names = sorted(order, key=order.get)
        with model.prefill(P):
            count = [].save()
            for name in names:
                host = model if layer is None else model.layers[layer]
                for part in name.split("."):
                    host = getattr(host, part)
                count.append(name)
        assert count == names


def test_rank_sorts_the_values_of_the_whole_model(model):
    keys = [("logits", None), ("layer_output", 2), ("layer_output", 0), ("mlp.mlp_output", 0)]
    keys.append(("token_embeddings", None))
    ranked = sorted(keys, key=lambda key: model.rank(*key))
    assert ranked == [
        ("token_embeddings", None),
        ("mlp.mlp_output", 0),
        ("layer_output", 0),
        ("layer_output", 2),
        ("logits", None),
    ]
    with pytest.raises(Unavailable):
        model.rank("mlp.router_logits", 0)
    with pytest.raises(KeyError):
        model.rank("no_such_value")
    with pytest.raises(IndexError):
        model.order(99)


# -- documentation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["trace", "prefill", "decode", "scan", "order", "rank", "project_on_vocab"]
)
def test_methods_are_documented(name):
    assert inspect.getdoc(getattr(StandardizedTransformer, name))


def test_values_are_documented_with_their_layouts():
    for value in StandardizedTransformer.standard_values():
        assert str(value.layout) in value.__doc__
        assert "Raises:" in value.__doc__
