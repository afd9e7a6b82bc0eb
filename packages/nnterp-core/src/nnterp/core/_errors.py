"""What goes wrong, one type for each kind, the same on every engine."""

from __future__ import annotations


class Unavailable(AttributeError):
    """A standard name that this model, engine or step does not serve.

    The message names the value, the family, the reason and the way out. An
    ``AttributeError``, so ``hasattr`` answers False and ``getattr`` takes its default.
    """


class OutsideTrace(AttributeError):
    """An available value read where no forward runs.

    Values exist while the model runs: read them in a ``with model.trace(...)``,
    ``model.prefill(...)`` or ``model.decode(...)`` block.
    """


class OutOfOrder(RuntimeError):
    """A value asked for, or edited, after the model has run past it.

    The upper floor raises a subclass that is nnsight's own ``OutOfOrderError`` too.
    """


class WrongShape(ValueError):
    """A value written with another shape than the one it replaces."""


class Preempted(RuntimeError):
    """An edited request that the engine took out of the batch and computed anew.

    What it computed anew has not the edits, so the request fails rather than go on without.
    """


class UnsupportedFamily(ValueError):
    """A model type that no family describes on this engine."""


class MissingBackend(ImportError):
    """An engine whose distribution is not installed."""
