"""The report itself: what it says, how it is kept, and what it looks like in each form."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import pytest

from nnterp.core.equivalence import Report

from .reports import agreeing, departing, in_bfloat16

EVERY = [agreeing, departing, in_bfloat16]


@pytest.mark.parametrize("make", EVERY)
def test_json_gives_the_report_back(make):
    report = make()
    text = report.to_json()
    assert Report.from_json(text) == report
    content = json.loads(text, parse_constant=pytest.fail)  # no bare Infinity or NaN
    assert content["agree"] == report.agree


def test_json_of_another_layout_is_refused():
    with pytest.raises(ValueError, match="layout"):
        Report.from_json('{"format": 0}')


@pytest.mark.parametrize("make", EVERY)
def test_the_text_is_plain_and_fits_a_hundred_columns(make):
    text = str(make())
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    assert text.splitlines()[0] == ("AGREE" if make().agree else "DEPART")


def test_the_text_of_a_departure():
    lines = str(departing()).splitlines()
    assert "! mlp.mlp_output" in "\n".join(lines)
    last = " ".join(lines[-3:])
    assert "layers.1.mlp.mlp_output" in last
    assert "Known fault: the engine forgets a bias" in last


def test_the_first_departure_and_the_worst_step():
    report = departing()
    assert not report.agree
    value = report["layers.1.mlp.mlp_output"]
    assert (value.layer, value.name) == (1, "mlp.mlp_output")
    step, measure = value.worst()
    assert step == 1
    assert measure.departs
    assert math.isinf(report["layers.1.self_attn.attention_scores"].worst()[1].excess)
    with pytest.raises(KeyError):
        report["layers.99.layer_output"]


@pytest.mark.parametrize("make", EVERY)
def test_the_page_needs_nothing_beside_itself(make):
    page = make().to_html()
    assert page.startswith("<!doctype html>")
    assert not re.search(r"""(src|href)\s*=|@import|url\(|<script|https?://""", page)
    assert "prefers-color-scheme: dark" in page
    assert "&lt;b&gt;" in page  # a prompt's own markup is text
    assert "<b>" not in page


def test_the_heat_map(tmp_path):
    for make in EVERY:
        make().write(png=tmp_path / "map.png")
        assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_heat_map_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"nnterp-core\[plot\]"):
        departing().write(png=tmp_path / "map.png")


def test_a_report_is_read_without_torch(tmp_path):
    file = tmp_path / "report.json"
    departing().write(json=file)
    code = (
        "import sys, pathlib\n"
        "from nnterp.core.equivalence import Report\n"
        "import nnterp.core.equivalence.cli\n"
        f"report = Report.from_json(pathlib.Path({str(file)!r}).read_text())\n"
        "str(report), report.to_html()\n"
        "print(sorted({'torch', 'nnsight', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
