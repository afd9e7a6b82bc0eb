"""``compare`` with a third engine on one side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnterp.core.equivalence import Spec, compare

IDS = [[5, 17, 250, 9, 33], [7, 100, 8, 299, 41, 60, 13, 77, 201, 4, 55, 66, 120]]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("ToyModel", None),
        ("WindowOneLonger", "layers.0.self_attn.attention_scores"),
        ("HalfOfTheStream", "layers.0.layer_output"),
    ],
)
def test_a_third_engine_is_compared(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str, first: Any
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import controls

    path = checkpoint("mistral")
    toy = getattr(controls, name)(Path(path))
    report = compare(Spec("hf", path, {"dtype": "float32"}), toy, IDS)
    assert (None if report.first is None else report.first.key) == first
    assert report.b.engine == "toy"
    assert len(report.values) > 40
