"""Which engines are installed, and one way to load a model on any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ._errors import MissingBackend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from os import PathLike

    from .protocols import StandardModel

GROUP = "nnterp.engines"

# How to install the engines of this project; others name themselves by their entry point.
_INSTALL = {
    "hf": 'pip install "nnterp-hf"',
    "vllm": 'pip install "nnterp-vllm[cuda]" (or "nnterp-vllm[cpu]" on a machine without a GPU)',
}


def _points() -> dict[str, EntryPoint]:
    # Here rather than above: it is half of what importing nnterp.core would take.
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


def engines() -> tuple[str, ...]:
    """The names of the installed engines, sorted; nothing of them is imported."""
    return tuple(sorted(_points()))


def load(repo_id: str | PathLike[str], engine: str, **kwargs: Any) -> StandardModel:
    """The model ``repo_id`` on ``engine``; keyword arguments go to the engine's class.

    Args:
        repo_id: a model's name on the hub, or a folder with a checkpoint.
        engine: ``"hf"``, ``"vllm"``, or another installed engine.

    Raises:
        MissingBackend: the engine is not installed; the message has the command that
            installs it.
    """
    points = _points()
    if engine not in points:
        how = _INSTALL.get(engine)
        advice = f"Install it with {how}." if how else "No distribution known here provides it."
        raise MissingBackend(
            f"engine {engine!r} is not installed (installed: {', '.join(points) or 'none'}). "
            f"{advice}"
        )
    return cast("StandardModel", points[engine].load()(repo_id, **kwargs))
