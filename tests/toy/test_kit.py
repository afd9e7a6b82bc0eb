"""The conformance kit in an outsider's hands: what passes it, what fails it and where."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nnterp.core.testing.plugin import scopes_of

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

# Every value that the forward computes from the first scores on.
AFTER_SCORES = (
    *("attention_scores", "attention_probabilities", "attention_head_outputs", "attention_output"),
    *("layer_mid", "mlp_input", "mlp_neurons", "mlp_output", "layer_output", "layer_input"),
    *("attention_input", "attention_queries", "attention_keys", "attention_values"),
    *("final_norm_output", "lm_head_output", "logits", "next_token_probs"),
)


def of(value: str) -> set[str]:
    """The tests that a value is wrong, and that what is written to it is."""
    return {f"{test}[{value}]" for test in ("read", "write", "write_on_a_step")}


# What must fail where one thing is wrong, and nothing else may.
FAILS = {
    "llama-toy-bias": of("attention_output")
    | {"ablation[zero_attention]", "identity", "same_on_every_engine", "verify"},
    "llama-toy-heads": of("attention_head_outputs")
    | {"ablation[zero_head]", "pattern", "same_on_every_engine"},
    "llama-toy-half": of("layer_output")
    | {"ablation[zero_block]", "identity", "same_on_every_engine", "verify"}
    | {"lens", "closest_tokens", "skip"},
    # It reads as it should.
    "llama-toy-lost": of("layer_output") - {"read[layer_output]"}
    | {"ablation[zero_block]", "edit_is_a_difference[layer_output]", "edit_of_one_of_two"}
    | {"saved_value_stays", "skip", "steer"},
    # Whatever is computed from the scores, of a prompt longer than the window.
    "mistral-toy-window": {f"read[{name}]" for name in AFTER_SCORES}
    | {"pattern", "same_on_every_engine", "lens", "edit_of_one_of_two", "longest_prompt"}
    | {"decode_together[(0, 1, 2, 3)]", "decode_together[(3, 2, 1, 0)]"},
}


# What an outsider writes beside its adapters, which are in project.py.
CONFTEST = """\
import sys

from nnterp.core.testing.option import add_option

sys.path.insert(0, {here!r})


def pytest_addoption(parser):
    add_option(parser)
    add_option(parser)  # as another conftest may have done


def pytest_configure(config):
    import project

    project.{configure}(config)
"""
TESTS = "from nnterp.core.testing.conformance import *\n"


def run(folder: Path, configure: str, *arguments: str, tests: str = TESTS) -> Any:
    """An outsider's pytest, in a process of its own."""
    (folder / "conftest.py").write_text(CONFTEST.format(here=str(HERE), configure=configure))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib --tb=short\n")
    (folder / "test_mine.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    report = folder / "report.json"
    return SimpleNamespace(
        code=ran.returncode,
        told=ran.stdout + ran.stderr,
        report=json.loads(report.read_text()) if report.is_file() else None,
    )


def names(ids: Iterable[str], label: str) -> set[str]:
    """Tests by what they test, ``"read[logits]"``, without the subject."""
    found = set()
    for test in ids:
        name, _, rest = test.partition("::test_")[2].rstrip("]").partition("[")
        parameters = re.sub(rf"^{label}-|-?{label}$", "", rest)
        found.add(f"{name}[{parameters}]" if parameters else name)
    return found


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The whole kit on engines that are right and on engines that are not."""
    folder = tmp_path_factory.mktemp("outside")
    ran = run(folder, "everything", "--conformance-report", "report.json", "-W", "error")
    assert ran.report is not None, ran.told
    return ran


def failed(ran: Any, label: str) -> set[str]:
    return names(ran.report["subjects"][label]["tests"]["failed_ids"], label)


# -- what passes -----------------------------------------------------------------------------------


def spaced(label: str) -> str:
    """As an id that names no recipe, so that these tests share a process and its one run."""
    return label.replace("-", " ")


@pytest.mark.parametrize("label", ["llama-toy", "mistral-toy"], ids=spaced)
def test_an_engine_in_plain_torch_passes(everything: Any, label: str) -> None:
    subject = everything.report["subjects"][label]
    assert subject["tests"]["failed_ids"] == [], everything.told
    assert subject["tests"]["passed"] > 90
    left_out = {name for name, one in subject["values"].items() if one["status"] != "served"}
    mixture = {name for name in subject["values"] if name.startswith("mlp.")}
    assert left_out == mixture - {"mlp.mlp_input", "mlp.mlp_output", "mlp.mlp_neurons"} | {
        "attention_mask",
        "linear_attn.attention_input",
        "linear_attn.attention_output",
    }
    served = [one for one in subject["values"].values() if one["status"] == "served"]
    assert all(one["error"] <= one["bound"] for one in served)
    read_only = {name for name, one in subject["values"].items() if one.get("writable") is False}
    assert read_only == {"input_size", "next_token_probs"}


def test_the_adapter_is_short() -> None:
    lines = (HERE / "adapter.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


def test_the_engine_stands_on_the_protocols_alone() -> None:
    found = set()
    for node in ast.walk(ast.parse((HERE / "engine.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    assert {name for name in found if name.startswith("nnterp")} == {
        "nnterp.core",
        "nnterp.core.reading",
    }
    assert not {name for name in found if name.startswith(("nnsight", "transformers"))}


def test_a_family_and_a_checkpoint_from_outside_pass(everything: Any) -> None:
    subject = everything.report["subjects"]["helium-hf"]
    assert subject["tests"]["failed_ids"] == [], everything.told
    assert subject["tests"]["passed"] > 90
    assert subject["model_type"] == "helium"


# -- what fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", FAILS, ids=spaced)
def test_what_is_wrong_fails_its_tests_and_no_others(everything: Any, label: str) -> None:
    assert failed(everything, label) == FAILS[label]


def test_a_fault_that_is_listed_is_one_that_shows(everything: Any) -> None:
    """An engine that does what its entry says passes; one that does not any more fails."""
    listed = everything.report["subjects"]["mistral-toy-listed"]
    assert listed["tests"]["failed_ids"] == []
    (fault,) = listed["faults"]
    assert (fault["name"], fault["size"]) == ("toy-window", "inf")
    assert listed["values"]["self_attn.attention_scores"]["error"] <= 1e-5
    assert "known_fault" in failed(everything, "mistral-toy-mended")


def test_the_run_tells_what_is_wrong(everything: Any) -> None:
    assert everything.code == 1
    told = everything.told
    assert "test_read[attention_output-llama-toy-bias]" in told
    assert "layers.0.self_attn.attention_output of one: row [0, 0] is off by" in told
    assert re.search(r"assert \S+ <= 1e-05", told)  # pytest has rewritten the kit's asserts
    first = r"llama-toy-bias: layers\.0\.self_attn\.attention_output of \w+.*: look there first"
    assert re.search(first, told)
    subjects = everything.report["subjects"]
    assert subjects["llama-toy-bias"]["departs"]["value"] == "layers.0.self_attn.attention_output"
    assert subjects["llama-toy"]["departs"] is None
    assert "A contribution is not what its sublayer adds to the stream" in told  # test_identity's
    assert everything.report["idle"] == ["test_missing", "test_mixture"]
    assert everything.report["suite"] == {"passed": 2, "failed": 0, "failed_ids": []}


def test_nothing_is_let_pass_in_silence(tmp_path: Path) -> None:
    """A test that is skipped, a line of no checkpoint, a checkpoint that no engine runs."""
    chosen = "test_lens or test_verify or test_known_entries or test_subjects or test_support"
    # In a process of pytest-xdist's, which hands its part to this one.
    workers = ["-p", "xdist", "-n", "1"]
    ran = run(tmp_path, "careless", *workers, "--conformance-report", "report.json", "-k", chosen)
    assert ran.code == 1, ran.told
    assert failed(ran, "llama-toy") == {"lens", "verify"}
    assert "a conformance test is not skipped" in ran.told
    suite = ran.report["suite"]
    assert names(suite["failed_ids"], "") == {"known_entries", "subjects"}
    idle = {"test_known_fault", "test_missing", "test_mixture", "test_same_on_every_engine"}
    assert set(ran.report["idle"]) == idle
    assert "gemma2" in ran.told
    assert "helium" in ran.told


def test_a_missing_test_is_refused(tmp_path: Path) -> None:
    without = TESTS + "del test_lens\n\n\ndef test_pattern(bench):\n    pass\n"
    ran = run(tmp_path, "careless", "--collect-only", tests=without)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert "not all of them as they are there: test_pattern, test_lens" in ran.told


def collected(folder: Path, *arguments: str) -> set[str]:
    ran = run(folder, "everything", "--collect-only", *arguments)
    assert ran.code == 0, ran.told
    return set(re.findall(r"::(test_\S+?(?:\[.*\])?)$", ran.told, re.MULTILINE))


def test_k_selects_of_all_that_there_is(tmp_path: Path) -> None:
    # Tests that it does not select are not made, where its words tell.
    tests = collected(tmp_path)
    assert len(tests) > 500
    both = {test for test in tests if "half" in test and "logits" in test}
    assert both
    assert collected(tmp_path, "-k", "HALF and logits") == both
    either = {test for test in tests if "lens" in test or "mistral-toy" in test}
    assert collected(tmp_path, "-k", "(test_lens) or mistral-toy") == either
    assert collected(tmp_path, "-k", "test_read[logits-llama-toy]") == {
        "test_read[logits-llama-toy]"
    }


def test_a_model_type_is_divided_where_workers_would_idle() -> None:
    read = [f"test_mine.py::test_read[logits-{name}-vllm]" for name in ("falcon", "falcon_seq")]
    others = ["test_mine.py::test_lens[llama-vllm]", "test_other.py::test_it[1]"]
    alone = scopes_of([*read, *read], 2)
    assert alone == {read[0]: "falcon 0", read[1]: "falcon 1"}
    assert scopes_of(read, 1) == dict.fromkeys(read, "falcon")
    assert scopes_of([*read, *others], 3) == {
        **dict.fromkeys(read, "falcon"),
        others[0]: "llama",
        others[1]: "test_other.py",
    }
