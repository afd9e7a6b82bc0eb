"""The vocabulary is data that other people's code relies on: a change of it is a decision."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest
import torch

from nnterp import core
from nnterp.core import MODULES, SIZES, VOCABULARY, Layout, Term, protocols
from nnterp.core._vocabulary import MIXTURE, terms
from nnterp.core.tracing import Attention, Layer, Mlp, Standardized, Value

pytestmark = pytest.mark.smoke

# name, hosts, axes, kind, writable, computed, gradients
SNAPSHOT = [
    ("input_ids", "model", "batch seq", "int", True, False, False),
    ("attention_mask", "model", "batch seq", "int", True, False, False),
    ("input_size", "model", "batch seq", "sizes", False, True, False),
    ("token_embeddings", "model", "batch seq hidden", "float", True, False, True),
    ("final_norm_output", "model", "batch seq hidden", "float", True, False, True),
    ("lm_head_output", "model", "batch seq vocab", "float", True, False, True),
    ("logits", "model", "batch seq vocab", "float", True, False, True),
    ("next_token_probs", "model", "batch vocab", "float", False, True, True),
    ("layer_input", "layer", "batch seq hidden", "float", True, False, True),
    ("layer_mid", "layer", "batch seq hidden", "float", True, False, True),
    ("layer_output", "layer", "batch seq hidden", "float", True, False, True),
    ("attention_input", "self_attn linear_attn", "batch seq hidden", "float", True, False, True),
    ("attention_output", "self_attn linear_attn", "batch seq hidden", "float", True, False, True),
    ("attention_queries", "self_attn", "batch heads seq qk_head_dim", "float", True, False, True),
    ("attention_keys", "self_attn", "batch kv_heads seq qk_head_dim", "float", True, False, True),
    ("attention_values", "self_attn", "batch kv_heads seq head_dim", "float", True, False, True),
    ("attention_scores", "self_attn", "batch heads query key", "float", True, False, True),
    ("attention_probabilities", "self_attn", "batch heads query key", "float", True, False, True),
    ("attention_head_outputs", "self_attn", "batch seq heads head_dim", "float", True, False, True),
    ("mlp_input", "mlp", "batch seq hidden", "float", True, False, True),
    ("mlp_output", "mlp", "batch seq hidden", "float", True, False, True),
    ("mlp_neurons", "mlp", "batch seq neurons", "float", True, False, True),
    ("router_logits", "mlp", "batch seq experts", "float", True, False, True),
    ("expert_weights", "mlp", "batch seq top_k", "float", True, False, True),
    ("expert_indices", "mlp", "batch seq top_k", "int", True, False, False),
    ("expert_outputs", "mlp", "batch seq top_k hidden", "float", True, False, True),
    ("routed_output", "mlp", "batch seq hidden", "float", True, False, True),
    ("shared_expert_output", "mlp", "batch seq hidden", "float", True, False, True),
]

PROTOCOLS = {
    "model": protocols.StandardModel,
    "layer": protocols.StandardLayer,
    "self_attn": protocols.StandardAttention,
    "linear_attn": protocols.StandardLinearAttention,
    "mlp": protocols.StandardMlp,
}


def test_the_vocabulary_is_what_it_was():
    found = [
        (
            term.name,
            " ".join(term.hosts),
            " ".join(term.layout.axes),
            term.layout.kind,
            term.writable,
            term.computed,
            term.gradients,
        )
        for term in VOCABULARY.values()
    ]
    assert found == SNAPSHOT


def test_modules_and_sizes_are_what_they_were():
    assert dict(MODULES) == {
        "embed_tokens": "model",
        "layers": "model",
        "norm": "model",
        "lm_head": "model",
        "self_attn": "layer",
        "mlp": "layer",
        "linear_attn": "layer",
    }
    assert SIZES == (
        "num_layers",
        "hidden_size",
        "vocab_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "qk_head_dim",
        "intermediate_size",
    )


def test_what_core_gives_out_is_what_it_was():
    public = {name for name in vars(core) if not name.startswith("_")} - {"annotations"}
    assert public >= {
        "MODULES",
        "SIZES",
        "VOCABULARY",
        "Layout",
        "MissingBackend",
        "OutOfOrder",
        "OutsideTrace",
        "Residual",
        "Term",
        "Unavailable",
        "UnsupportedFamily",
        "WrongShape",
        "engines",
        "families",
        "load",
    }


def test_the_vocabulary_cannot_be_changed():
    with pytest.raises(TypeError):
        VOCABULARY["logits"] = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        VOCABULARY["logits"].writable = False


@pytest.mark.parametrize("term", VOCABULARY.values(), ids=VOCABULARY)
def test_every_term_says_in_a_sentence_what_it_is(term: Term):
    assert VOCABULARY[term.name] is term
    assert len(term.meaning.split()) >= 3
    assert not term.meaning.endswith(".")
    assert set(term.hosts) <= PROTOCOLS.keys()
    assert not (term.computed and term.writable)
    assert term.layout.axes[0] == "batch"


@pytest.mark.parametrize("host", PROTOCOLS)
def test_every_term_of_a_host_is_on_its_protocol_with_its_layout(host):
    protocol = PROTOCOLS[host]
    hints = typing.get_type_hints(protocol, localns={"Tensor": torch.Tensor}, include_extras=True)
    for term in terms(host):
        if isinstance(inspect.getattr_static(protocol, term.name, None), property):
            assert not term.writable
            continue
        annotated = hints[term.name]
        assert typing.get_args(annotated)[0] is torch.Tensor
        assert term.layout in typing.get_args(annotated)


@pytest.mark.parametrize("host", PROTOCOLS)
def test_every_value_on_a_protocol_is_a_term(host):
    hints = typing.get_type_hints(
        PROTOCOLS[host], localns={"Tensor": torch.Tensor}, include_extras=True
    )
    layouts = [name for name, hint in hints.items() if typing.get_origin(hint) is typing.Annotated]
    assert set(layouts) <= {term.name for term in terms(host)}


@pytest.mark.parametrize("name", MODULES)
def test_every_standard_module_is_on_the_protocol_of_its_host(name):
    hints = typing.get_type_hints(PROTOCOLS[MODULES[name]], localns={"Tensor": torch.Tensor})
    assert name in hints


@pytest.mark.parametrize("name", SIZES)
def test_every_size_is_a_property_of_the_model(name):
    for owner in (protocols.StandardModel, Standardized):
        assert isinstance(inspect.getattr_static(owner, name), property)


@pytest.mark.parametrize("host", [Layer, Attention, Mlp])
def test_every_term_of_a_host_is_a_value_of_its_envoy(host):
    found = list(host.standard_values())
    assert [value.name for value in found] == [term.name for term in terms(host.kind)]
    assert all(isinstance(value, Value) for value in found)
    assert all(value.layout == VOCABULARY[value.name].layout for value in found)


def test_the_values_of_a_mixture_are_of_the_feed_forward():
    assert {VOCABULARY[name].hosts for name in MIXTURE} == {("mlp",)}


def test_keys_of_terms():
    assert VOCABULARY["logits"].keys() == ("logits",)
    assert VOCABULARY["layer_output"].keys() == ("layer_output",)
    assert VOCABULARY["attention_output"].keys() == (
        "self_attn.attention_output",
        "linear_attn.attention_output",
    )


def test_layouts():
    layout = Layout.of("batch heads seq qk_head_dim")
    assert layout == Layout(("batch", "heads", "seq", "qk_head_dim"))
    assert str(layout) == "[batch, heads, seq, qk_head_dim]"
    assert [layout.axis(name) for name in ("batch", "seq", "hidden")] == [0, 2, None]
    assert Layout.of("batch seq", "int") != Layout.of("batch seq")
    assert len({layout, Layout.of("batch heads seq qk_head_dim")}) == 1
