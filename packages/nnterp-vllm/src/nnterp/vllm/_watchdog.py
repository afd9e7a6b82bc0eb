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

from greenlet import GreenletExit, getcurrent
from nnsight.intervention.interleaver import Event

from nnterp.core.tracing import Apart, Block

_AGAIN = 1.0
"""Seconds until a block that went on in spite of its ``TimeoutError`` is left behind."""


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
                if now > deadline and thread in self.deadlines:
                    # Once more if the block catches it.
                    self.deadlines[thread] = now + _AGAIN
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(TimeoutError)
                    )


_watch: _Watch | None = None


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in this thread if what is inside takes longer."""
    global _watch
    if threading.current_thread() is threading.main_thread():
        home, warned = getcurrent(), False

        def expired(*_: Any) -> None:
            nonlocal warned
            block = getcurrent()
            if warned and block is not home:
                # It caught the error and went on: it stays where it is, for good. Were it ever
                # collected, it would be resumed to end, so it is never collected.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(block))
                home.throw(TimeoutError(_message(seconds)))
            warned = True
            raise TimeoutError(_message(seconds))

        handler = signal.signal(signal.SIGALRM, expired)
        before, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
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


class Ended(Exception):
    """What ended a block and is no ``Exception``, which would end the engine with it."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause
        if hasattr(cause, "__intervention_tb__"):
            self.__intervention_tb__ = cause.__intervention_tb__


class Watched(Apart):
    """A block under the watchdog, whose every end is its own."""

    limit: float
    vocabulary: int
    sampled: str

    def switch(self, *args: Any) -> Any:
        try:
            with deadline(self.limit):
                parked = super().switch(*args)
        except Exception:
            raise
        except BaseException as error:
            raise Ended(error) from error
        if isinstance(parked, GreenletExit):
            # A greenlet that raises it returns it.
            raise Ended(parked)
        block = Block.of(self)
        if (
            parked is not None
            and parked.event is Event.VALUE
            and parked.provider not in ("result", self.sampled)
            and (parked.provider, parked.iteration) != block.asked
        ):
            # No standard value: it is served the model's own tensor, and may write into it.
            block.wrote = True
        return parked

    def handle(self, provider: str, value: Any) -> Any:
        new = super().handle(provider, value)
        if provider == self.sampled:
            own = self.interleaver.batcher.narrow(new, self.batch_group)
            if bool(((own < 0) | (own >= self.vocabulary)).any()):
                # It is embedded in the next step, together with everybody's.
                own.zero_()
                raise ValueError(
                    f"samples are token ids below {self.vocabulary}; the block wrote another"
                )
        return new
