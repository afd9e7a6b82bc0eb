"""The distributions beside each other: each brings its part of the namespace, none another's."""

from __future__ import annotations

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
