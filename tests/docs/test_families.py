"""The page of families: the report it is made from is whole, and of this vocabulary and these
families."""

from __future__ import annotations

import pytest

from nnterp.core import VOCABULARY, families
from nnterp.core.faults import shipped

from .snippets import generator

pytestmark = pytest.mark.smoke

AGAIN = "run: hatch run families"


def report() -> dict:
    return generator().beside("conformance").report()


def subjects(engine: str) -> list[dict]:
    return [one for one in report()["subjects"].values() if one["engine"] == engine]


@pytest.mark.parametrize("engine", ["hf", "hf-sdpa", "vllm"])
def test_every_family_is_in_the_report(engine: str) -> None:
    name = engine.partition("-")[0]
    reported = {families.module_name(one["model_type"]) for one in subjects(engine)}
    assert reported == set(families.known(name)), AGAIN


def test_nothing_failed_in_the_report() -> None:
    failed = {name: one["tests"] for name, one in report()["subjects"].items()}
    assert {name for name, tests in failed.items() if tests["failed"]} == set()
    assert report()["suite"]["failed"] == 0


def test_every_value_is_in_the_report() -> None:
    keys = {key for term in VOCABULARY.values() for key in term.keys()}  # noqa: SIM118
    for label, one in report()["subjects"].items():
        expected = set() if one["missing"] else keys
        assert set(one["values"]) == expected, f"{label}: {AGAIN}"


def test_every_value_that_is_served_was_measured() -> None:
    unmeasured = [
        (label, key)
        for label, one in report()["subjects"].items()
        for key, value in one["values"].items()
        if value["status"] != "unavailable"
        and (value["error"] is None or float(value["error"]) > value["bound"])
    ]
    assert not unmeasured


def test_every_known_fault_is_in_the_report() -> None:
    shown = {fault["name"] for one in report()["subjects"].values() for fault in one["faults"]}
    tested = {fault.name for fault in shipped().faults if fault.shown and fault.device != "cuda"}
    assert shown == tested, AGAIN
    missing = {
        (one["checkpoint"], one["engine"])
        for one in report()["subjects"].values()
        if one["missing"]
    }
    assert missing == {(one.checkpoint, one.engine) for one in shipped().missing}, AGAIN


def test_each_family_has_its_section() -> None:
    page = (generator().DOCS / "families.md").read_text()
    for model_type in {one["model_type"] for one in report()["subjects"].values()}:
        assert f"(#{model_type})" in page
        assert f"{{ #{model_type} }}" in page
