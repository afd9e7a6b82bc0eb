"""What an outsider's conftest sets up: engines, and a family, a checkpoint, known faults."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter import Toy
from controls import CONTROLS, WindowOneLonger, WithoutBias

from nnterp.core import families
from nnterp.core.architectures import LLAMA
from nnterp.core.testing import RECIPES, Recipe
from nnterp.core.testing.faults import known
from nnterp.core.testing.plugin import install

FAULTS = """\
[[fault]]
name = "toy-window"
engine = "toy"
version = ">=2"
model_types = ["mistral"]
values = ["attention_scores"]
cause = "the window holds one token more"
advice = "lower sliding_window by one"

[[fault.shown]]
checkpoint = "mistral"
engine = "toy-listed"
value = "layers.0.self_attn.attention_scores"
size = inf
patch = "window_one_longer"

# It does not show.
[[fault.shown]]
checkpoint = "mistral"
engine = "toy-mended"
value = "layers.0.self_attn.attention_scores"
size = inf
patch = "window_one_longer"
"""

STRANGER = """
[[fault.shown]]
checkpoint = "gemma2"
engine = "toy"
value = "layers.0.self_attn.attention_scores"
size = inf
patch = "window_one_longer"
"""

HELIUM = Recipe(
    name="helium",
    model_type="helium",
    config={
        **RECIPES["llama"].config,
        # Its attention's last projection is as wide as the stream.
        "hidden_size": 128,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
    },
)
"""A checkpoint of an architecture for which this project has no family."""


@dataclass(frozen=True)
class Transformers:
    """nnterp.hf with a family of one's own."""

    model_types: tuple[str, ...] = ("helium", "llama")
    name = label = "hf"

    @property
    def version(self) -> str:
        import transformers

        return transformers.__version__

    def load(self, path: Path, **options: Any) -> Any:
        from nnterp.hf import StandardizedTransformer

        return StandardizedTransformer(
            str(path), attn_implementation="eager", dispatch=True, **options
        )

    def close(self, model: Any) -> None:
        pass


def helium() -> Any:
    """The family of helium on transformers."""
    from transformers.models.helium.modeling_helium import (
        HeliumAttention,
        HeliumDecoderLayer,
        HeliumMLP,
    )

    from nnterp.hf import declare

    facts = replace(LLAMA, model_type="helium")
    rename, envoys = declare(
        facts, layer=HeliumDecoderLayer, attention=HeliumAttention, mlp=HeliumMLP
    )
    return SimpleNamespace(ARCHITECTURE=facts, RENAME=rename, ENVOYS=envoys)


def everything(config: pytest.Config) -> None:
    """All that is to pass, and all that is to fail."""
    torch.set_num_threads(1)
    families.register(helium(), "helium", engine="hf")
    faults = config.rootpath / "faults.toml"
    faults.write_text(FAULTS)
    install(
        config,
        [
            Transformers(),
            Toy(),
            *(Toy(label, model, (name,)) for label, (name, model) in CONTROLS.items()),
            Toy("toy-listed", WindowOneLonger, ("mistral",)),
            Toy("toy-mended", model_types=("mistral",)),
        ],
        recipes=[*RECIPES.values(), HELIUM],
        known=known(faults),
    )


def careless(config: pytest.Config) -> None:
    """A checkpoint that no engine runs, a line of no checkpoint, and tests that are skipped."""
    torch.set_num_threads(1)
    faults = config.rootpath / "faults.toml"
    faults.write_text(FAULTS[: FAULTS.index("[[fault.shown]]")] + STRANGER)
    install(
        config,
        [Toy(model=WithoutBias)],
        recipes=[RECIPES["llama"], HELIUM],
        known=known(faults),
    )
    config.pluginmanager.register(sys.modules[__name__])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = {"test_lens": pytest.mark.skip, "test_verify": pytest.mark.xfail}
    for item in items:
        name = item.name.partition("[")[0]
        if name in marks:
            item.add_marker(marks[name](reason="it is in the way"))
