"""What the packaging tests share: the distributions, built once, and environments made of them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Package:
    """One distribution's source."""

    name: str

    @property
    def folder(self) -> Path:
        return ROOT / "packages" / self.name

    @property
    def source(self) -> Path:
        return self.folder / "src"

    @property
    def project(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]

    def files(self) -> set[str]:
        """What the source tree holds, as paths inside a wheel."""
        found = (path for path in self.source.rglob("*") if path.is_file())
        return {path.relative_to(self.source).as_posix() for path in found if path.suffix != ".pyc"}


@dataclass(frozen=True)
class Environment:
    """A virtual environment with a chosen set of distributions and nothing else."""

    folder: Path

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    def python(
        self, code: str, *, path: Path | None = None, warnings: str = "error"
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``code`` away from the source tree, warnings being errors unless said."""
        return run_python(self.interpreter, "-W", warnings, "-c", code, path=path)

    def pip(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "--python", self.interpreter, *arguments]
        return subprocess.run(
            [str(part) for part in command], check=check, capture_output=True, text=True
        )

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found


def run_python(
    interpreter: str | Path, *arguments: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    # The working directory comes first on the path of -c, so it must hold no package.
    return subprocess.run(
        [str(interpreter), *arguments],
        cwd=ROOT / "packages",
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def build(folder: Path, target: str, destination: Path, **variables: str) -> Path:
    """Builds one distribution file out of ``folder``, as a front end does."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(destination)],
        cwd=folder,
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
    )
    (built,) = destination.iterdir()
    return built


PACKAGES = tuple(Package(name) for name in ("nnterp-core", "nnterp-hf", "nnterp-vllm"))


@pytest.fixture(scope="session", params=PACKAGES, ids=lambda package: package.name)
def package(request: pytest.FixtureRequest) -> Package:
    return request.param


@pytest.fixture(scope="session")
def packages() -> tuple[Package, ...]:
    return PACKAGES


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each distribution's wheel, by its name."""
    return {
        package.name: build(package.folder, "wheel", tmp_path_factory.mktemp(package.name))
        for package in PACKAGES
    }


@pytest.fixture(scope="session")
def builder() -> Callable[..., Path]:
    return build


@pytest.fixture(scope="session")
def make_environment(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Environment]:
    def make(*distributions: Path, dependencies: bool, editable: bool = False) -> Environment:
        """An environment with ``distributions``, and what they need if ``dependencies``.

        No index is asked, so a dependency that is not among them is an error. What is editable is
        built by this environment's hatchling.
        """
        environment = Environment(tmp_path_factory.mktemp("environment"))
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(environment.folder)], check=True
        )
        if distributions:
            extra = () if dependencies else ("--no-deps",)
            if editable:
                builder = environment.site_packages / "builder.pth"
                builder.write_text(sysconfig.get_path("purelib"))
                extra += ("--no-build-isolation",)
                for folder in distributions:
                    environment.pip("install", "--no-index", *extra, "--editable", folder)
                builder.unlink()
            else:
                environment.pip("install", "--no-index", *extra, *distributions)
        return environment

    return make


@pytest.fixture(scope="session")
def core_alone(
    wheels: dict[str, Path], make_environment: Callable[..., Environment]
) -> Environment:
    """An environment into which only nnterp-core was installed."""
    return make_environment(wheels["nnterp-core"], dependencies=True)


@pytest.fixture(scope="session")
def here() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code in a new interpreter of this environment."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return run_python(sys.executable, "-c", code)

    return run
