"""The file of known faults: complete, and strict about what is written into it."""

from __future__ import annotations

import pytest

from nnterp.core.faults import read, shipped, within

FAULT = """
[[fault]]
name = "one"
engine = "mine"
version = ">=1.2,<2"
model_types = ["llama"]
values = ["logits"]
cause = "the bias is left out"
advice = "add it"

[[fault.shown]]
checkpoint = "llama"
engine = "mine"
value = "logits"
size = 0.1
patch = "no_head_bias"
"""
MISSING = """
[[missing]]
checkpoint = "llama"
engine = "mine"
version = ">=1"
cause = "it has no such attention"
error = "attention"
"""


def test_every_fault_is_told_whole():
    entries = shipped()
    for fault in entries.faults:
        assert fault.cause
        assert fault.advice
        for shown in fault.shown:
            assert shown.size > 0
    for missing in entries.missing:
        assert missing.cause
        assert missing.error


def test_the_patches_of_all_faults_are_the_oracles():
    from nnterp.core.testing import PATCHES
    from nnterp.core.testing.faults import known

    assert {fault.patch for fault in known().faults} == set(PATCHES)


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "faults.toml"
    file.write_text(FAULT + MISSING)
    entries = read(file)
    (fault,), (missing,) = entries.faults, entries.missing
    assert (fault.name, fault.values, fault.config) == ("one", ("logits",), ())
    assert (fault.shown[0].size, fault.shown[0].version) == (0.1, None)
    assert missing.error == "attention"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('cause = "the bias is left out"\n', "", "must have the fields .*cause"),
        ('cause = "', 'because = "of it"\ncause = "', "no others than"),
        ("[[missing]]", "[[absent]]", "entries called"),
        ('error = "attention"\n', "", "must have the fields .*error"),
        ('value = "logits"', 'value = "layers.0.layer_output"', "none of its values"),
        ('values = ["logits"]', 'values = ["logit"]', "names no value: logit"),
        (FAULT[FAULT.index("[[fault.shown]]") :], "", "shown by no checkpoint"),
        (MISSING, FAULT, "two faults have one name"),
        ('version = ">=1.2,<2"', 'version = "1.2"', "'1.2' is no clause"),
        ('version = ">=1"', 'version = ">=one"', "'>=one' is no clause"),
    ],
)
def test_a_file_that_is_not_as_it_should_be(tmp_path, before, after, said):
    file = tmp_path / "faults.toml"
    content = FAULT + MISSING
    assert before in content
    file.write_text(content.replace(before, after))
    with pytest.raises(ValueError, match=said):
        read(file)


def test_a_patch_that_there_is_not(tmp_path):
    from nnterp.core.testing import PATCHES
    from nnterp.core.testing.faults import known

    file = tmp_path / "faults.toml"
    file.write_text(FAULT.replace("no_head_bias", "no_such_patch"))
    (entry,) = known(file).unpatched(PATCHES)
    assert entry.patch == "no_such_patch"
    assert known().unpatched(PATCHES) == []


@pytest.mark.parametrize(
    ("version", "allowed", "answer"),
    [
        ("0.32.0+cpu", ">=0.27", True),
        ("0.26.1", ">=0.27", False),
        ("0.27", ">=0.27.0,<0.33", True),
        ("0.33.0rc1", "<0.33", False),
        ("5.9", ">=5.17", False),
        ("2.0", "==2", True),
    ],
)
def test_which_releases(version, allowed, answer):
    assert within(version, allowed) is answer
