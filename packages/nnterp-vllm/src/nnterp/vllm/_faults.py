"""Errors of a block in the engine's process, raised again in the caller's."""

from __future__ import annotations

import builtins
import re
from typing import Any

import cloudpickle
from nnsight.intervention.interleaver import OutOfOrderError

from nnterp import core
from nnterp.core.tracing import OutOfOrder

_BY_NAME: dict[str, type[Exception]] = {
    name: found
    for module in (builtins, core)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Exception)
} | {"OutOfOrderError": OutOfOrder, "OutOfOrder": OutOfOrder}

_LINE = re.compile(r'File "<edit-\d+>", line (\d+)')


class InEngine(Exception):
    """The traceback of a block's error where it was raised, in the engine's process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pickled(exception: BaseException) -> bytes | None:
    """``exception`` without its traceback, or ``None`` where it cannot travel."""
    if isinstance(exception, OutOfOrderError) and not isinstance(exception, OutOfOrder):
        exception = OutOfOrder(str(exception))
    state = {k: v for k, v in vars(exception).items() if k != "__intervention_tb__"}
    try:
        packed: bytes = cloudpickle.dumps((type(exception), exception.args, state))
    except Exception:
        return None
    return packed


def rebuilt(error: dict[str, Any]) -> BaseException:
    """The exception that ``error`` carries, of its own type where that can be had."""
    if error.get("pickled"):
        try:
            kind, args, state = cloudpickle.loads(error["pickled"])
            exception: BaseException = kind.__new__(kind, *args)
            exception.args = args
            exception.__dict__.update(state)
            # What is no Exception, a SystemExit say, would end the caller's other requests too;
            # an interruption is the caller's own, whose engine runs in this process.
            if isinstance(exception, (Exception, KeyboardInterrupt)):
                return exception
        except Exception:
            pass  # a class that only the engine's process can make: its name and text remain
    named = _BY_NAME.get(error.get("type_name", ""), RuntimeError)
    message = error.get("message", "")
    if named is RuntimeError and error.get("type_name") != "RuntimeError":
        message = f"{error.get('type_name')}: {message}"
    try:
        return named(message)
    except TypeError:
        return RuntimeError(f"{error.get('type_name')}: {message}")


def raise_here(error: dict[str, Any], filename: str | None) -> None:
    """Raise a block's error in the caller, with the line of the block it came from.

    Args:
        error: what nnsight captured in the worker.
        filename: the file that the block was written in.

    A ``tracer.stop()`` travels as an error and is none.
    """
    if error.get("is_control_flow"):
        return
    exception = rebuilt(error)
    traceback = error.get("traceback", "")
    line = _LINE.search(traceback)
    if filename is not None:
        traceback = re.sub(r'"<edit-\d+>"', f'"{filename}"', traceback)
    cause = InEngine(f"Traceback in the engine's process (most recent call last):\n{traceback}")
    if line is None or filename is None:
        raise exception from cause
    # Code compiled under the block's file and line puts that line in the traceback.
    source = "\n" * (int(line.group(1)) - 1) + "raise exception from cause"
    exec(compile(source, filename, "exec"), {"exception": exception, "cause": cause})
