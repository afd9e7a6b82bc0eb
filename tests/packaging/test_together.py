"""The distributions beside each other: each brings its part of the namespace, none another's."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

# Finds none of the named modules, as in an environment without them.
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if any(name == root or name.startswith(root + ".") for root in {roots}):
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


# Asks, in the other interpreter, what is there of each distribution, and where it is from. Nothing
# of it is imported but the core: what the backends need is not there.
LOOK = """
import json, pathlib, nnterp.core
from importlib.util import find_spec
def folder(name):
    try:
        spec = find_spec("nnterp." + name)
    except ModuleNotFoundError:
        return None
    return spec and pathlib.Path(spec.submodule_search_locations[0])
names = ("core", "hf", "vllm", "families.hf", "families.vllm")
found = {name: where for name in names if (where := folder(name))}
typed = [name for name, where in found.items() if (where / "py.typed").is_file()]
known = [name for name in ("hf", "vllm") if "llama" in nnterp.core.families.known(name)]
engines = nnterp.core.engines()
print(json.dumps([engines, list(found), typed, known, str(found["core"])]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backends", "editable"),
    [((), True), (("hf",), False), (("vllm",), True), (("hf", "vllm"), True)],
    ids=["core editable", "hf", "vllm editable", "all editable"],
)
def test_one_by_one_and_together(packages, wheels, make_environment, backends, editable):
    names = ("nnterp-core", *(f"nnterp-{one}" for one in backends))
    source = {one.name: one.folder for one in packages} if editable else wheels
    environment = make_environment(
        *(source[name] for name in names), dependencies=False, editable=editable
    )
    answer = environment.python(LOOK)
    assert answer.stderr == ""
    engines, found, typed, known, core = json.loads(answer.stdout)
    assert engines == known == list(backends)
    assert found == typed == ["core", *backends, *(f"families.{one}" for one in backends)]
    assert Path(core).is_relative_to(packages[0].source) == editable
    # The core needs nothing. (What is missing of an extra, as nnsight here, pip does not look at.)
    lacking = environment.pip("check", check=False).stdout
    assert ("No broken requirements found." in lacking) == ("hf" not in backends)
    assert ("requires transformers, which is not installed" in lacking) == ("hf" in backends)


@pytest.mark.slow
def test_the_installed_wheels_run_a_model(wheels, make_environment, checkpoint):
    """The wheels beside what they need, which is taken from this environment, and no source."""
    environment = make_environment(wheels["nnterp-core"], wheels["nnterp-hf"], dependencies=False)
    # Its own files alone: what is editable here is in files like this one, which are not read.
    (environment.site_packages / "beside.pth").write_text(sysconfig.get_path("purelib"))
    answer = environment.python(
        "import nnterp.core, nnterp.hf\n"
        f"assert nnterp.hf.__file__.startswith({str(environment.folder)!r})\n"
        f"model = nnterp.core.load({checkpoint('llama')!r}, engine='hf', dispatch=True)\n"
        "print(max(model.verify().values()) < 1e-5)\n",
        warnings="default",
    )
    assert answer.stdout.split() == ["True"], answer.stderr


@pytest.mark.smoke
def test_the_three_wheels_share_the_namespace_and_leave_it_one_by_one(wheels, make_environment):
    environment = make_environment(*wheels.values(), dependencies=False)
    look = (
        "import importlib.util, nnterp.core\n"
        "print(*nnterp.core.engines())\n"
        "for name in ('hf', 'vllm'):\n"
        "    print(importlib.util.find_spec('nnterp.' + name) is not None)\n"
    )
    families = "import nnterp.families.hf, nnterp.families.vllm"

    answer = environment.python(f"{look}{families}")
    assert answer.stderr == ""
    assert answer.stdout.split() == ["hf", "vllm", "True", "True"]

    environment.pip("uninstall", "--yes", "nnterp-vllm")
    answer = environment.python(look)
    assert answer.stderr == ""
    assert answer.stdout.split() == ["hf", "True", "False"]


@pytest.mark.slow
def test_hf_imports_where_vllm_is_not(here):
    answer = here(
        WITHOUT.format(roots=("vllm", "nnterp.vllm", "nnterp.families.vllm"))
        + "from nnterp.hf import StandardizedTransformer"
    )
    assert answer.returncode == 0, answer.stderr


@pytest.mark.slow
def test_vllm_imports_where_hf_is_not(here):
    answer = here(
        WITHOUT.format(roots=("nnterp.hf", "nnterp.families.hf"))
        + "from nnterp.vllm import StandardizedVLLM"
    )
    assert answer.returncode == 0, answer.stderr


@pytest.mark.slow
def test_nnterp_vllm_without_vllm_says_which_to_install(here):
    answer = here(WITHOUT.format(roots=("vllm",)) + "import nnterp.vllm")
    assert answer.returncode == 1
    last = answer.stderr.splitlines()[-1]
    assert "nnterp-vllm[cuda]" in last
    assert "nnterp-vllm[cpu]" in last
