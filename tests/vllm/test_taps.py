"""CUDA graphs: what they serve is named when the model is made. None is recorded on the CPU."""

from __future__ import annotations

import pytest

from nnterp.core import Unavailable, load


@pytest.fixture
def tapped(checkpoint):
    """A model without an engine, which would have these taps."""

    def make(name, *taps):
        model = load(checkpoint(name), engine="vllm", dtype="float32")
        model.taps = taps
        return model

    return make


def located(model):
    return set(model._resolve_taps(model._module))


@pytest.mark.parametrize(
    ("name", "standard", "native"),
    [
        ("llama", "layers.*.layer_output", "model.layers.*.output"),
        ("llama", "layers.1.self_attn.attention_queries", "model.layers.1.self_attn.attn.input"),
        ("gpt2", "layers.*.layer_output", "transformer.h.*.output"),
        ("gpt2", "layers.2.mlp.mlp_neurons", "transformer.h.2.mlp.c_proj.input"),
        ("gemma2", "layers.*.mlp.mlp_output", "model.layers.*.post_feedforward_layernorm.output"),
        ("mixtral", "final_norm_output", "model.norm.output"),
    ],
)
def test_a_tap_is_named_as_the_value_or_as_the_module(tapped, name, standard, native):
    of_module = located(tapped(name, native))
    assert located(tapped(name, standard)) == of_module
    assert located(tapped(name, standard, native)) == of_module


def test_what_is_not_served_is_no_tap(tapped):
    with pytest.raises(Unavailable, match="does not serve lm_head_output: vLLM never calls"):
        located(tapped("llama", "layers.*.layer_output", "lm_head_output"))
    with pytest.raises(Unavailable, match="router_logits is no tap: it is inside a module"):
        located(tapped("mixtral", "layers.*.mlp.router_logits"))
    with pytest.raises(IndexError):
        located(tapped("llama", "layers.3.layer_output"))
    with pytest.raises(ValueError, match="names no module"):
        located(tapped("llama", "layers.*.layer_outptu"))
    with pytest.raises(ValueError, match="Transformers backend"):
        located(tapped("olmo2", "layers.*.layer_output"))


def test_what_several_modules_read_is_read_only_under_taps(tapped):
    """An edit lands in the tensor itself: a parallel block's attention and MLP read one."""
    for taps in ((), ("layers.*.layer_output",)):
        model = tapped("gptj", *taps)
        for host, name in (("self_attn", "attention_input"), ("mlp", "mlp_input")):
            module = getattr(model.layers[1], host)
            reason = getattr(type(module), name).read_only(module)
            assert (reason is not None) == bool(taps)
        attention = model.layers[1].self_attn
        assert type(attention).attention_queries.read_only(attention) is None
