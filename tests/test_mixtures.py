"""Mixtures, sinks, latent and chunked attention: what is particular about them, on both engines.

That every value is right is the conformance suite's; here are the edits people make of routing,
and what one checkpoint of a kind cannot show.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nnterp.core import Unavailable, tracing
from nnterp.core.reading import value_at
from nnterp.core.testing import RECIPES, Edit, Oracle, assert_close, build, row_error
from nnterp.core.testing.bench import LOOSER

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


def _edited(oracle, key, fn):
    return oracle.edited(P, [Edit(key, fn)]).get("logits")[:, -1]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("engine", ENGINES)
def test_routing_is_edited(only, reference, engine, name):
    """An expert taken out by its logit, or forced by it, has the effect it has on plain modules."""
    model = only(engine, name)
    # A known fault: vLLM leaves out the bias of PhiMoE's head.
    oracle = reference(name, "no_head_bias" if (engine, name) == ("vllm", "phimoe") else None)
    layer = _sparse(model)
    key = f"layers.{layer}.mlp"
    used = int(oracle.run(P).get(f"{key}.expert_indices")[0, -1, 0])

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
    plain = oracle.run(P).get("logits")[:, -1]
    for found, edit in ((taken_out, without), (alone, forced)):
        expected = _edited(oracle, f"{key}.router_logits", edit)
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
        expected = _edited(reference(name), f"{key}.{part}", torch.zeros_like)
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
    assert_close(logits, _edited(reference("mixtral"), key, doubled), BOUND, "doubled")


def test_experts_not_apart(open_model, checkpoint):
    """An implementation that has them nowhere is named, with those that have."""
    with (
        open_model("hf", checkpoint("mixtral"), experts_implementation="eager") as model,
        pytest.raises(Unavailable, match=r"'eager'.*experts_implementation='grouped_mm'"),
        model.prefill(P),
    ):
        model.layers[1].mlp.expert_outputs.save()


@pytest.mark.parametrize("index", [4, -1])
@pytest.mark.parametrize("name", ["mixtral", "llama4_text"])
def test_no_such_expert(only, reference, name, index):
    """An expert that there is not is refused, and the model goes on."""
    model = only("hf", name)
    layer = _sparse(model)
    with pytest.raises(ValueError, match="expert_indices are below 4"), model.prefill(P):
        model.layers[layer].mlp.expert_indices[:, -1, 0] = index
        model.logits.save()
    with model.prefill(P):
        logits = model.logits.save()
    assert_close(logits, reference(name).run(P).get("logits"), BOUND, "afterwards")


def test_llama4_routing(open_model):
    """Llama 4 has a weight for every expert: one below 0 is still used, none is used twice."""
    llama4 = RECIPES["llama4_text"]
    recipe = replace(llama4, name="llama4_two", config={**llama4.config, "num_experts_per_tok": 2})
    path = build(recipe)
    oracle = Oracle(path, recipe)
    with open_model("hf", path, dispatch=True) as model:
        layer = _sparse(model)
        key = f"layers.{layer}.mlp.expert_weights"
        with model.prefill(P):
            model.layers[layer].mlp.expert_weights *= -1
            written = model.layers[layer].mlp.expert_weights.save()
            logits = model.logits[:, -1].save()
        with pytest.raises(ValueError, match="twice"), model.prefill(P):
            model.layers[layer].mlp.expert_indices[:] = 1
            model.logits.save()
    assert_close(written, -oracle.run(P).get(key), BOUND, key)
    assert_close(logits, _edited(oracle, key, torch.neg), BOUND, "with weights below 0")


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16(only, reference, engine, name):
    """In bfloat16 every value is there, and as near as that dtype is; an edit of routing lands."""
    model, record = only(engine, name, dtype="bfloat16"), reference(name).run(P)
    for i in range(model.num_layers):
        for key, reason in model.support(i).items():
            value = key.rpartition(".")[2]
            if reason is not None or value.startswith("expert_") or value == "attention_scores":
                continue  # the experts' order is the engine's own, and a score may cancel
            with model.prefill(P):
                found = value_at(model, f"layers.{i}.{key}").clone().save()
            expected = record.get(f"layers.{i}.{key}")
            error = (found.float() - expected).norm() / expected.norm()
            assert error < 0.05, f"{key} of layer {i} is off by {error:.1e}"
    layer = _sparse(model)
    with model.prefill(P):
        model.layers[layer].mlp.router_logits[..., 1] = -torch.inf
        indices = model.layers[layer].mlp.expert_indices.save()
        logits = model.logits[:, -1].save()

    def without(value):
        value[..., 1] = -torch.inf
        return value

    expected = _edited(reference(name), f"layers.{layer}.mlp.router_logits", without)
    assert not (indices == 1).any()
    assert (logits.float() - expected).norm() / expected.norm() < 0.05


INTERIOR = (
    *("attention_queries", "attention_keys", "attention_values"),
    *("attention_scores", "attention_probabilities", "attention_head_outputs"),
)


def _halved(value):
    return value * 0.5


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(open_model, checkpoint, reference, name):
    """From queries and latents vLLM serves the interior; what its kernel makes is not written."""
    at = "layers.1.self_attn"
    with open_model("vllm", checkpoint(name)) as model:
        for prompt in (P[:1], P, LONG[:40]):
            record = reference(name).run(prompt)
            with model.prefill(prompt):
                found = [getattr(model.layers[1].self_attn, key).clone() for key in INTERIOR]
                found.save()
            for key, value in zip(INTERIOR, found, strict=True):
                assert_close(value, record.get(f"{at}.{key}"), LOOSER.get(key, BOUND), key)
        for key in ("attention_keys", "attention_values"):
            with pytest.raises(Unavailable, match="VLLM_MLA_DISABLE=1"), model.prefill(P):
                getattr(model.layers[1].self_attn, key)[:] = 0
        with model.prefill(P):
            model.layers[1].self_attn.attention_queries *= 0.5
            logits = model.logits[:, -1].save()
    expected = _edited(reference(name), f"{at}.attention_queries", _halved)
    assert_close(logits, expected, BOUND, "with half of the queries")


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_with_yarn(open_model, name):
    """The released models' rotary stretches the scores too; recomputed, they are the model's."""
    rotary = {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0},
        **{"mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0},
        "original_max_position_embeddings": 64,
    }
    recipe = RECIPES[name]
    config = {**recipe.config, "rope_parameters": rotary, "q_lora_rank": None}
    recipe = replace(recipe, name=f"{name}_yarn", config=config)
    path = build(recipe)
    record = Oracle(path, recipe).run(P)
    with open_model("hf", path, attn_implementation="sdpa", dispatch=True) as model:
        with model.prefill(P):
            found = [layer.self_attn.attention_probabilities.clone() for layer in model.layers]
            found.save()
    for i, pattern in enumerate(found):
        key = f"layers.{i}.self_attn.attention_probabilities"
        assert_close(pattern, record.get(key), BOUND, key)


@pytest.mark.parametrize("name", LATENT)
def test_expanded_attention(open_model, checkpoint, reference, monkeypatch, name):
    """With latent attention off vLLM has the keys and values whole, on every step, and writable."""
    from vllm import envs

    # An engine that is alive in this process keeps vLLM's settings frozen.
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    at = "layers.1.self_attn"
    with open_model("vllm", checkpoint(name)) as model:
        # The longer a prompt, the further off vLLM's CPU kernel: its pattern of 13 tokens by 4e-6,
        # of 40 by 1.1e-5, of 100 by 1.9e-5, where the latent path stays below 1e-5.
        for prompt in (P[:1], P, LONG[:13]):
            record = reference(name).run(prompt, steps=2)
            with model.decode(prompt, max_new_tokens=3) as tracer:
                found = [].save()
                for step in tracer.iter[0:3]:
                    served = model.support(1, step="decode" if step else "prefill")
                    values = {}
                    for key in INTERIOR:
                        if served[f"self_attn.{key}"] is None:
                            values[key] = getattr(model.layers[1].self_attn, key).clone()
                    found.append(values)
            for step, values in enumerate(found):
                assert len(values) == (4 if step else 6)
                for key, value in values.items():
                    expected = record.get(f"{at}.{key}", step)
                    assert_close(value, expected, LOOSER.get(key, BOUND), f"{key} on step {step}")
        for key in ("attention_queries", "attention_head_outputs"):
            with model.prefill(P):
                setattr(
                    model.layers[1].self_attn, key, getattr(model.layers[1].self_attn, key) * 0.5
                )
                logits = model.logits[:, -1].save()
            expected = _edited(reference(name), f"{at}.{key}", _halved)
            assert_close(logits, expected, BOUND, f"with half of {key}")
        _assert_written_stays(model, reference, name)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", LATENT)
def test_written_keys_stay(open_model, checkpoint, reference, name, attention):
    """transformers makes keys and values anew in every step; written ones are seen by them all."""
    with open_model("hf", checkpoint(name), attn_implementation=attention, dispatch=True) as model:
        _assert_written_stays(model, reference, name)
        with (
            pytest.raises(Unavailable, match="beams"),
            model.generate(P, max_new_tokens=2, num_beams=2),
        ):
            model.layers[1].self_attn.attention_keys *= 0.5


def _assert_written_stays(model, reference, name):
    """Keys and values of the prompt and of a step are edited, beside a prompt that is left alone:
    every step after has the logits of plain modules."""
    prompts = (LONG[:7], P)
    with model.decode(max_new_tokens=4) as tracer:
        with tracer.invoke(prompts[0]):
            rows = [].save()
            for _ in tracer.iter[0:4]:
                rows.append(model.logits[:, -1].clone())
        with tracer.invoke(prompts[1]):
            rows = [].save()
            for step in tracer.iter[0:4]:
                if step < 2:
                    attention = model.layers[1].self_attn
                    attention.attention_keys *= 0.5
                    attention.attention_values[:, 1] *= 0.5
                rows.append(model.logits[:, -1].clone())

    def one(value):
        value[:, 1] *= 0.5
        return value

    at = "layers.1.self_attn"
    edits = [
        Edit(f"{at}.{key}", fn, step)
        for step in (0, 1)
        for key, fn in (("attention_keys", _halved), ("attention_values", one))
    ]
    records = (reference(name).run(prompts[0], 3), reference(name).edited(P, edits, 3))
    # Without the edits of the prompt's keys and values, a step after it would show.
    late = reference(name).edited(P, edits[2:], 3)
    assert row_error(late.get("logits", 2)[:, -1], records[1].get("logits", 2)[:, -1]) > 1e-3
    for found, record in zip(rows, records, strict=True):
        for step, logits in enumerate(found):
            assert_close(logits, record.get("logits", step)[:, -1], BOUND, f"step {step}")


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
        assert_close(value, record.get(key), BOUND, key)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scaled", [True, False])
def test_far_queries_are_scaled_as_the_config_says(open_model, engine, scaled):
    """On vLLM too, whose own rule goes by the longest prompt that it is given room for."""
    llama4 = RECIPES["llama4_text"]
    far = {"floor_scale": 16, "attn_temperature_tuning": scaled}
    recipe = replace(llama4, name=f"llama4_far_{scaled}", config={**llama4.config, **far})
    path, prompt = build(recipe), LONG[:40]
    record = Oracle(path, recipe).run(prompt)
    with open_model(engine, path) as model, model.prefill(prompt):
        queries = [layer.self_attn.attention_queries.clone() for layer in model.layers].save()
        logits = model.logits[:, -1].save()
    for i, value in enumerate(queries):
        key = f"layers.{i}.self_attn.attention_queries"
        assert_close(value, record.get(key), BOUND, key)
    assert_close(logits, record.get("logits")[:, -1], BOUND, "logits")


@pytest.mark.parametrize("engine", ENGINES)
def test_with_sinks_every_stream_is_right_and_rows_sum_to_less_than_one(only, reference, engine):
    """GPT-OSS beyond its window: no row is made to sum to one, no stream drifts, steps included."""
    model, prompt, steps = only(engine, "gpt_oss"), LONG[:40], 3
    oracle = reference("gpt_oss")
    record = oracle.run(prompt, steps)
    with torch.no_grad():
        plain = oracle.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    with model.decode(prompt, max_new_tokens=steps + 1) as tracer:
        streams, patterns = [].save(), [].save()
        for step in tracer.iter[0 : steps + 1]:
            for layer in model.layers:
                if step == 0:
                    patterns.append(layer.self_attn.attention_probabilities.clone())
                streams.append(layer.layer_output.clone())
    count = model.num_layers
    for i, stream in enumerate(streams):
        step, layer = divmod(i, count)
        key = f"layers.{layer}.layer_output"
        assert_close(stream, record.get(key, step), BOUND, f"{key} on step {step}")
        if step == 0 and layer < count - 1:  # the last one's is behind the final norm
            assert_close(stream, plain[layer + 1], BOUND, key)
    for layer, pattern in enumerate(patterns):
        key = f"layers.{layer}.self_attn.attention_probabilities"
        sums = pattern.sum(-1)
        assert (sums < 1 - 1e-5).all()
        assert sums.min() < 0.9
        assert_close(sums, record.get(key).sum(-1), BOUND, key)
        assert_close(pattern, record.get(key), BOUND, key)


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
