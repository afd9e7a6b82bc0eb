"""Where two engines, or an engine and its options, were found to disagree."""

from __future__ import annotations

import pytest
import torch

from nnterp.core import UnsupportedFamily, load
from nnterp.core.testing import assert_close, build

P = [5, 17, 250, 9, 33]
LONG = list(range(30, 43))
BOUND = 1e-5


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine(request):
    return request.param


@pytest.fixture
def path(checkpoint):
    return checkpoint("llama")


# -- options that would make values wrong ---------------------------------------------

REFUSED = {
    "chunked prefill": {"enable_chunked_prefill": True},
    "chunked prefill with a small budget": {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 16,
    },
    "prefix caching": {"enable_prefix_caching": True},
    "a draft model": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "pipeline parallelism": {"pipeline_parallel_size": 2},
    "graphs without taps": {"enforce_eager": False},
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_an_option_that_would_make_values_wrong_is_refused_at_construction(path, options):
    with pytest.raises(ValueError, match="|".join(options)):
        load(path, engine="vllm", **options)


def test_the_same_options_turned_off_are_no_reason_to_refuse(path):
    model = load(
        path,
        engine="vllm",
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        enforce_eager=True,
        pipeline_parallel_size=1,
    )
    assert model.num_layers == 3


# -- the same text ------------------------------------------------------------------------


def test_the_same_text_is_the_same_ids_on_both_engines_with_and_without_bos(checkpoint):
    for add_bos in (False, True):
        path = checkpoint("llama", add_bos=add_bos)
        models = [load(path, engine=name) for name in ("hf", "vllm")]
        for prompt in ("hello there", "a", [{"role": "user", "content": "hi"}], P):
            hf, vllm = (model.encode(prompt) for model in models)
            assert hf == vllm
        assert (models[0].encode("hello there")[0] == 0) == add_bos
        assert models[0].encode(P) == P


def test_the_model_is_called_with_the_ids_of_the_text(engine, only, open_model, checkpoint):
    with open_model(engine, checkpoint("llama", add_bos=True)) as model:
        for prompt in ("hello there", [{"role": "user", "content": "hi"}]):
            with model.prefill(prompt):
                ids = model.input_ids.save()
                last = model.logits[:, -1].save()
            assert ids.tolist() == [model.encode(prompt)]
            with model.prefill(model.encode(prompt)):
                same = model.logits[:, -1].save()
            assert torch.equal(last, same)
        # nnsight's own trace takes the same prompts.
        with model.trace("hello there"):
            ids = model.input_ids.save()
        assert ids.tolist() == [model.encode("hello there")]


# -- vLLM's implementations ----------------------------------------------------------------


def test_a_model_of_the_transformers_backend_has_each_prompts_own_rows(open_model, checkpoint):
    """It runs its blocks on ``[1, tokens, hidden]``, and its rows were cut on the wrong axis."""
    with open_model("vllm", checkpoint("gpt_neox")) as model:
        alone = {}
        for ids in (P, LONG):
            with model.prefill(ids):
                keys = model.layers[1].self_attn.attention_keys.save()
                stream = model.layers[1].layer_output.save()
            alone[len(ids)] = (stream, keys)
            assert tuple(stream.shape) == (1, len(ids), model.hidden_size)
        with model.prefill() as tracer:
            for ids in (P, LONG):
                with tracer.invoke(ids):
                    found = [model.layers[1].self_attn.attention_keys].save()
                    found.insert(0, model.layers[1].layer_output)
        for both, ids in zip(found, (P, LONG), strict=True):
            for value, expected in zip(both, alone[len(ids)], strict=True):
                assert_close(value, expected, BOUND, f"{len(ids)} tokens")


@pytest.mark.parametrize(
    ("name", "halves"), [("llama", True), ("gemma2", True), ("gpt2", False), ("opt", False)]
)
def test_the_stream_is_what_a_block_hands_on_in_two_halves_or_whole(only, name, halves):
    from nnterp.vllm import FusedLayer

    model = only("vllm", name)
    assert isinstance(model.layers[1], FusedLayer) == halves
    with model.prefill(P):
        raw = model.layers[1].output
        raw = [part.clone() for part in raw] if isinstance(raw, tuple) else [raw.clone()]
        native = raw.save()
        stream = model.layers[1].layer_output.save()
    assert len(native) == (2 if halves else 1)
    assert torch.equal(sum(native), stream[0])


def test_an_implementation_that_the_family_does_not_know_is_refused_at_construction(path):
    """The same checkpoint through vLLM's Transformers backend has blocks of other classes."""
    refusal = None
    try:
        model = load(path, engine="vllm", model_impl="transformers")
    except UnsupportedFamily as error:
        refusal = str(error)
    if refusal is None:
        assert model.support()["layers.*.layer_output"] is None
    else:
        assert "LlamaDecoderLayer" in refusal
        assert "family=" in refusal


# -- constructs of nnsight's -----------------------------------------------------------------


@pytest.fixture
def llama(only):
    return only("vllm", "llama")


def working(model):
    with model.prefill(P):
        logits = model.logits[:, -1].save()
    assert logits.isfinite().all()
    return logits


def test_scan_is_refused_by_name_on_vllm(llama):
    with pytest.raises(NotImplementedError, match="scan"):
        llama.scan(P)


@pytest.mark.parametrize("option", ["validate", "scan"])
@pytest.mark.parametrize("method", ["trace", "prefill"])
def test_an_option_of_a_trace_that_vllm_does_not_have_is_refused_by_name(llama, method, option):
    with (
        pytest.raises(TypeError, match=f"keyword argument '{option}'"),
        getattr(llama, method)(P, **{option: True}),
    ):
        llama.logits.save()
    working(llama)


def test_a_barrier_is_refused_by_name_on_vllm(llama):
    with pytest.raises(NotImplementedError, match="barrier"), llama.prefill() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(P):
            barrier()
    working(llama)


def test_a_session_runs_its_traces_or_is_refused_by_name_on_vllm(llama):
    expected = working(llama)
    with llama.session():
        with llama.prefill(P):
            first = llama.layers[1].layer_output.save()
        with llama.prefill(LONG[:5]):
            llama.layers[1].layer_output = first
            patched = llama.logits[:, -1].save()
    assert_close(patched, expected, BOUND, "the patched prompt's logits")


def test_an_edit_for_every_request_lands_and_is_cleared_on_vllm(llama):
    plain = working(llama)
    with llama.edit() as (_tracer, edit):
        llama.layers[1].layer_output[:] = 0
    with llama.prefill(P):
        stream = llama.layers[2].layer_input.save()
        logits = llama.logits[:, -1].save()
    assert not stream.any()
    assert not torch.equal(logits, plain)
    edit.clear()
    assert torch.equal(working(llama), plain)


def test_an_error_of_such_an_edit_is_raised_with_its_type_on_vllm(llama):
    plain = working(llama)
    with llama.edit() as (_tracer, edit):
        llama.layers[1].layer_output = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="layer_output"), llama.prefill(P):
        _ = llama.logits
    edit.clear()
    assert torch.equal(working(llama), plain)


def test_a_cache_of_modules_works_on_vllm(llama):
    with llama.prefill(P) as tracer:
        cache = tracer.cache(modules=[llama.layers[1].mlp])
        output = llama.layers[1].mlp.mlp_output.save()
    cached = cache[llama.layers[1].mlp.path].output
    assert torch.equal(cached, output[0])


def test_samples_are_the_tokens_that_were_made_on_vllm(llama):
    with llama.decode(P, max_new_tokens=3) as tracer:
        samples = [].save()
        for _ in tracer.iter[0:3]:
            samples.append(llama.samples.item())
        result = tracer.result.save()
    assert samples == list(result.outputs[0].token_ids)
    assert type(samples[0]) is int


# -- two models in one process ------------------------------------------------------------------


def test_closing_one_model_leaves_the_other_running(open_model, checkpoint):
    with open_model("vllm", checkpoint("llama")) as first:
        before = working(first)
        with open_model("vllm", checkpoint("gpt2")) as second:
            working(second)
        assert torch.equal(working(first), before)


def test_a_model_on_each_engine_in_one_process(open_model, checkpoint):
    with open_model("vllm", checkpoint("llama")) as one, open_model("hf", build("llama")) as other:
        found = []
        for model in (one, other, one):
            with model.prefill(P):
                last = model.logits[:, -1].save()
            found.append(last)
    assert torch.equal(found[0], found[2])
    assert_close(found[0], found[1], BOUND, "logits")
