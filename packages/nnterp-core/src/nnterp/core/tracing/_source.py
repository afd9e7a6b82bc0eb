"""Operations inside a forward, as nnsight serves them."""

from __future__ import annotations

from typing import Any

from nnsight.intervention.source import (
    STATE,
    SourceNotAvailable,
    compiled,
    decorator_chain,
    install_source,
)

from ._values import OutOfOrder, running


def operations(function: Any) -> tuple[str, ...]:
    """The names of a function's operations; none where its source cannot be read."""
    function = getattr(function, "__func__", function)
    try:
        names: tuple[str, ...] = compiled(decorator_chain(function)[0]).names
    except SourceNotAvailable:
        return ()
    return names


def opened(host: Any) -> None:
    """Serve the operations of a module's forward, from its next call on.

    Raises:
        OutOfOrder: the model is in there now, so that this call's will not be served.
    """
    mediator, state = running(), host._module.__dict__.get(STATE)
    if mediator is not None and (state is None or not state.sourced):
        entered, left = (mediator.occurrence(f"{host.path}.{side}") for side in ("input", "output"))
        if entered > left:
            raise OutOfOrder(
                f"the model is inside {host.path} already, whose operations were not asked for "
                f"before: read a standard value of it before what lies under it"
            )
    install_source(host)
