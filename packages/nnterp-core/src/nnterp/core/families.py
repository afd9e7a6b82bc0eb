"""Which family describes a model type on an engine.

A family is a module ``nnterp.families.<engine>.<model_type>``, from whichever
distribution, or an object registered here. Either has ``RENAME`` and ``ENVOYS``.
Modules are imported when they are looked up, so that listing families costs nothing.
"""

from __future__ import annotations

import importlib
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, Protocol

from ._errors import UnsupportedFamily

GENERIC = "generic"
"""The module beside the families that serves what it can verify; never looked up by itself."""

_registered: dict[tuple[str, str], Any] = {}


class Family(Protocol):
    """What every family has.

    Optional are size functions, ``project_on_vocab(model, hidden)``, ``ARCHITECTURE`` and, on
    vLLM, ``check(model)``, which raises for a model that the family cannot serve, and
    ``settings(config)``, the engine's options, by name, that make it compute what the
    checkpoint's config says where it has a rule of its own.
    """

    RENAME: dict[Any, Any]
    ENVOYS: dict[Any, Any]


def module_name(model_type: str) -> str:
    """The module of a model type's family: ``modernbert_decoder`` of ``"modernbert-decoder"``."""
    return model_type.replace("-", "_").replace(".", "_")


def _package(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ModuleNotFoundError:  # no backend is installed, so there is no nnterp.families
        return None


def checked(family: Any) -> Any:
    """``family`` itself.

    Raises:
        TypeError: it lacks ``RENAME`` or ``ENVOYS``.
    """
    missing = [name for name in ("RENAME", "ENVOYS") if not hasattr(family, name)]
    if missing:
        raise TypeError(f"a family has RENAME and ENVOYS; {family!r} lacks {', '.join(missing)}")
    return family


def register(family: Any, *model_types: str, engine: str) -> Any:
    """Make ``family`` the one that ``engine`` uses for ``model_types``; returns it.

    Raises:
        TypeError: ``family`` lacks ``RENAME`` or ``ENVOYS``, or no model type is named.
    """
    checked(family)
    if not model_types:
        raise TypeError("name at least one model type to register a family for")
    for model_type in model_types:
        _registered[engine, model_type] = family
    return family


def lookup(model_type: str, engine: str) -> Any:
    """The family that describes ``model_type`` on ``engine``.

    Raises:
        UnsupportedFamily: there is none; the message names the ways out.
    """
    if (engine, model_type) in _registered:
        return _registered[engine, model_type]
    name = module_name(model_type)
    package = f"nnterp.families.{engine}"
    path = f"{package}.{name}"
    named = name.isidentifier() and not name.startswith("_") and name != GENERIC
    if named and _package(package) is not None:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
    raise UnsupportedFamily(
        f"model type {model_type!r} has no family on engine {engine!r} (no module {path}). "
        f"Pass family= an object with RENAME and ENVOYS for this model, register one with "
        f"nnterp.core.families.register(family, {model_type!r}, engine={engine!r}), or pass "
        f"family=nnterp.families.{engine}.generic, which serves what it can verify on the "
        f"loaded model. Known here: {', '.join(known(engine)) or 'none'}."
    )


def known(engine: str) -> tuple[str, ...]:
    """The model types with a family on ``engine``, sorted, without importing any of them."""
    import pkgutil

    found = {model_type for owner, model_type in _registered if owner == engine}
    spec = _package(f"nnterp.families.{engine}")
    if spec is not None and spec.submodule_search_locations is not None:
        found |= {
            module.name
            for module in pkgutil.iter_modules(spec.submodule_search_locations)
            if not module.name.startswith("_") and module.name != GENERIC
        }
    return tuple(sorted(found))
