"""A limit on how long a block runs before it asks the model for something, or ends.

A block runs on the engine's own thread, so one that loops for ever would stop everybody.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnsight.intervention.interleaver import Mediator


def _message(seconds: float) -> str:
    return (
        f"the block ran for more than {seconds:g} s without asking the model for a value, so the "
        f"engine ended it; move long computations out of the block, or load the model with a "
        f"larger block_timeout="
    )


class _Watch(threading.Thread):
    """Raises in a thread that is past its deadline; for engines off the main thread."""

    def __init__(self) -> None:
        super().__init__(name="nnterp-watchdog", daemon=True)
        self.deadlines: dict[int, float] = {}
        self.start()

    def run(self) -> None:
        while True:
            time.sleep(0.25)
            now = time.monotonic()
            for thread, deadline in list(self.deadlines.items()):
                if now > deadline and self.deadlines.pop(thread, None) is not None:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(TimeoutError)
                    )


_watch: _Watch | None = None


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in this thread if what is inside takes longer."""
    global _watch
    if threading.current_thread() is threading.main_thread():

        def expired(*_: Any) -> None:
            raise TimeoutError(_message(seconds))

        handler = signal.signal(signal.SIGALRM, expired)
        before, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
        started = time.monotonic()
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if before:
                # Somebody else's timer goes on where it was.
                left = before - (time.monotonic() - started)
                signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval)
        return
    if _watch is None:
        _watch = _Watch()
    thread = threading.get_ident()
    _watch.deadlines[thread] = time.monotonic() + seconds
    try:
        yield
    except TimeoutError as error:
        if error.args:
            raise
        raise TimeoutError(_message(seconds)) from None
    finally:
        _watch.deadlines.pop(thread, None)


class Watched(Mediator):
    """A block under the watchdog."""

    limit: float

    def switch(self, *args: Any) -> Any:
        with deadline(self.limit):
            return super().switch(*args)
