"""How a caller's code reaches the engine's processes where they cannot import it.

What is defined in a module goes to another process as the module's name. A module that was loaded
from a file and lies on no path, as a test runner does, has none that is found there: what it
defines then travels by itself, as what is defined in a script does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import cloudpickle


@cache
def importable(name: str) -> bool:
    """Whether a new process with this one's path finds the module ``name``."""
    places = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        specs = (finder.find_spec(path, places) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        places = spec.submodule_search_locations
    return True


def modules_of(things: Iterable[Any]) -> set[str]:
    """The modules that define ``things``, their classes and the bases of these."""
    found: set[str] = set()
    for thing in things:
        kind = thing if isinstance(thing, type) else type(thing)
        found |= {base.__module__ for base in kind.__mro__}
        found.add(getattr(thing, "__module__", None) or "builtins")
    return found


@contextmanager
def travelling(names: Iterable[str]) -> Iterator[None]:
    """While open, what those modules define is pickled whole where another could not import it."""
    known = cloudpickle.list_registry_pickle_by_value()
    modules = [
        sys.modules[name]
        for name in set(names) - known
        if name in sys.modules and name != "__main__" and not importable(name)
    ]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
