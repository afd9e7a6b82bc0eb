"""The reference page of StandardizedVLLM, sentence by sentence.

Each test quotes the sentence it holds the library to. "On both engines" is checked where a
sentence says so; that every value is right on every family is the conformance suite's.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest
import torch
from nnsight.intervention.envoy import Envoy
from nnsight.modeling.vllm.envoys import parallel_envoys
from nnsight.modeling.vllm.vllm import VLLM
from vllm.platforms import current_platform

from nnterp.core import (
    VOCABULARY,
    OutsideTrace,
    Unavailable,
    UnsupportedFamily,
    WrongShape,
    families,
)
from nnterp.core.protocols import StandardModel
from nnterp.core.testing import Edit, assert_close
from nnterp.core.tracing import Attention, Layer, Mlp, Standardized, Value
from nnterp.families.vllm import llama as module
from nnterp.hf import StandardizedTransformer
from nnterp.vllm import StandardizedVLLM

P = [5, 17, 250, 9, 33]
LONG = list(range(30, 43))
BOUND = 1e-5

INTERIOR = (
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_head_outputs",
)


@pytest.fixture(scope="module")
def llama(only):
    return lambda **options: only("vllm", "llama", **options)


@pytest.fixture(scope="module")
def record(reference):
    return reference("llama").run(P, steps=2)


# -- the class ---------------------------------------------------------------


def test_it_is_nnsights_vllm_engine_renamed_to_the_standard_vocabulary():
    """StandardizedVLLM: nnsight's VLLM engine renamed to the standard vocabulary."""
    assert issubclass(StandardizedVLLM, VLLM)
    for term in VOCABULARY.values():
        for host in term.hosts:
            owner = {"model": StandardizedVLLM, "layer": Layer, "self_attn": Attention, "mlp": Mlp}
            if host in owner:
                assert isinstance(getattr(owner[host], term.name), Value)


def test_its_signature():
    """StandardizedVLLM(repo_id: str, *args: Any, family: ModuleType | None = None, rename: ...)"""
    parameters = inspect.signature(StandardizedVLLM).parameters
    kinds = {name: parameter.kind.name for name, parameter in parameters.items()}
    page = {
        "repo_id": "POSITIONAL_OR_KEYWORD",
        "args": "VAR_POSITIONAL",
        "family": "KEYWORD_ONLY",
        "rename": "KEYWORD_ONLY",
        "envoys": "KEYWORD_ONLY",
        "kwargs": "VAR_KEYWORD",
    }
    assert [name for name in kinds if name in page] == list(page)
    assert {name: kinds[name] for name in page} == page
    assert [parameters[name].default for name in ("family", "rename", "envoys")] == [None] * 3
    # What there is beside the page's asks nothing of a call that follows the page.
    beside = kinds.keys() - page.keys()
    assert {kinds[name] for name in beside} <= {"KEYWORD_ONLY"}
    assert all(parameters[name].default is not inspect.Parameter.empty for name in beside)


def test_its_bases():
    """Bases: Standardized, VLLM"""
    assert StandardizedVLLM.__bases__[:2] == (Standardized, VLLM)


def test_its_modules_answer_to_the_standard_names(llama):
    """A causal language model on the vLLM engine whose modules answer to the standard names."""
    model = llama()
    assert model.embed_tokens is model.model.embed_tokens
    assert model.norm is model.model.norm
    assert model.layers is model.model.layers
    assert len(model.layers) == model.num_layers == 3


def test_it_is_the_counterpart_of_standardized_transformer(llama, checkpoint):
    """StandardizedTransformer's counterpart for nnsight's VLLM: the same vocabulary
    (model.layers[i].self_attn, .mlp, model.norm, model.lm_head), ..."""
    hf, vllm = StandardizedTransformer(checkpoint("llama")), llama()
    for model in (hf, vllm):
        assert isinstance(model.layers[0].self_attn, Attention)
        assert isinstance(model.layers[0].mlp, Mlp)
        assert isinstance(model.norm, Envoy)
        assert isinstance(model.lm_head, Envoy)
    assert set(hf.support()) == set(vllm.support())
    assert set(hf.support(0)) == set(vllm.support(0))


def test_the_same_values_with_the_same_layouts():
    """..., the same values with the same layouts, ..."""
    for term in VOCABULARY.values():
        if "model" in term.hosts:
            hf, vllm = (
                getattr(cls, term.name) for cls in (StandardizedTransformer, StandardizedVLLM)
            )
            assert hf.layout == vllm.layout == term.layout


def test_the_same_methods():
    """..., and the same methods, ..."""

    def owner(cls: type, name: str) -> type:
        return next(base for base in cls.__mro__ if name in vars(base))

    def public(cls: type) -> set[str]:
        return {
            name
            for name in dir(cls)
            if not name.startswith("_")
            and owner(cls, name).__module__.startswith("nnterp.")
            and callable(getattr(cls, name))
        }

    methods = {
        name for name in public(StandardModel) if owner(StandardModel, name) is StandardModel
    }
    assert {"project_on_vocab", "order", "rank", "steer", "skip_layers"} <= methods
    for cls in (StandardizedTransformer, StandardizedVLLM):
        # A protocol's own body would answer None to anything.
        silent = {name for name in methods if owner(cls, name) is StandardModel}
        assert silent == set(), f"{cls.__name__} implements no {silent}"
        for name in methods:
            expected = list(inspect.signature(getattr(StandardModel, name)).parameters)
            if name not in ("trace", "prefill", "decode"):
                assert list(inspect.signature(getattr(cls, name)).parameters) == expected


def test_it_runs_over_the_engines_continuous_batching(llama, reference):
    """..., over the engine's continuous batching."""
    model = llama()
    with model.prefill() as tracer:
        with tracer.invoke(P):
            streams = model.layers[1].layer_output.save()
            together = [model.interleaver.batcher.total].save()
        with tracer.invoke(LONG):
            streams = model.layers[1].layer_output.save()
            together = [model.interleaver.batcher.total].save()
    # One step of the engine held the tokens of both.
    assert together == [[18], [18]]
    for stream, ids in zip(streams, (P, LONG), strict=True):
        expected = reference("llama").run(ids).get("layers.1.layer_output")
        assert_close(stream, expected, BOUND, "layer_output")


def test_the_family_is_a_module_under_the_families(llama):
    """The family is vLLM's own implementation of the checkpoint's model_type, a module under
    nnterp.families.vllm."""
    model = llama()
    assert isinstance(model.family, ModuleType)
    assert model.family.__name__ == "nnterp.families.vllm.llama"
    layer = type(model.layers[0]._module)
    assert layer.__module__ == "vllm.model_executor.models.llama"
    assert layer in model.family.ENVOYS


# -- a trace is a generation request -----------------------------------------


def test_a_trace_is_a_generation_request_of_sixteen_tokens(llama):
    """It is nnsight's VLLM otherwise, with vLLM's defaults: a trace is a generation request
    (max_tokens=16 ... unless you say)"""
    model = llama()
    with model.trace(P, ignore_eos=True) as tracer:
        request = tracer.result.save()
    assert len(request.outputs[0].token_ids) == 16
    with model.trace(P, ignore_eos=True, max_tokens=3) as tracer:
        request = tracer.result.save()
    assert len(request.outputs[0].token_ids) == 3


def test_a_trace_samples_at_temperature_one(llama):
    """(... and temperature=1.0 unless you say)"""
    model = llama()
    found = {}
    for name, settings in {
        "default": {},
        "one": {"temperature": 1.0},
        "half": {"temperature": 0.5},
        "greedy": {"temperature": 0.0},
    }.items():
        with model.trace(P, ignore_eos=True, seed=7, **settings) as tracer:
            request = tracer.result.save()
        found[name] = list(request.outputs[0].token_ids)
    assert found["default"] == found["one"]
    assert found["default"] != found["half"]
    assert found["default"] != found["greedy"]


def test_sampling_settings_go_on_trace_and_invoke(llama, record):
    """sampling settings go on trace/invoke"""
    model = llama()
    with model.trace(temperature=0.0, ignore_eos=True, max_tokens=2) as tracer:
        with tracer.invoke(P):
            request = tracer.result.save()
        with tracer.invoke(P, max_tokens=3):
            request = tracer.result.save()
    tokens = [list(one.outputs[0].token_ids) for one in request]
    assert [len(one) for one in tokens] == [2, 3]
    assert tokens[0] == record.tokens
    with pytest.raises(TypeError, match="temprature"), model.trace(P, temprature=0.0):
        _ = model.logits


def test_one_prompt_per_invoke(llama):
    """one prompt per invoke"""
    model = llama()
    with pytest.raises(ValueError, match="one prompt at a time, not 2"), model.trace([P, LONG]):
        _ = model.logits
    with pytest.raises(ValueError, match="prompt"), model.trace(P, LONG):
        _ = model.logits
    with pytest.raises(ValueError, match="one prompt at a time"), model.trace() as tracer:
        with tracer.invoke([P, LONG]):
            _ = model.logits


def test_a_block_runs_in_the_engines_worker(llama):
    """and a block runs in the engine's worker, where nnterp has to be importable"""
    model = llama()
    with model.prefill(P):
        _ = model.logits
        there = [id(model), str(model.dtype), next(model._module.parameters()).is_meta].save()
    # Here there is a tree without weights; there, the engine's own model.
    assert next(model._module.parameters()).is_meta
    assert there[0] != id(model)
    assert there[1:] == ["torch.float32", False]


# -- what that changes for the values ----------------------------------------


def test_every_values_batch_axis_is_one(llama):
    """A request is one sequence, so every value's batch axis is 1"""
    model = llama()
    with model.prefill() as tracer:
        for ids in (P, LONG):
            with tracer.invoke(ids):
                shapes = {}.save()
                shapes["input_ids"] = model.input_ids.shape
                shapes["input_size"] = model.input_size
                shapes["token_embeddings"] = model.token_embeddings.shape
                layer = model.layers[1]
                shapes["layer_input"] = layer.layer_input.shape
                for name in INTERIOR[:3]:
                    shapes[name] = getattr(layer.self_attn, name).shape
                shapes["attention_scores"] = layer.self_attn.attention_scores.shape
                shapes["attention_probabilities"] = layer.self_attn.attention_probabilities.shape
                shapes["attention_head_outputs"] = layer.self_attn.attention_head_outputs.shape
                shapes["attention_output"] = layer.self_attn.attention_output.shape
                shapes["layer_mid"] = layer.layer_mid.shape
                shapes["mlp_neurons"] = layer.mlp.mlp_neurons.shape
                shapes["mlp_output"] = layer.mlp.mlp_output.shape
                shapes["layer_output"] = layer.layer_output.shape
                shapes["final_norm_output"] = model.final_norm_output.shape
                shapes["logits"] = model.logits.shape
                shapes["next_token_probs"] = model.next_token_probs.shape
    sizes = {
        "hidden": model.hidden_size,
        "vocab": model.vocab_size,
        "neurons": model.intermediate_size,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "qk_head_dim": model.qk_head_dim,
        "batch": 1,
    }
    for found, ids in zip(shapes, (P, LONG), strict=True):
        tokens = {"seq": len(ids), "query": len(ids), "key": len(ids)}
        for name, shape in found.items():
            axes = {**sizes, **tokens, **({"seq": 1} if name == "logits" else {})}
            expected = tuple(axes[axis] for axis in VOCABULARY[name].layout.axes)
            assert tuple(shape) == expected, name


def test_the_whole_prompt_on_the_prefill_and_one_token_on_each_decode_step(llama, record):
    """layer_output is [1, tokens, hidden_size], the whole prompt on the prefill and one token on
    each decode step (tracer.iter)."""
    model = llama()
    with model.decode(P, max_new_tokens=3) as tracer:
        streams = [].save()
        for _ in tracer.iter[0:3]:
            streams.append(model.layers[1].layer_output)
    hidden = model.hidden_size
    assert [tuple(stream.shape) for stream in streams] == [(1, 5, hidden), *[(1, 1, hidden)] * 2]
    for step, stream in enumerate(streams):
        expected = record.get("layers.1.layer_output", step)
        assert_close(stream, expected, BOUND, f"step {step}")


def test_logits_is_this_steps_last_position_only(llama, record):
    """logits is this step's, [1, 1, vocab_size]: the engine computes the last position only."""
    model = llama()
    with model.decode(P, max_new_tokens=3) as tracer:
        logits = [].save()
        for _ in tracer.iter[0:3]:
            logits.append(model.logits)
    for step, found in enumerate(logits):
        assert tuple(found.shape) == (1, 1, model.vocab_size)
        assert_close(found[:, -1], record.get("logits", step)[:, -1], BOUND, f"step {step}")


def test_last_logits_and_next_token_probs_read_the_same_on_both_engines(llama, checkpoint):
    """logits[:, -1] and next_token_probs read the same on both engines."""
    found = []
    for model in (StandardizedTransformer(checkpoint("llama")), llama()):
        with model.prefill(P):
            last = model.logits[:, -1].save()
            probs = model.next_token_probs.save()
        found.append((last, probs))
        assert tuple(last.shape) == tuple(probs.shape) == (1, model.vocab_size)
        assert torch.equal(last.softmax(-1), probs)
    (hf_last, hf_probs), (vllm_last, vllm_probs) = found
    assert_close(vllm_last, hf_last, BOUND, "logits[:, -1]")
    assert_close(vllm_probs, hf_probs, BOUND, "next_token_probs")


def test_values_are_private_copies(llama, record):
    """Values are private copies, so a saved one stays what it was read as."""
    model = llama()
    with model.prefill(P):
        before = model.layers[1].layer_output.save()
        model.layers[1].layer_output[:] = 0
        after = model.layers[1].layer_output.save()
        into_next = model.layers[2].layer_input.save()
    assert_close(before, record.get("layers.1.layer_output"), BOUND, "what was read")
    assert not after.any()
    assert not into_next.any()


def test_the_interior_is_what_enters_and_leaves_the_engines_attention_layer(llama):
    """The queries, keys, values and head outputs are what goes into and comes out of the engine's
    attention layer, for this step's tokens."""
    model = llama()
    with model.decode(P, max_new_tokens=2) as tracer:
        ours, native = [].save(), [].save()
        for _ in tracer.iter[0:2]:
            attention = model.layers[1].self_attn
            (q, k, v), _kwargs = attention.attn.inputs
            ours.append([getattr(attention, name) for name in INTERIOR])
            native.append([q.clone(), k.clone(), v.clone(), attention.attn.output.clone()])
    for step, tokens in enumerate((5, 1)):
        for name, value, raw in zip(INTERIOR, ours[step], native[step], strict=True):
            heads_first = value if name == INTERIOR[-1] else value.transpose(1, 2)
            assert heads_first.shape[:2] == (1, tokens), name
            assert torch.equal(heads_first.reshape(tokens, -1), raw.reshape(tokens, -1)), name


def test_the_scores_and_the_pattern_are_recomputed_from_the_queries_and_keys(llama, record):
    """The scores and the pattern are inside its kernel, so they are recomputed from the queries
    and keys"""
    model = llama()
    with model.prefill(P):
        attention = model.layers[1].self_attn
        scores = attention.attention_scores.save()
        pattern = attention.attention_probabilities.save()
        attention.attention_queries[:] = 0
        flat = attention.attention_probabilities.save()
    key = "layers.1.self_attn.attention_"
    assert_close(scores, record.get(f"{key}scores"), BOUND, "scores")
    assert_close(pattern, record.get(f"{key}probabilities"), BOUND, "pattern")
    expected = torch.ones(5, 5).tril() / torch.arange(1, 6).view(-1, 1)
    assert_close(flat, expected.expand_as(flat), BOUND, "the pattern of equal scores")


@pytest.mark.parametrize("name", ["attention_scores", "attention_probabilities"])
def test_they_are_read_only(llama, name):
    """read-only, ..."""
    model = llama()
    attention = model.layers[1].self_attn
    assert "recomputed" in getattr(type(attention), name).read_only(attention)
    with pytest.raises(Unavailable, match=f"{name} is read-only.*queries, keys or head outputs"):
        with model.prefill(P):
            setattr(model.layers[1].self_attn, name, torch.zeros(1, 4, 5, 5))
    with pytest.raises(Unavailable, match=f"{name} is read-only"), model.prefill(P):
        getattr(model.layers[1].self_attn, name)[:] = 0
        _ = model.logits
    with pytest.raises(Unavailable, match=f"{name} is read-only"), model.prefill(P):
        getattr(model.layers[1].self_attn, name).mul_(2)


@pytest.mark.parametrize("name", ["attention_scores", "attention_probabilities"])
def test_they_are_on_the_prefill_only(llama, name):
    """..., and on the prefill only (a decode step raises Unavailable)."""
    model = llama()
    key = f"self_attn.{name}"
    assert model.support(1)[key] is None
    assert "decode step" in model.support(1, step="decode")[key]
    with pytest.raises(Unavailable, match="decode step"):
        with model.decode(P, max_new_tokens=3) as tracer:
            for _ in tracer.iter[0:3]:
                getattr(model.layers[1].self_attn, name)


def test_there_is_no_attention_mask(llama):
    """There is no attention_mask."""
    model = llama()
    assert not hasattr(model, "attention_mask")
    assert getattr(model, "attention_mask", "none") == "none"
    assert model.support()["attention_mask"] is not None


def test_project_on_vocab_works_inside_a_trace_only(llama):
    """project_on_vocab runs the engine's modules, so it works inside a trace only."""
    model = llama()
    with pytest.raises(OutsideTrace, match="inside a trace"):
        model.project_on_vocab(torch.zeros(1, model.hidden_size))


# -- attributes ---------------------------------------------------------------


def test_family_attribute(llama):
    """family: The vLLM family the checkpoint resolved to, or the family passed."""
    assert vars(llama())["family"] is module
    family = SimpleNamespace(RENAME=module.RENAME, ENVOYS=module.ENVOYS)
    assert vars(StandardizedVLLM(llama().args[0], family=family))["family"] is family


def test_a_model_type_without_a_family_raises(tmp_path):
    """UnsupportedFamily: when no family is passed and vLLM's implementation of the checkpoint's
    model_type has no family under nnterp.families.vllm."""
    from transformers import BloomConfig

    BloomConfig(hidden_size=64, n_layer=1, n_head=2, architectures=["X"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"bloom"', '"mpt"'))
    with pytest.raises(UnsupportedFamily, match=r"'mpt'.*nnterp\.families\.vllm\.mpt"):
        StandardizedVLLM(str(tmp_path))


def test_config_is_the_checkpoints_as_vllms_model_holds_it(llama):
    """config property: The checkpoint's transformers config, as vLLM's model holds it."""
    from transformers import PretrainedConfig

    model = llama()
    assert isinstance(inspect.getattr_static(StandardizedVLLM, "config"), property)
    assert isinstance(model.config, PretrainedConfig)
    assert model.config is model._module.config
    assert model.config.model_type == "llama"
    assert model.config.hidden_size == model.hidden_size == 96


LM_HEAD_OUTPUT = (
    "vLLM never calls lm_head: its logits processor projects with lm_head's weight and applies any "
    "softcap and scale in the same call, on the last position only; read logits"
)
ATTENTION_MASK = "a vLLM request is one unpadded sequence; there is no mask"


@pytest.mark.parametrize(
    ("name", "reason"), [("lm_head_output", LM_HEAD_OUTPUT), ("attention_mask", ATTENTION_MASK)]
)
def test_unavailable_with_this_reason(llama, name, reason):
    """lm_head_output = unavailable("vLLM never calls lm_head: ..."); attention_mask =
    unavailable('a vLLM request is one unpadded sequence; there is no mask')"""
    model = llama()
    assert name in vars(StandardizedVLLM)
    assert model.support()[name] == reason
    assert not hasattr(model, name)
    with pytest.raises(Unavailable) as outside:
        getattr(model, name)
    assert str(outside.value).endswith(reason)
    with pytest.raises(Unavailable) as inside, model.prefill(P):
        getattr(model, name)
    assert str(inside.value) == str(outside.value)
    with pytest.raises(Unavailable), model.prefill(P):
        setattr(model, name, torch.zeros(1, 5))


# -- the values of the model ------------------------------------------------------


def test_token_embeddings_is_the_embedding_modules_output(llama, record):
    """token_embeddings: The embedding module's output, [1, tokens, hidden_size]; ..."""
    model = llama()
    with model.decode(P, max_new_tokens=2) as tracer:
        ours, native = [].save(), [].save()
        for _ in tracer.iter[0:2]:
            ours.append(model.token_embeddings)
            native.append(model.embed_tokens.output.clone())
    for step, tokens in enumerate((5, 1)):
        assert tuple(ours[step].shape) == (1, tokens, model.hidden_size)
        assert torch.equal(ours[step][0], native[step])
        assert_close(ours[step], record.get("token_embeddings", step), BOUND, "embeddings")


def test_final_norm_output_is_the_final_norms_output(llama, record):
    """final_norm_output: The final norm's output, [1, tokens, hidden_size]: every position of the
    step, of which the engine projects the last."""
    model = llama()
    with model.prefill(P):
        normed = model.final_norm_output.save()
        plain = model.logits.save()
    assert_close(normed, record.get("final_norm_output"), BOUND, "every position")
    with model.prefill(P):
        model.final_norm_output[:, :-1] = 0
        others = model.logits.save()
    assert torch.equal(others, plain)
    with model.prefill(P):
        model.final_norm_output[:, -1] = 0
        last = model.logits.save()
    assert not torch.equal(last, plain)


def test_of_a_final_norm_that_returns_two_halves_it_is_the_normed_one(llama):
    """A family whose blocks hand the stream on in two halves calls the final norm with both, and
    the norm returns (normed, residual): this is the normed half."""
    model = llama()
    with model.prefill(P):
        halves = [half.clone() for half in model.norm.output].save()
        normed = model.final_norm_output.save()
    assert len(halves) == 2
    assert torch.equal(halves[0], normed[0])
    assert not torch.equal(halves[1], normed[0])


def test_assign_to_replace_it(llama, reference):
    """Assign to replace it; in-place edits reach the model."""
    model = llama()
    expected = (
        reference("llama").edited(P, [Edit("final_norm_output", lambda x: x * 3)]).get("logits")
    )
    with model.prefill(P):
        model.final_norm_output = model.final_norm_output * 3
        assigned = model.logits.save()
    with model.prefill(P):
        model.final_norm_output.mul_(3)
        in_place = model.logits.save()
    for found in (assigned, in_place):
        assert_close(found[:, -1], expected[:, -1], BOUND, "logits")


def test_input_ids_and_input_size(llama):
    """input_ids(value: Any) -> Any; input_size(value: Any) -> Any"""
    model = llama()
    with model.decode(P, max_new_tokens=2) as tracer:
        found = [].save()
        for _ in tracer.iter[0:2]:
            ids, size = model.input_ids, model.input_size
            found.append((ids.tolist(), size, model.logits[0, -1].argmax().item()))
    assert found[0][:2] == ([P], (1, 5))
    # The step after the prompt is called with the token it chose.
    assert found[1][:2] == ([[found[0][2]]], (1, 1))


# -- project_on_vocab, order, rank ------------------------------------------------


def test_project_on_vocab_is_the_norm_the_head_and_the_logits_processor(llama, record):
    """project_on_vocab: Logits for a residual-stream tensor: the final norm, lm_head, and vLLM's
    logits processor. The logit lens, inside a trace: the modules are the engine's, ..."""
    model = llama()
    with model.prefill(P):
        lenses = [model.project_on_vocab(layer.layer_output) for layer in model.layers].save()
        logits = model.logits.save()
    assert torch.equal(lenses[-1][:, -1:], logits)
    assert_close(lenses[-1], record.get("logits"), BOUND, "the lens on the last block")


@pytest.mark.parametrize("lead", [(), (0,), (1,), (7,), (1, 5), (2, 3, 4)])
def test_hidden_has_any_leading_dimensions(llama, lead):
    """hidden is [..., hidden]; the leading dimensions are kept."""
    model = llama()
    hidden = torch.randn(*lead, model.hidden_size, generator=torch.Generator().manual_seed(0))
    with model.prefill(P):
        lens = model.project_on_vocab(hidden).save()
        rows = model.project_on_vocab(hidden.reshape(-1, hidden.shape[-1])).save()
    assert tuple(lens.shape) == (*lead, model.vocab_size)
    assert torch.equal(lens.reshape(-1, model.vocab_size), rows)
    with pytest.raises(WrongShape, match="96 wide, not 95"), model.prefill(P):
        model.project_on_vocab(torch.zeros(1, 95))


@pytest.mark.parametrize(("name", "arguments"), [("order", ()), ("rank", ("layer_output", 1))])
def test_the_forward_order_is_measured_on_transformers_only(llama, name, arguments):
    """order, rank: Not supported on the vllm engine: the forward order is measured on
    StandardizedTransformer only."""
    method = getattr(llama(), name)
    with pytest.raises(NotImplementedError) as raised:
        method(*arguments)
    assert str(raised.value) == (
        "not supported on the vllm engine: the forward order is measured on "
        "StandardizedTransformer only"
    )
    with pytest.raises(NotImplementedError):
        method(*arguments, 0) if name == "order" else method("logits")


# -- documentation ------------------------------------------------------------------

MEMBERS = (
    "config",
    "lm_head_output",
    "attention_mask",
    "logits",
    "next_token_probs",
    "token_embeddings",
    "final_norm_output",
    "input_ids",
    "input_size",
    "project_on_vocab",
    "order",
    "rank",
)


@pytest.mark.parametrize("name", MEMBERS)
def test_every_name_on_the_page_is_documented(name):
    """Every name exists, with its shapes and what it raises in its documentation."""
    documentation = inspect.getdoc(inspect.getattr_static(StandardizedVLLM, name)) or ""
    assert documentation
    if name == "config":
        return
    assert "Raises:" in documentation
    if name in VOCABULARY:
        assert str(VOCABULARY[name].layout) in documentation
        assert "Unavailable" in documentation
    if name == "project_on_vocab":
        assert "[..., hidden]" in documentation
        assert "[..., vocab]" in documentation
        assert "OutsideTrace" in documentation
        assert "WrongShape" in documentation


def test_the_class_documents_its_parameters_and_what_it_raises():
    documentation = inspect.getdoc(StandardizedVLLM)
    for name in ("repo_id", "family", "rename", "envoys", "**kwargs", "UnsupportedFamily"):
        assert f"{name}:" in documentation


@pytest.mark.parametrize("host", [Layer, Attention, Mlp])
def test_the_values_under_a_layer_are_documented_with_their_layouts(host, llama):
    layer = llama().layers[0]
    envoy = {"layer": layer, "self_attn": layer.self_attn, "mlp": layer.mlp}[host.kind]
    for value in type(envoy).standard_values():
        assert str(value.layout) in value.__doc__
        assert "Raises:" in value.__doc__


# -- parameters ---------------------------------------------------------------


class Family:
    """A family as a user writes one: an object, against vLLM's module classes."""

    def __init__(self, module, **extra):
        self.RENAME, self.ENVOYS = module.RENAME, module.ENVOYS
        self.ARCHITECTURE = module.ARCHITECTURE
        vars(self).update(extra)


class Plain(Envoy):
    """An envoy in the place of nnsight's for one of vLLM's parallel layers."""

    mark = "the caller's"


class Neurons(Mlp):
    """An MLP whose envoy is the caller's."""

    def doubled(self):
        return self.mlp_output * 2


@pytest.fixture(scope="module")
def custom_options():
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.models.llama import LlamaMLP

    class Wrapped(Neurons, module.ENVOYS[LlamaMLP]):
        pass

    family = Family(
        module,
        num_heads=lambda model: 17,
        project_on_vocab=lambda model, hidden: hidden[..., :3] * model.num_heads,
    )
    return {
        "family": family,
        "rename": {"self_attn": "attention", "model.norm": ["norm", "last_norm"]},
        "envoys": {LlamaMLP: Wrapped, MergedColumnParallelLinear: Plain},
        "dispatch": True,
        "max_model_len": 48,
    }


@pytest.fixture(scope="module")
def custom(only, custom_options):
    """A model to which everything was passed that the page names."""
    return lambda: only("vllm", "llama", **custom_options)


def test_family_is_the_family_to_use_instead_of_the_one_looked_up(checkpoint):
    """family: The family to use instead of the one looked up: a module or any object with RENAME
    and ENVOYS written against vLLM's module classes ..."""
    for family in (module, SimpleNamespace(RENAME=module.RENAME, ENVOYS=module.ENVOYS)):
        model = StandardizedVLLM(checkpoint("llama"), family=family)
        assert model.family is family


def test_family_may_define_sizes_and_project_on_vocab(custom):
    """(and any size function or project_on_vocab it defines)"""
    model = custom()
    assert model.num_heads == 17
    assert model.num_kv_heads == 2
    with model.prefill(P):
        stream = model.layers[2].layer_output
        lens = model.project_on_vocab(stream).save()
        kept = stream.save()
    assert torch.equal(lens, kept[..., :3] * 17)


def test_family_applies_to_this_model_only(custom, checkpoint):
    """It applies to this model only; ..."""
    before = families.known("vllm")
    assert custom().num_heads == 17
    assert StandardizedVLLM(checkpoint("llama")).num_heads == 4
    assert families.lookup("llama", "vllm") is module
    assert families.known("vllm") == before


def test_with_family_the_config_is_not_read_for_it(checkpoint, monkeypatch):
    """the config is not read for it, and no model type is named or checked."""
    from nnterp.vllm import _model

    def asked(*args, **kwargs):
        raise AssertionError("the model type was looked at")

    monkeypatch.setattr(_model, "model_type_of", asked)
    monkeypatch.setattr(families, "lookup", asked)
    assert StandardizedVLLM(checkpoint("llama"), family=Family(module)).num_layers == 3


def test_rename_adds_aliases(custom):
    """rename: Extra aliases, merged over the family's; ..."""
    model = custom()
    assert model.layers[0].attention is model.layers[0].self_attn
    assert model.last_norm is model.norm is model.model.norm
    assert model.layers is model.model.layers
    with model.prefill(P):
        ours = model.layers[1].attention.attention_output.save()
        normed = model.last_norm.output[0].clone().save()
        final = model.final_norm_output.save()
    assert tuple(ours.shape) == (1, 5, model.hidden_size)
    assert torch.equal(normed, final[0])


def test_in_rename_a_key_given_wins(checkpoint):
    """...; a key given here wins."""
    model = StandardizedVLLM(checkpoint("llama"), rename={"model.norm": "last_norm"})
    assert model.last_norm is model.model.norm
    assert not hasattr(model, "norm")


def test_envoys_are_merged_over_the_familys_and_nnsights(custom):
    """envoys: Extra envoys= entries, merged over the family's ENVOYS and nnsight's envoys for
    vLLM's parallel layers; a key given here wins."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    model = custom()
    layer = model.layers[1]
    assert isinstance(layer.mlp, Neurons)
    assert type(layer.mlp.gate_up_proj) is Plain
    # What was not named is as it was.
    (parallel,) = {
        envoy for cls, envoy in parallel_envoys().items() if issubclass(RowParallelLinear, cls)
    }
    assert type(layer.mlp.down_proj) is parallel
    assert type(layer.self_attn) is module.ENVOYS[type(layer.self_attn._module)]
    with model.prefill(P):
        twice = model.layers[1].mlp.doubled().save()
        mark = [model.layers[1].mlp.gate_up_proj.mark].save()
        once = model.layers[1].mlp.mlp_output.save()
    assert torch.equal(twice, once * 2)
    assert mark == ["the caller's"]


def test_other_keyword_arguments_are_passed_through(checkpoint, custom):
    """**kwargs: Passed through to VLLM (dispatch, mode, taps, and vLLM's engine arguments)."""
    path, taps = checkpoint("llama"), ["model.layers.*.output"]
    lazy = StandardizedVLLM(path, mode="async")
    assert not lazy.dispatched
    assert lazy._async_engine
    if current_platform.is_cpu():
        # They are for what a captured graph would hide, and nothing is captured there.
        with pytest.raises(ValueError, match="taps: there are no CUDA graphs on the CPU"):
            StandardizedVLLM(path, taps=taps)
    else:
        assert StandardizedVLLM(path, taps=taps).taps == tuple(taps)
    model = custom()
    assert model.dispatched
    assert model.vllm_entrypoint.llm_engine.model_config.max_model_len == 48


# -- on other families ----------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_what_a_family_scales_or_adds_positions_to_comes_after(only, reference, name):
    """what a family scales or adds positions to comes after."""
    model = only("vllm", name)
    with model.prefill(P):
        embedded = model.token_embeddings.save()
        stream = model.layers[0].layer_input.save()
    table = reference(name).run(P)
    assert_close(embedded, table.get("token_embeddings"), BOUND, "the table's rows")
    assert_close(stream, table.get("layers.0.layer_input"), BOUND, "what enters the first block")
    assert (embedded - stream).abs().max() > 0.01


def test_the_processor_applies_the_models_softcapping(only, reference):
    """The processor applies the model's softcapping and scaling where it has them."""
    model = only("vllm", "gemma2")
    assert model.config.final_logit_softcapping == 3.0
    with model.prefill(P):
        lens = model.project_on_vocab(model.layers[-1].layer_output * 50).save()
        plain = model.project_on_vocab(model.layers[-1].layer_output).save()
    assert lens.abs().max() <= 3.0
    assert_close(plain, reference("gemma2").run(P).get("logits"), BOUND, "the lens")


@pytest.mark.slow
def test_repo_id_is_a_hugging_face_repo_id(checkpoint, tmp_path):
    """repo_id: A HuggingFace repo id."""
    folder = tmp_path / "hub" / "models--someone--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / ("0" * 40)).symlink_to(checkpoint("llama"))
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            from nnterp.vllm import StandardizedVLLM

            with StandardizedVLLM("someone/tiny", dtype="float32", max_model_len=64) as model:
                with model.decode("the cat", max_new_tokens=2) as tracer:
                    tokens = tracer.result.save()
                print("ends", model.end_tokens, "made", len(tokens.outputs[0].token_ids))
        """)
    )
    environ = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "ends [1] made 2"
