"""How a model is loaded: without weights, with an adapter, and what is refused by its name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from nnterp.core import SIZES, UnsupportedFamily, families, load
from nnterp.core.architectures import LLAMA
from nnterp.core.testing import Oracle, assert_close

P = [5, 17, 250, 9, 33]
BOUND = 1e-5


@pytest.fixture(params=["hf", "vllm"])
def engine(request):
    return request.param


# -- without weights -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "opt_postln", "qwen2_moe"])
def test_sizes_and_support_need_no_weights(engine, name, checkpoint, only, tmp_path):
    """There are none in the folder, so none can be loaded."""
    folder = shutil.copytree(
        checkpoint(name), tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors")
    )
    bare = load(folder, engine=engine, dispatch=False)
    bare.require("layers.*.layer_output", "logits")
    whole = only(engine, name)
    whole.dispatch()
    assert {size: getattr(bare, size) for size in SIZES} == {
        size: getattr(whole, size) for size in SIZES
    }
    for step in ("prefill", "decode"):
        assert bare.support(step=step) == whole.support(step=step)
        assert bare.support(1, step=step) == whole.support(1, step=step)
    assert {weight.device.type for weight in bare._module.parameters()} == {"meta"}


# -- refused by name -----------------------------------------------------------------


def configured(checkpoint, folder, **fields):
    """A copy of the tiny Llama whose config says more."""
    shutil.copytree(checkpoint("llama"), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return str(folder)


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_pattern_that_is_not_causal_is_not_recomputed(engine, field, checkpoint, tmp_path):
    options = {"attn_implementation": "sdpa"} if engine == "hf" else {}
    path = configured(checkpoint, tmp_path / "llama", **field)
    support = load(path, engine=engine, dispatch=False, **options).support(0)
    for name in ("attention_scores", "attention_probabilities"):
        assert next(iter(field)) in support[f"self_attn.{name}"]
    assert support["self_attn.attention_head_outputs"] is None


def test_a_family_that_names_a_module_that_is_not_there(engine, checkpoint):
    """What is under it is not served, and support() says so before a run."""
    family = families.lookup("llama", engine)
    facts = replace(family.ARCHITECTURE, down_projection="fc2")
    envoys = {
        key: type(host.__name__, (host,), {"architecture": facts})
        for key, host in family.ENVOYS.items()
    }
    mine = SimpleNamespace(RENAME=family.RENAME, ENVOYS=envoys)
    model = load(checkpoint("llama"), engine=engine, family=mine, dispatch=False)
    reasons = {key: reason for key, reason in model.support(0).items() if key.startswith("mlp")}
    assert "module that is not there" in reasons["mlp.mlp_neurons"]
    assert reasons["mlp.mlp_output"] is reasons["mlp.mlp_input"] is None


def test_a_family_has_names_and_envoys(engine, checkpoint):
    with pytest.raises(TypeError, match="a family has RENAME and ENVOYS"):
        load(checkpoint("llama"), engine=engine, family=SimpleNamespace())


def test_a_block_is_of_one_of_two_kinds():
    with pytest.raises(ValueError, match="'sequential' or 'parallel', not 'paralel'"):
        replace(LLAMA, block="paralel")


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "mxfp4"},
    ],
    ids=lambda settings: settings["quant_method"],
)
def test_a_quantised_checkpoint_is_refused_by_its_method(engine, checkpoint, tmp_path, settings):
    path = configured(checkpoint, tmp_path / "quantised", quantization_config=settings)
    with pytest.raises(ValueError, match=f"quantised by '{settings['quant_method']}'.*plain"):
        load(path, engine=engine)


def test_quantised_loading_is_refused_by_its_method(checkpoint):
    from transformers import FineGrainedFP8Config

    with pytest.raises(ValueError, match=r"quantised by 'fp8'.*dtype='int8'.*dequantize=True"):
        load(checkpoint("llama"), engine="hf", quantization_config=FineGrainedFP8Config())
    with pytest.raises(ValueError, match="quantization='fp8': no value was measured"):
        load(checkpoint("llama"), engine="vllm", quantization="fp8")
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8': .*rounded"):
        load(checkpoint("llama"), engine="vllm", kv_cache_dtype="fp8")


def test_a_remote_run_is_refused(engine, checkpoint):
    model = load(checkpoint("llama"), engine=engine)
    for opened in (model.trace, model.session, model.prefill):
        with pytest.raises(ValueError, match=r"remote= is not supported.*load the model here"):
            opened(*([] if opened == model.session else [P]), remote=True)
    if engine == "vllm":
        with pytest.raises(ValueError, match="serve= is not supported"):
            model.trace(P, serve="http://localhost:1")


# -- adapters on vLLM ------------------------------------------------------------------

RANK, ALPHA = 4, 8
ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def adapted(checkpoint, tmp_path_factory):
    """A LoRA adapter of the tiny Llama, and the same model with it merged into its weights."""
    adapter = tmp_path_factory.mktemp("adapter")
    merged = Path(shutil.copytree(checkpoint("llama"), tmp_path_factory.mktemp("m") / "merged"))
    weights = load_file(merged / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    factors = {}
    for name in [f"model.layers.{i}.{part}" for i in range(3) for part in ADAPTED]:
        rows, columns = weights[f"{name}.weight"].shape
        down = torch.randn(RANK, columns, generator=generator) * 0.1
        up = torch.randn(rows, RANK, generator=generator) * 0.1
        factors[f"base_model.model.{name}.lora_A.weight"] = down
        factors[f"base_model.model.{name}.lora_B.weight"] = up
        weights[f"{name}.weight"] += ALPHA / RANK * up @ down
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    save_file(factors, adapter / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [part.split(".")[1] for part in ADAPTED],
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    return adapter, merged


@pytest.fixture(scope="module")
def with_adapters(only):
    return only("vllm", "llama", enable_lora=True, max_lora_rank=8)


@pytest.fixture(scope="module")
def asked(adapted):
    from vllm.lora.request import LoRARequest

    return LoRARequest("one", 1, str(adapted[0]))


@pytest.mark.slow
def test_the_values_of_a_request_with_an_adapter_are_those_of_the_merged_model(
    with_adapters, asked, adapted, reference
):
    expected, plain = Oracle(adapted[1], "llama").run(P, steps=2), reference("llama").run(P)
    names = ("layer_input", "self_attn.attention_queries", "mlp.mlp_neurons", "layer_output")
    model = with_adapters
    for request, answers in ((asked, expected), (None, plain), (asked, expected)):
        with model.prefill(P, lora_request=request):
            found = {}.save()
            found["layer_input"] = model.layers[1].layer_input
            found["self_attn.attention_queries"] = model.layers[1].self_attn.attention_queries
            found["mlp.mlp_neurons"] = model.layers[1].mlp.mlp_neurons
            found["layer_output"] = model.layers[1].layer_output
            logits = model.logits.save()
        for name in names:
            assert_close(found[name], answers.get(f"layers.1.{name}"), BOUND, name)
        assert_close(logits[:, -1], answers.get("logits")[:, -1], BOUND, "logits")
    assert not torch.allclose(expected.get("logits"), plain.get("logits"), atol=0.1)

    with model.decode(P, max_new_tokens=3, lora_request=asked) as tracer:
        steps = [].save()
        for _ in tracer.iter[0:3]:
            steps.append(model.logits)
    for step, logits in enumerate(steps):
        assert_close(logits[:, -1], expected.get("logits", step)[:, -1], BOUND, f"step {step}")


@pytest.mark.slow
def test_an_edit_of_a_request_with_an_adapter(with_adapters, asked, adapted):
    with with_adapters.prefill(P, lora_request=asked):
        with_adapters.layers[1].mlp.mlp_output = 0.5 * with_adapters.layers[1].mlp.mlp_output
        logits = with_adapters.logits.save()
    merged = load(adapted[1], engine="hf", dispatch=True, attn_implementation="eager")
    with merged.prefill(P):
        merged.layers[1].mlp.mlp_output = 0.5 * merged.layers[1].mlp.mlp_output
        expected = merged.logits[:, -1].save()
    assert_close(logits[:, -1], expected.detach(), BOUND, "logits")


@pytest.mark.slow
def test_requests_of_different_adapters_in_one_trace_are_refused(with_adapters, asked, reference):
    """vLLM's CPU kernels would give both the adapter of one of them."""
    model = with_adapters
    with (
        pytest.raises(ValueError, match="each lora_request a trace of its own"),
        model.prefill() as tracer,
    ):
        with tracer.invoke(P, lora_request=asked):
            _ = model.logits.save()
        with tracer.invoke(P):
            _ = model.logits.save()
    with model.prefill(P):
        logits = model.logits.save()
    expected = reference("llama").run(P).get("logits")
    assert_close(logits[:, -1], expected[:, -1], BOUND, "the next trace")


def test_adapters_on_an_asynchronous_engine_are_refused(checkpoint):
    with pytest.raises(ValueError, match="enable_lora with mode='async' on the CPU"):
        load(checkpoint("llama"), engine="vllm", enable_lora=True, mode="async")


def altered(checkpoint, name, folder, **settings):
    """The checkpoint under another config."""
    path = Path(shutil.copytree(checkpoint(name), folder / name))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


def test_a_variant_that_no_standard_value_describes_is_refused(checkpoint, tmp_path, engine):
    path = altered(checkpoint, "bloom", tmp_path, apply_residual_connection_post_layernorm=True)
    with pytest.raises(UnsupportedFamily, match="the block adds to the normed stream"):
        load(path, engine=engine)


def test_longrope_is_served_by_vllm_where_it_is_the_checkpoints_own(checkpoint, tmp_path):
    """Past the first length vLLM turns short prompts too by the long factors."""
    config = json.loads((Path(checkpoint("llama")) / "config.json").read_text())
    channels = (
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    ) // 2
    rotary = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1 + i / 9 for i in range(channels)],
        "long_factor": [2 + i / 4 for i in range(channels)],
    }
    path = altered(checkpoint, "llama", tmp_path, rope_parameters=rotary)
    for length in (65, None):
        with pytest.raises(ValueError, match="load it with max_model_len=64"):
            load(path, engine="vllm", max_model_len=length)
    expected = Oracle(path, "llama").run(P).get("logits")
    with load(path, engine="vllm", dtype="float32", max_model_len=64) as model, model.prefill(P):
        logits = model.logits.save()
    assert_close(logits[:, -1], expected[:, -1], BOUND, "logits")
