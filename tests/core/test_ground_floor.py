"""Errors, families and engines: plain Python, whatever is installed beside it."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nnterp import core
from nnterp.core import (
    MissingBackend,
    OutOfOrder,
    OutsideTrace,
    Unavailable,
    UnsupportedFamily,
    WrongShape,
    engines,
    families,
    load,
)

CORE = pathlib.Path(core.__file__).parents[2]


# -- errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (Unavailable, AttributeError),
        (OutsideTrace, AttributeError),
        (OutOfOrder, RuntimeError),
        (WrongShape, ValueError),
        (UnsupportedFamily, ValueError),
        (MissingBackend, ImportError),
    ],
)
def test_errors_are_caught_by_pythons_own_names(error, base):
    assert issubclass(error, base)
    assert error.__doc__
    assert error.__module__.startswith("nnterp.core")


def test_out_of_order_is_caught_by_nnsights_name_too():
    from nnsight.intervention.interleaver import OutOfOrderError

    from nnterp.core import tracing

    assert issubclass(tracing.OutOfOrder, OutOfOrder)
    assert issubclass(tracing.OutOfOrder, OutOfOrderError)


# -- families -----------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """Whatever a test registers is forgotten."""
    monkeypatch.setattr(families, "_registered", dict(families._registered))


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_family_is_the_module_of_its_model_type(engine):
    found = families.lookup("llama", engine)
    assert found.__name__ == f"nnterp.families.{engine}.llama"
    assert isinstance(found.RENAME, dict)
    assert isinstance(found.ENVOYS, dict)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_known_families_can_each_be_looked_up(engine):
    known = families.known(engine)
    assert {"llama", "gpt2", "gemma2"} <= set(known)
    assert list(known) == sorted(known)
    assert "generic" not in known
    for model_type in known:
        families.lookup(model_type, engine)


def test_both_engines_know_the_same_architectures_of_the_first_families():
    for model_type in ("llama", "gpt2", "gemma2"):
        hf, vllm = (families.lookup(model_type, engine) for engine in ("hf", "vllm"))
        assert hf.ARCHITECTURE is vllm.ARCHITECTURE


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_another_distributions_module_is_a_family(engine, tmp_path, monkeypatch):
    folder = tmp_path / "nnterp" / "families" / engine
    folder.mkdir(parents=True)
    (folder / "somebodys.py").write_text("RENAME, ENVOYS = {}, {}")
    monkeypatch.syspath_prepend(tmp_path)
    assert {"llama", "somebodys"} <= set(families.known(engine))
    assert families.lookup("somebodys", engine).RENAME == {}
    assert families.lookup("llama", engine).RENAME is not None


def test_listing_families_imports_none_of_them():
    code = (
        "import sys\n"
        "from nnterp.core import families\n"
        "assert 'llama' in families.known('hf')\n"
        "assert 'llama' in families.known('vllm')\n"
        "heavy = {'torch', 'transformers', 'vllm', 'nnsight'} & set(sys.modules)\n"
        "ours = [name for name in sys.modules if name.startswith('nnterp.families.')]\n"
        "assert not heavy and not ours, (heavy, ours)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_family_that_is_registered_is_the_one_looked_up(registry):
    mine = SimpleNamespace(RENAME={}, ENVOYS={})
    assert families.register(mine, "mine", "mine-too", engine="hf") is mine
    assert families.lookup("mine", "hf") is mine
    assert families.lookup("mine-too", "hf") is mine
    assert {"mine", "mine-too"} <= set(families.known("hf"))
    with pytest.raises(UnsupportedFamily, match=r"'mine'.*'vllm'"):
        families.lookup("mine", "vllm")
    families.register(mine, "llama", engine="hf")
    assert families.lookup("llama", "hf") is mine
    assert families.lookup("llama", "vllm") is not mine


def test_what_is_no_family_cannot_be_registered(registry):
    with pytest.raises(TypeError, match="lacks ENVOYS"):
        families.register(SimpleNamespace(RENAME={}), "mine", engine="hf")
    with pytest.raises(TypeError, match="lacks RENAME, ENVOYS"):
        families.register(object(), "mine", engine="hf")
    with pytest.raises(TypeError, match="model type"):
        families.register(SimpleNamespace(RENAME={}, ENVOYS={}), engine="hf")


@pytest.mark.parametrize(
    "model_type", ["generic", "no-such", "../llama", "", "llama.x", "__init__"]
)
def test_a_model_type_without_a_family(model_type):
    with pytest.raises(UnsupportedFamily) as raised:
        families.lookup(model_type, "hf")
    assert repr(model_type) in str(raised.value)
    assert "llama" in str(raised.value)


def test_an_engine_without_families():
    assert families.known("no_such_engine") == ()
    with pytest.raises(UnsupportedFamily, match="Known here: none"):
        families.lookup("llama", "no_such_engine")


def test_a_family_of_another_distribution_is_found(tmp_path):
    """A module that somebody else adds to the namespace; its import errors are its own."""
    folder = tmp_path / "nnterp" / "families" / "third"
    folder.mkdir(parents=True)
    (folder / "my_model.py").write_text("RENAME = {}\nENVOYS = {'x': 1}\n")
    (folder / "broken.py").write_text("import no_such_module_at_all\n")
    code = (
        f"import sys; sys.path[:0] = [{str(CORE)!r}, {str(tmp_path)!r}]\n"
        "from nnterp import core\n"
        "families = core.families\n"
        "assert families.known('third') == ('broken', 'my_model'), families.known('third')\n"
        "assert families.lookup('my-model', 'third').ENVOYS == {'x': 1}\n"
        "try:\n"
        "    families.lookup('broken', 'third')\n"
        "except ModuleNotFoundError as error:\n"
        "    assert error.name == 'no_such_module_at_all'\n"
        "else:\n"
        "    raise AssertionError\n"
        "try:\n"
        "    families.lookup('llama', 'hf')\n"
        "except core.UnsupportedFamily as error:\n"
        "    assert 'Known here: none' in str(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_any_backend_a_lookup_says_that_there_is_no_family():
    code = (
        f"import sys; sys.path.insert(0, {str(CORE)!r})\n"
        "from nnterp import core\n"
        "try:\n"
        "    core.families.lookup('llama', 'hf')\n"
        "except core.UnsupportedFamily as error:\n"
        "    assert 'Known here: none' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# -- engines ------------------------------------------------------------------------------


def test_the_engines_of_this_environment():
    assert {"hf", "vllm"} <= set(engines())
    assert list(engines()) == sorted(engines())


def test_listing_engines_imports_none_of_them():
    code = (
        "import sys\n"
        "from nnterp.core import engines\n"
        "assert 'hf' in engines()\n"
        "assert not {'torch', 'nnterp.hf', 'nnterp.vllm'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_engine_that_is_not_installed():
    with pytest.raises(MissingBackend, match=r"'tpu' is not installed \(installed: .*hf"):
        load("x", engine="tpu")
    with pytest.raises(ImportError):
        load("x", engine="tpu")


def test_load_gives_the_engines_class_what_it_was_given(tmp_path, monkeypatch):
    """A third engine, which names itself by its entry point."""
    (tmp_path / "third_engine.py").write_text(
        "class Model:\n"
        "    def __init__(self, repo_id, **options):\n"
        "        self.repo_id, self.options = repo_id, options\n"
    )
    info = tmp_path / "third_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nnterp.engines]\nthird = third_engine:Model\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "third" in engines()
    model = load("some/name", engine="third", dtype="float32")
    assert (model.repo_id, model.options) == ("some/name", {"dtype": "float32"})


def test_load_gives_a_model_of_this_engine(checkpoint):
    from nnterp.hf import StandardizedTransformer

    path = checkpoint("llama")
    assert type(load(path, engine="hf")) is StandardizedTransformer
    assert type(load(pathlib.Path(path), "hf")) is StandardizedTransformer
