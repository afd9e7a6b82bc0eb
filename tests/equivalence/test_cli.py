"""``nnterp compare``: its exit codes, its files, and what it says when it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nnterp.core.equivalence import Report, Spec
from nnterp.core.equivalence.cli import main, parser, read_prompts, side, sides

SCRIPT = Path(sys.executable).with_name("nnterp")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What the command sets for the engines ends with the test."""
    from nnterp.core.equivalence import cli

    for name in cli._QUIET:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([[5, 17, 250, 9, 33], [7, 100, 8]]))
    return str(file)


def test_it_ends_with_0_where_all_agrees(checkpoint, prompts, tmp_path, capsys):
    path = checkpoint("llama")
    files = {name: tmp_path / f"report.{name}" for name in ("json", "html", "png")}
    outputs = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    one_engine = ["--a", "hf:attn_implementation=eager", "--b", "hf:attn_implementation=sdpa"]
    code = main(
        ["compare", path, *one_engine, "--dtype", "float32", "--prompts", prompts, *outputs]
    )
    told = capsys.readouterr()
    assert code == 0, told.err
    assert told.out.startswith("AGREE")
    assert "hf: loading, float32" in told.err
    report = Report.from_json(files["json"].read_text())
    assert report.agree
    assert told.out.strip() == str(report).strip()
    assert report.a.attention == "eager"
    assert "Agree" in files["html"].read_text()
    assert files["png"].stat().st_size > 5000


def test_it_ends_with_1_where_a_value_departs(checkpoint, doctored, prompts, capsys):
    wrong = doctored("llama", "model.layers.1.mlp.down_proj.weight", 1.01)
    other = ["--a", "hf", "--b", f"hf:checkpoint={wrong}"]
    rest = ["--dtype", "float32", "--prompts", prompts, "--quiet"]
    code = main(["compare", checkpoint("llama"), *other, *rest])
    told = capsys.readouterr()
    assert code == 1, told.err
    assert "The first value that departs is layers.1.mlp.mlp_output" in " ".join(told.out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/no/such/checkpoint"], "no checkpoint at '/no/such/checkpoint'"),
        (["x", "--engines", "hf"], "--engines takes two"),
        (["x", "--engines", "hf,other"], "engine 'other' is not installed"),
        (["x", "--a", "hf:dtype"], "'dtype' in 'hf:dtype' is not of the form key=value"),
        (["x", "--prompts", "/no/such/file"], "/no/such/file"),
        (["x", "--json", "/no/such/folder/report.json"], "/no/such/folder is no folder"),
        (["x", "--steps", "-1"], "steps is -1"),
    ],
)
def test_it_ends_with_2_where_it_cannot_run(arguments, said, capsys):
    assert main(["compare", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "could not run: " in told.err
    assert said in told.err
    assert "Traceback" not in told.err


def test_a_misspelt_option_ends_with_2():
    with pytest.raises(SystemExit) as ended:
        main(["compare", "x", "--stepz", "2"])
    assert ended.value.code == 2


@pytest.mark.slow
def test_the_installed_command_with_vllm_in_processes_of_its_own(checkpoint, prompts, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    rest = ["--b", "vllm:max_model_len=256", "--prompts", prompts, "--quiet"]
    ran = subprocess.run(
        [str(SCRIPT), "compare", checkpoint("llama"), "--dtype", "float32", *rest],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("AGREE")


# -- the command line --------------------------------------------------------------


def test_a_side():
    assert side("hf", "path") == Spec("hf", "path", {})
    assert side("hf:dtype=bfloat16,revision=v2", "path", "float32") == Spec(
        "hf", "path", {"dtype": "bfloat16", "revision": "v2"}
    )
    options = side("vllm:tensor_parallel_size=2,enforce_eager=true,checkpoint=other", "path")
    assert options.checkpoint == "other"
    assert options.options["tensor_parallel_size"] == 2
    assert options.options["enforce_eager"] is True
    with pytest.raises(ValueError, match="names no engine"):
        side(":dtype=float32", "path")


def test_sides_replace_engines():
    def of(*arguments):
        return [one.engine for one in sides(parser().parse_args(["compare", "x", *arguments]))]

    assert of() == ["hf", "vllm"]
    assert of("--engines", "vllm,hf") == ["vllm", "hf"]
    assert of("--b", "hf:dtype=bfloat16") == ["hf", "hf"]


def test_prompts_of_every_form(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo words\n")
    assert read_prompts(file) == ["one", "two words"]
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n[1, 2]\n[{"role": "user", "content": "hi"}]\n')
    assert read_prompts(file) == ["one", [1, 2], [{"role": "user", "content": "hi"}]]
    file = tmp_path / "prompts.json"
    file.write_text("[]")
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(file)
