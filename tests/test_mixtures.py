"""Mixtures, sinks, latent and chunked attention: what is particular about them, on both engines.

That every value is right is the conformance suite's; here are the edits people make of routing,
and what one checkpoint of a kind cannot show.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nnterp.core import Unavailable, tracing
from nnterp.core.testing import RECIPES, Edit, Oracle, assert_close, build, row_error

P = [5, 17, 250, 9, 33]
LONG = [(i * 37 + 11) % 300 + 3 for i in range(140)]
BOUND = 1e-5
MIXTURES = sorted(name for name, recipe in RECIPES.items() if recipe.reference.mixture)
SHARED = [name for name in MIXTURES if RECIPES[name].reference.mixture.shared]
LATENT = [name for name in MIXTURES if RECIPES[name].reference.latent]
ENGINES = ("hf", "vllm")


def _sparse(model):
    """The first block that is a mixture."""
    return next(i for i in range(model.num_layers) if model.support(i)["mlp.router_logits"] is None)


def _edited(reference, name, key, fn):
    return reference(name).edited(P, [Edit(key, fn)]).get("logits")[:, -1]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("engine", ENGINES)
def test_routing_is_edited(only, reference, engine, name):
    """An expert taken out by its logit, or forced by it, has the effect it has on plain modules."""
    model = only(engine, name)
    layer = _sparse(model)
    key = f"layers.{layer}.mlp"
    used = int(reference(name).run(P).get(f"{key}.expert_indices")[0, -1, 0])

    def without(logits):
        logits[..., used] = -torch.inf
        return logits

    def forced(logits):
        logits[..., (used + 1) % logits.shape[-1]] = 30.0
        return logits

    with model.prefill(P):
        model.layers[layer].mlp.router_logits[..., used] = -torch.inf
        indices = model.layers[layer].mlp.expert_indices.save()
        taken_out = model.logits[:, -1].save()
    with model.prefill(P):
        logits = model.layers[layer].mlp.router_logits
        logits[..., (used + 1) % logits.shape[-1]] = 30.0
        alone = model.logits[:, -1].save()
    assert not (indices == used).any()
    plain = reference(name).run(P).get("logits")[:, -1]
    for found, edit in ((taken_out, without), (alone, forced)):
        expected = _edited(reference, name, f"{key}.router_logits", edit)
        assert row_error(plain, expected) > 1e-3
        assert_close(found, expected, BOUND, edit.__name__)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("engine", ENGINES)
def test_parts_are_zeroed(only, reference, engine, name):
    """The shared expert or the routed ones alone are what the block adds when the others are 0."""
    model = only(engine, name)
    layer = _sparse(model)
    for part, other in (
        ("shared_expert_output", "routed_output"),
        ("routed_output", "shared_expert_output"),
    ):
        with model.prefill(P):
            mlp = model.layers[layer].mlp
            zeros = torch.zeros_like(getattr(mlp, part))
            setattr(mlp, part, zeros)
            added = mlp.mlp_output.save()
            logits = model.logits[:, -1].save()
        key = f"layers.{layer}.mlp"
        assert_close(added, reference(name).run(P).get(f"{key}.{other}"), BOUND, other)
        expected = _edited(reference, name, f"{key}.{part}", torch.zeros_like)
        assert_close(logits, expected, BOUND, f"without {part}")


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_apart(open_model, checkpoint, reference, implementation):
    """Whichever implementation has the experts' outputs apart serves them, read and written."""
    with open_model(
        "hf", checkpoint("mixtral"), experts_implementation=implementation, dispatch=True
    ) as model:
        with model.prefill(P):
            outputs = model.layers[1].mlp.expert_outputs.save()
        with model.prefill(P):
            model.layers[1].mlp.expert_outputs[:, :, 1] *= 2
            logits = model.logits[:, -1].save()

    def doubled(value):
        value[:, :, 1] *= 2
        return value

    key = "layers.1.mlp.expert_outputs"
    assert_close(outputs, reference("mixtral").run(P).get(key), BOUND, key)
    assert_close(logits, _edited(reference, "mixtral", key, doubled), BOUND, "doubled")


def test_experts_not_apart(open_model, checkpoint):
    """An implementation that has them nowhere is named, with those that have."""
    with (
        open_model("hf", checkpoint("mixtral"), experts_implementation="eager") as model,
        pytest.raises(Unavailable, match=r"'eager'.*experts_implementation='grouped_mm'"),
        model.prefill(P),
    ):
        model.layers[1].mlp.expert_outputs.save()


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(open_model, checkpoint, reference, monkeypatch, name):
    """With latent attention off vLLM serves the interior; with it on it says how to get it."""
    keys = [
        *("attention_queries", "attention_keys", "attention_values"),
        *("attention_scores", "attention_probabilities", "attention_head_outputs"),
    ]
    with open_model("vllm", checkpoint(name)) as model:
        reasons = model.support(1)
        for key in keys:
            assert "VLLM_MLA_DISABLE=1" in reasons[f"self_attn.{key}"]
    from vllm import envs

    # An engine that is alive in this process keeps vLLM's settings frozen.
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    oracle, at = reference(name), "layers.1.self_attn"
    record = oracle.run(P)
    with open_model("vllm", checkpoint(name)) as model:
        with model.prefill(P):
            found = [getattr(model.layers[1].self_attn, key).clone() for key in keys]
            found.save()
        for key, value in zip(keys, found, strict=True):
            bound = 1e-4 if key == "attention_scores" else 2 * BOUND
            assert_close(value, record.get(f"{at}.{key}"), bound, key)
        for key in ("attention_queries", "attention_keys", "attention_values"):
            with model.prefill(P):
                setattr(
                    model.layers[1].self_attn, key, getattr(model.layers[1].self_attn, key) * 0.5
                )
                logits = model.logits[:, -1].save()
            expected = _edited(reference, name, f"{at}.{key}", lambda value: value * 0.5)
            assert_close(logits, expected, BOUND, f"with half of {key}")
        with model.prefill(P):
            model.layers[1].self_attn.attention_head_outputs[:, :, 1] = 0
            logits = model.logits[:, -1].save()

    def without(value):
        value[:, :, 1] = 0
        return value

    expected = _edited(reference, name, f"{at}.attention_head_outputs", without)
    assert_close(logits, expected, BOUND, "without a head")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_chunks(open_model, attention):
    """Scores see their own chunk alone, also beside a longer prompt and on decode steps."""
    llama4 = RECIPES["llama4_text"]
    recipe = replace(
        llama4, name="llama4_chunk", config={**llama4.config, "attention_chunk_size": 8}
    )
    path = build(recipe)
    prompts = (LONG[:13], LONG[:40])
    records = [Oracle(path, recipe).run(prompt, steps=2) for prompt in prompts]
    with open_model("hf", path, attn_implementation=attention, dispatch=True) as model:
        with model.decode(max_new_tokens=3) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    found = [].save()
                    for _ in tracer.iter[0:3]:
                        found.append(model.layers[0].self_attn.attention_probabilities.clone())
    for values, record in zip(found, records, strict=True):
        for step, value in enumerate(values):
            expected = record.get("layers.0.self_attn.attention_probabilities", step)
            assert_close(value, expected[..., -value.shape[-1] :], BOUND, f"step {step}")


def test_long_chunks(only, reference):
    """On vLLM a prompt longer than a chunk has the pattern of plain transformers."""
    model = only("vllm", "llama4_text", max_model_len=256)
    record = reference("llama4_text").run(LONG)
    with model.prefill(LONG):
        found = [layer.self_attn.attention_probabilities.clone() for layer in model.layers]
        found.save()
    for i, value in enumerate(found):
        key = f"layers.{i}.self_attn.attention_probabilities"
        assert_close(value, record.get(key), 2 * BOUND, key)


def test_sink_is_needed(reference):
    """A pattern made without the sink is not the model's: what the suite compares would show it."""
    record = reference("gpt_oss").run(LONG[:40])
    for i in range(3):
        at = f"layers.{i}.self_attn"
        sinks = reference("gpt_oss").model.model.layers[i].self_attn.sinks
        scores = record.get(f"{at}.attention_scores")
        expected = record.get(f"{at}.attention_probabilities")
        assert_close(tracing.pattern(scores, sinks), expected, BOUND, at)
        assert row_error(tracing.pattern(scores), expected) > 1e-2
