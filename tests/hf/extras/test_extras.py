"""nnterp.hf with what users install beside it: adapters, quantised weights, several devices.

Run where peft, accelerate and bitsandbytes are installed: ``hatch run extras:test``.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from nnterp.core import Unavailable
from nnterp.core.testing import RECIPES, assert_close, build
from nnterp.hf import StandardizedTransformer

pytestmark = [
    pytest.mark.extras,
    # peft asks transformers by a name that 5.24 calls deprecated, and says what it saves.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning"),
]

P = [5, 17, 250, 9, 33]
BOUND = 1e-5


def standardized(model, **options):
    options = {"attn_implementation": "eager", "dtype": torch.float32, "dispatch": True, **options}
    return StandardizedTransformer(str(model), **options)


def plain(model, **options):
    return AutoModelForCausalLM.from_pretrained(
        str(model), attn_implementation="eager", dtype=torch.float32, **options
    )


def everything(model, layer=1):
    """Every value of one block and the model's own, of the prompt."""
    order = model.order(layer)
    with torch.no_grad(), model.prefill(P):
        found = {}.save()
        found["token_embeddings"] = model.token_embeddings
        for key in sorted(order, key=order.get):
            found[key] = attrgetter(key)(model.layers[layer])
        found["logits"] = model.logits
    return found


# Without gradients throughout: bitsandbytes' maps of 4 bits compute otherwise with them.
def hidden_states(module):
    with torch.no_grad():
        return module(torch.tensor([P]), output_hidden_states=True, output_attentions=True)


def agree(found, expected, what):
    assert_close(found.detach().float().cpu(), expected.detach().float(), BOUND, what)


# -- adapters ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """``adapter("llama", target_modules=[...])`` is its folder, and peft's own model."""
    from peft import LoraConfig, get_peft_model

    def make(name, **options):
        torch.manual_seed(0)
        config = LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
        wrapped = get_peft_model(plain(build(name)), config)
        folder = tmp_path_factory.mktemp(name)
        wrapped.save_pretrained(folder)
        return str(folder), wrapped

    return make


ADAPTERS = {
    "llama": {"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]},
    "gemma2": {"target_modules": ["q_proj", "o_proj", "embed_tokens"]},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "opt": {"target_modules": "all-linear"},
    "falcon": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_in_every_value(adapter, name):
    folder, wrapped = adapter(name, **ADAPTERS[name])
    expected = hidden_states(wrapped)
    model = standardized(build(name), peft=folder)
    assert max(model.verify().values()) < BOUND
    found, without = everything(model), everything(standardized(build(name)))
    assert found.keys() == without.keys()
    agree(found["layer_output"], expected.hidden_states[2], "layer_output")
    agree(found["self_attn.attention_probabilities"], expected.attentions[1], "pattern")
    agree(found["logits"], expected.logits, "logits")
    assert not torch.allclose(found["logits"], without["logits"], atol=1e-2)
    scale = getattr(plain(build(name)).get_input_embeddings(), "embed_scale", 1.0)
    with torch.no_grad():
        rows = wrapped.get_input_embeddings()(torch.tensor([P])) / scale
    agree(found["token_embeddings"], rows, "token_embeddings")


def test_experts_that_an_adapter_wraps_are_refused_where_they_are_not_apart(adapter):
    folder, wrapped = adapter(
        "mixtral", target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]
    )
    model = standardized(build("mixtral"), peft=folder)
    assert "ParamWrapper" in model.support(1)["mlp.expert_outputs"]
    with pytest.raises(Unavailable, match="an adapter wraps the experts"), model.prefill(P):
        _ = model.layers[1].mlp.expert_outputs.save()
    found = everything(model)
    agree(found["layer_output"], hidden_states(wrapped).hidden_states[2], "layer_output")


def test_a_wrapped_model_is_refused_and_each_way_out_works(adapter):
    folder, wrapped = adapter("llama", target_modules=["q_proj"])
    expected = hidden_states(wrapped).logits
    with pytest.raises(ValueError, match=r"PeftModelForCausalLM wraps the model.*peft="):
        StandardizedTransformer(wrapped)
    agree(everything(standardized(build("llama"), peft=folder))["logits"], expected, "peft=")
    agree(everything(StandardizedTransformer(wrapped.merge_and_unload()))["logits"], expected, "m")


# -- quantised weights --------------------------------------------------------------------

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.mark.parametrize(
    "config",
    [
        BitsAndBytesConfig(load_in_8bit=True),
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    ],
    ids=["8 bits", "4 bits"],
)
def test_values_around_quantised_maps_are_those_of_plain_transformers(config):
    # bitsandbytes' CPU code wants widths that its blocks of 64 divide.
    recipe = build(
        replace(RECIPES["llama"], name="wide", config={**RECIPES["llama"].config, **WIDE})
    )
    module = plain(recipe, quantization_config=config)
    block, neurons = module.model.layers[1], []
    block.mlp.down_proj.register_forward_pre_hook(lambda _, given: neurons.append(given[0].clone()))
    expected = hidden_states(module)
    model = standardized(recipe, quantization_config=config)
    assert type(model.layers[1].mlp.down_proj._module) is type(block.mlp.down_proj)
    assert max(model.verify().values()) < BOUND
    found = everything(model)
    agree(found["layer_output"], expected.hidden_states[2], "layer_output")
    agree(found["self_attn.attention_probabilities"], expected.attentions[1], "pattern")
    agree(found["mlp.mlp_neurons"], neurons[0], "neurons")
    agree(found["logits"], expected.logits, "logits")

    with torch.no_grad(), model.prefill(P):
        model.layers[1].mlp.mlp_neurons = 0.5 * model.layers[1].mlp.mlp_neurons
        edited = model.logits.save()
    block.mlp.down_proj.register_forward_pre_hook(lambda _, given: (0.5 * given[0],))
    agree(edited, hidden_states(module).logits, "edited")


# -- devices --------------------------------------------------------------------------------


def spread(folder):
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    return {
        "device_map": dict.fromkeys(parts, "cpu")
        | dict.fromkeys(("model.layers.1", "model.layers.2"), "disk"),
        "offload_folder": str(folder),
    }


@pytest.mark.parametrize("where", ["one device", "auto", "disk"])
def test_a_device_map_changes_no_value(where, tmp_path):
    placed = {"one device": {"device_map": {"": "cpu"}}, "auto": {"device_map": "auto"}}
    model = standardized(build("llama"), **(placed | {"disk": spread(tmp_path)})[where])
    whole = standardized(build("llama"))
    devices = {weight.device.type for weight in model._module.parameters()}
    assert devices == ({"cpu", "meta"} if where == "disk" else {"cpu"})
    assert model.support() == whole.support()
    found, expected = everything(model), everything(whole)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert max(model.verify().values()) < BOUND

    logits = []
    for one in (model, whole):
        with one.prefill(P):
            one.layers[1].self_attn.attention_queries[:] *= 2
            one.layers[2].mlp.mlp_neurons[:] = 0
            edited = one.logits.save()
        with one.decode(P, max_new_tokens=3) as tracer:
            tokens = tracer.result.save()
        logits.append((edited, tokens))
    assert torch.equal(logits[0][0], logits[1][0])
    assert torch.equal(logits[0][1], logits[1][1])
    hidden = torch.ones(1, 1, model.hidden_size)
    assert torch.equal(model.project_on_vocab(hidden), whole.project_on_vocab(hidden))
