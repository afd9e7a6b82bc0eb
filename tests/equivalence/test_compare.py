"""What a comparison finds: agreement, the first value that departs, and the fault behind it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from nnterp.core import VOCABULARY, MissingBackend
from nnterp.core.equivalence import Spec, compare

from .conftest import IDS, shared_by_both

pytestmark = pytest.mark.slow

FLOAT32 = {"dtype": "float32"}
VLLM = {**FLOAT32, "max_model_len": 256}


# -- two engines -------------------------------------------------------------------


def test_two_engines_agree_in_float32(checkpoint):
    path = checkpoint("llama")
    report = compare(Spec("hf", path, FLOAT32), Spec("vllm", path, VLLM), IDS)
    assert report.agree
    assert report.first is None
    assert len(report.values) == shared_by_both(3)
    names = {value.name.rsplit(".", 1)[-1] for value in report.values}
    assert names < set(VOCABULARY)
    assert {"token_embeddings", "attention_queries", "layer_mid", "mlp_neurons"} < names
    assert [prompt.ids for prompt in report.prompts] == IDS
    assert all(prompt.other_ids is None for prompt in report.prompts)
    assert all(len(prompt.continuation) == 2 for prompt in report.prompts)
    for value in report.values:
        _, worst = value.worst()
        assert worst.error < 1e-5
        assert worst.cosine > 1 - 1e-9
        assert (value.steps[1] is None) == (
            value.name.endswith(("scores", "probabilities")) and value.layer is not None
        )
    assert report["logits"].steps[0].shapes == ([1, 1, 304], [1, 1, 304])
    assert [agreement.top1 for agreement in report.logits] == [1.0] * 3
    assert [agreement.positions for agreement in report.logits] == [2] * 3
    assert all(agreement.kl < 1e-9 for agreement in report.logits)
    assert set(report.unshared) == {
        "attention_mask",
        "lm_head_output",
        "layers.*.self_attn.attention_scores",
        "layers.*.self_attn.attention_probabilities",
    }
    assert report.a.engine == "hf"
    assert report.b.engine == "vllm"
    assert (report.b.dtype, report.b.device, report.b.attention) == ("float32", "cpu", "CPU_ATTN")
    assert {"torch", "transformers", "nnterp-core"} <= set(report.versions)


def test_two_engines_agree_in_bfloat16(checkpoint):
    path = checkpoint("llama")
    report = compare(
        Spec("hf", path, {"dtype": "bfloat16"}), Spec("vllm", path, {"max_model_len": 256}), IDS
    )
    assert report.agree
    assert report.b.dtype == "bfloat16"  # as a's, which it was not told
    assert "its own float32 run" in report.rule
    stream = report["layers.2.layer_output"].steps[0]
    assert 1e-3 < stream.error < stream.bound
    assert all(1e-3 < rounding < 1e-1 for rounding in stream.rounding)
    assert stream.in_float32 < 1e-5


@pytest.mark.parametrize(
    ("weight", "factor", "key"),
    [
        ("model.layers.1.self_attn.o_proj.weight", 1.001, "layers.1.self_attn.attention_output"),
        ("lm_head.weight", 1.001, "logits"),
    ],
)
def test_a_wrong_weight_on_vllm_is_found(checkpoint, doctored, weight, factor, key):
    wrong = doctored("llama", weight, factor)
    report = compare(Spec("hf", checkpoint("llama"), FLOAT32), Spec("vllm", wrong, VLLM), IDS)
    assert report.first.key == key
    assert report.first.faults == []


def test_a_window_that_is_one_token_longer_is_named(checkpoint):
    path = checkpoint("cohere2_window")
    report = compare(Spec("hf", path, FLOAT32), Spec("vllm", path, VLLM), IDS)
    assert not report.agree
    first = report.first
    assert first.key == "layers.0.self_attn.attention_scores"
    assert first.step == 0
    assert "prompt 1" in first.what  # the other is within the window
    assert len(first.faults) == 1
    assert "one token more than the config's sliding_window" in first.faults[0]


def test_a_head_bias_that_is_left_out_is_named(checkpoint):
    path = checkpoint("phimoe")
    report = compare(Spec("hf", path, FLOAT32), Spec("vllm", path, VLLM), IDS)
    assert [value.key for value in report.values if value.departs] == ["logits", "next_token_probs"]
    assert (report.first.key, report.first.step) == ("logits", 0)
    (fault,) = report.first.faults
    assert "leaves out the bias of PhiMoE's lm_head" in fault
    assert "add lm_head's bias" in fault


def test_within_the_window_the_two_agree(checkpoint):
    path = checkpoint("cohere2_window")
    report = compare(Spec("hf", path, FLOAT32), Spec("vllm", path, VLLM), IDS[:1])
    assert report.agree


def test_where_no_engine_measures_the_order_it_is_found(only):
    model = only("vllm", "llama")
    report = compare(model, model, IDS)
    assert report.agree
    assert any("order" in note for note in report.notes)
    keys = [value.key for value in report.values]
    assert keys[:3] == ["input_ids", "input_size", "token_embeddings"]
    assert keys.index("layers.1.layer_mid") < keys.index("layers.1.mlp.mlp_output")
    assert keys[-3] == "final_norm_output"


@dataclass(frozen=True)
class Alone(Spec):
    """A model that is loaded only where none of the others is there any more."""

    loaded: ClassVar[list[weakref.ref[torch.nn.Module]]] = []

    def load(self):
        assert [one for one in self.loaded if one() is not None] == []
        model = super().load()
        if self.engine == "hf":
            self.loaded.append(weakref.ref(model._module))
        else:
            engine = model.vllm_entrypoint.llm_engine
            runner = engine.engine_core.engine_core.model_executor.driver_worker.model_runner
            self.loaded.append(weakref.ref(runner.model))
        return model


@pytest.mark.parametrize("engines", [("hf", "vllm"), ("vllm", "hf")], ids="-".join)
def test_one_model_is_in_memory_at_a_time(checkpoint, engines):
    path, options = checkpoint("llama"), {"hf": {}, "vllm": {"max_model_len": 256}}
    Alone.loaded.clear()
    a, b = (Alone(name, path, {"dtype": "bfloat16", **options[name]}) for name in engines)
    assert compare(a, b, IDS).agree
    assert len(Alone.loaded) == 4  # each once more in float32


# -- one engine twice --------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "key"),
    [
        ("model.embed_tokens.weight", "token_embeddings"),
        ("model.layers.1.input_layernorm.weight", "layers.1.self_attn.attention_input"),
        ("model.layers.1.self_attn.q_proj.weight", "layers.1.self_attn.attention_queries"),
        ("model.layers.1.self_attn.k_proj.weight", "layers.1.self_attn.attention_keys"),
        ("model.layers.2.self_attn.v_proj.weight", "layers.2.self_attn.attention_values"),
        ("model.layers.0.self_attn.o_proj.weight", "layers.0.self_attn.attention_output"),
        ("model.layers.1.post_attention_layernorm.weight", "layers.1.mlp.mlp_input"),
        ("model.layers.1.mlp.up_proj.weight", "layers.1.mlp.mlp_neurons"),
        ("model.layers.2.mlp.down_proj.weight", "layers.2.mlp.mlp_output"),
        ("model.norm.weight", "final_norm_output"),
        ("lm_head.weight", "lm_head_output"),
    ],
)
def test_a_wrong_weight_is_found_at_its_layer_and_value(checkpoint, doctored, weight, key):
    wrong = doctored("llama", weight, 1.001)
    report = compare(Spec("hf", checkpoint("llama"), FLOAT32), Spec("hf", wrong, FLOAT32), IDS)
    assert report.first.key == key
    assert report.first.step == 0
    before = [value.key for value in report.values]
    for value in report.values[: before.index(key)]:
        assert not value.departs


def test_a_wrong_weight_is_found_beyond_what_bfloat16_explains(checkpoint, doctored):
    wrong = doctored("llama", "model.layers.1.mlp.down_proj.weight", 1.1)
    dtype = {"dtype": "bfloat16"}
    report = compare(Spec("hf", checkpoint("llama"), dtype), Spec("hf", wrong, dtype), IDS)
    assert report.first.key == "layers.1.mlp.mlp_output"


def test_what_bfloat16_hides_is_told(checkpoint, doctored):
    wrong = doctored("llama", "model.layers.1.mlp.down_proj.weight", 1.0005)
    dtype = {"dtype": "bfloat16"}
    report = compare(Spec("hf", checkpoint("llama"), dtype), Spec("hf", wrong, dtype), IDS)
    assert report.agree
    (note,) = report.notes
    assert "layers.1.mlp.mlp_output" in note
    assert "hidden" in note


def test_two_dtypes(checkpoint):
    path = checkpoint("llama")
    report = compare(Spec("hf", path, FLOAT32), Spec("hf", path, {"dtype": "bfloat16"}), IDS)
    assert report.agree
    assert (report.a.dtype, report.b.dtype) == ("float32", "bfloat16")
    assert any("rounding alone" in note for note in report.notes)
    assert report["layers.0.layer_output"].steps[0].error > 1e-3


@pytest.mark.parametrize("name", ["llama", "cohere2_window", "gpt2"])
def test_two_attention_implementations_agree(checkpoint, name):
    a, b = (
        Spec("hf", checkpoint(name), {**FLOAT32, "attn_implementation": attention})
        for attention in ("eager", "sdpa")
    )
    report = compare(a, b, IDS)
    assert report.agree
    assert (report.a.attention, report.b.attention) == ("eager", "sdpa")


@pytest.mark.filterwarnings("ignore:.*applies no cap:UserWarning")
def test_a_softcap_left_out_is_named(checkpoint):
    a, b = (
        Spec("hf", checkpoint("gemma2"), {**FLOAT32, "attn_implementation": attention})
        for attention in ("eager", "sdpa")
    )
    report = compare(a, b, IDS)
    assert report.first.key == "layers.0.self_attn.attention_scores"
    (fault,) = report.first.faults
    assert "softcap" in fault
    assert "attn_implementation='eager'" in fault


def test_another_tokenisation_is_the_first_thing_told(checkpoint):
    plain, with_bos = checkpoint("llama"), checkpoint("llama", add_bos=True)
    report = compare(Spec("hf", plain, FLOAT32), Spec("hf", with_bos, FLOAT32), ["Some words"])
    assert report.first.key == "input_ids"
    assert "prompt 0" in report.first.what
    (prompt,) = report.prompts
    assert prompt.text == "Some words"
    assert prompt.other_ids[1:] == prompt.ids
    assert not any(value.departs for value in report.values)


# -- what is asked for -------------------------------------------------------------


def test_loaded_models_are_compared_as_they_are(open_model, checkpoint):
    with open_model("hf", checkpoint("llama"), dtype=torch.bfloat16) as model:
        with open_model("hf", checkpoint("llama"), dtype=torch.float32) as other:
            report = compare(model, other, IDS)
    assert report.agree
    assert "stated" in report.rule
    assert report["layers.0.layer_output"].steps[0].rounding == (None, 0.0)


def test_prompts_one_by_one_and_together_are_the_same(checkpoint, open_model):
    with open_model("hf", checkpoint("llama"), dtype=torch.float32) as model:
        together = compare(model, model, IDS, together=2)
        alone = compare(model, model, IDS, together=1)
    assert (together.together, alone.together) == (2, 1)
    assert together.prompts == alone.prompts
    assert [v.key for v in together.values] == [v.key for v in alone.values]


def test_some_values(checkpoint, open_model):
    with open_model("hf", checkpoint("llama"), dtype=torch.float32) as model:
        chosen = ["layer_output", "layers.1.mlp.*"]
        report = compare(model, model, IDS, chosen, steps=0)
        with pytest.raises(ValueError, match="'layer_outputs' names no value"):
            compare(model, model, IDS, "layer_outputs")
    assert [value.key for value in report.values] == [
        "layers.0.layer_output",
        "layers.1.mlp.mlp_input",
        "layers.1.mlp.mlp_neurons",
        "layers.1.mlp.mlp_output",
        "layers.1.layer_output",
        "layers.2.layer_output",
    ]
    assert report.steps == 0
    assert len(report.logits) == 1


def test_random_prompts_stand_in_where_there_is_no_tokenizer(checkpoint, open_model):
    path = checkpoint("llama", tokenizer=False)
    with open_model("hf", path, dtype=torch.float32) as model:
        first = compare(model, model, seed=1)
        again = compare(model, model, seed=1)
        other = compare(model, model, seed=2)
    assert first.prompts == again.prompts != other.prompts
    assert [len(prompt.ids) for prompt in first.prompts] == [5, 13, 40]


def test_what_is_wrong_in_a_call_is_said_before_anything_is_loaded():
    a = Spec("hf", "/no/such/checkpoint")
    with pytest.raises(MissingBackend, match="'other' is not installed"):
        compare(a, Spec("other", "/no/such/checkpoint"))
    with pytest.raises(ValueError, match="no prompt"):
        compare(a, a, [])
    with pytest.raises(ValueError, match="steps is -1"):
        compare(a, a, steps=-1)
