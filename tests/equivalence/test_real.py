"""SmolLM2-135M on both engines, as a user would compare it: ``hatch run real``."""

from __future__ import annotations

import pytest

from nnterp.core.equivalence import Spec, compare
from nnterp.core.testing import smollm2

from .conftest import shared_by_both

pytestmark = [pytest.mark.real, pytest.mark.slow]


def compared(dtype):
    path = str(smollm2())
    return compare(
        Spec("hf", path, {"dtype": dtype}),
        Spec("vllm", path, {"dtype": dtype, "max_model_len": 256}),
    )


def test_the_two_engines_agree_in_float32():
    report = compared("float32")
    assert report.agree
    assert len(report.values) == shared_by_both(30)
    assert (
        max(worst[1].error for value in report.values if (worst := value.worst())) < 8e-5
    )  # 5.9e-5 measured
    assert all(agreement.top1 == agreement.top5 == 1 for agreement in report.logits)
    assert max(agreement.kl for agreement in report.logits) < 1e-8


def test_the_two_engines_agree_in_bfloat16():
    report = compared("bfloat16")
    assert report.agree
    assert report.notes == []  # nothing is hidden by the rounding either
    assert 1e-2 < report["layers.29.layer_output"].worst()[1].error < 0.3
    assert all(agreement.top1 == 1 for agreement in report.logits)
    assert max(agreement.kl for agreement in report.logits) < 1e-2
