"""Ctrl-C and SIGTERM as something that is answered at once, whatever the main thread does.

A thread of its own hears them: while modules are imported, while XLA compiles, while a step hangs. What the
answer is depends on how far the process has come, see `Answer`. Imports no JAX: a command listens before it
imports that.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from rrfp_jax.errors import INTERRUPTED
from rrfp_jax.printing import warn
from rrfp_jax.runtime.processes.children import exit_now
from rrfp_jax.runtime.processes.signals import Signals, collected_signals


class Answer(Protocol):
    """What follows a signal; its methods are called in the thread that listens."""

    def heed(self, number: int) -> None:
        """A signal has come."""

    def left(self) -> float | None:
        """Seconds until `check` wants to be called if no signal comes; None for never."""

    def check(self) -> None:
        """See whether a limit has passed."""


class EndsAtOnce:
    """The answer of a process that has nothing to save yet.

    Args:
        say: tells so.
        end: ends the process; must not return.
    """

    def __init__(self, say: Callable[[], None], end: Callable[[], None]) -> None:
        self._say, self._end = say, end

    def heed(self, number: int) -> None:
        """Say so, and end."""
        try:
            self._say()
        finally:
            self._end()

    def left(self) -> float | None:
        """None: there is no limit."""
        return None

    def check(self) -> None:
        """Nothing."""


class StopSignals:
    """The signals of a process, once it listens; `heard_signals` makes one.

    Args:
        signals: that have come; None if this process does not listen, because somebody else does.
        answer: to them.
    """

    def __init__(self, signals: Signals | None, answer: Answer) -> None:
        self._signals, self._answer, self._ended = signals, answer, False

    @contextmanager
    def answered_by(self, answer: Answer, *also: int) -> Iterator[None]:
        """Inside, signals have another answer; some that end the process outside may be among them.

        Args:
            answer: to all that come.
            *also: further signals that are heard inside, unless this program has handlers of its own.
        """
        if self._signals is None:
            yield
            return
        before, self._answer = self._answer, answer
        try:
            with self._signals.also(replaceable(also)):
                yield
        finally:
            self._answer = before

    def listen(self) -> None:
        """Answer signals until `end` is called."""
        assert self._signals is not None
        while not self._ended:
            select.select([self._signals], [], [], self._answer.left())
            for number in self._signals.take():
                self._answer.heed(number)
            self._answer.check()

    def end(self) -> None:
        """Answer no more; from another thread."""
        assert self._signals is not None
        self._ended = True
        self._signals.wake()


@contextmanager
def heard_signals(*numbers: int, answer: Answer) -> Iterator[StopSignals]:
    """Inside, a thread answers these signals, as far as nobody has handlers for them; main thread only."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread:
        yield StopSignals(None, answer)
        return
    with collected_signals(replaceable(numbers)) as signals:
        heard = StopSignals(signals, answer)
        thread = threading.Thread(target=heard.listen, name="rrfp-signals", daemon=True)
        thread.start()
        try:
            yield heard
        finally:
            heard.end()
            thread.join()


def replaceable(numbers: Sequence[int]) -> list[int]:
    """Those of some signals that nobody ignores or has a handler of their own for."""
    usual = (signal.SIG_DFL, signal.default_int_handler)
    return [number for number in numbers if signal.getsignal(number) in usual]


def ends_at_once(command: str, end: Callable[[], None] | None = None) -> EndsAtOnce:
    """The answer of a command that has begun nothing yet; of several processes of a launcher one says it.

    Args:
        command: by its name.
        end: ends the process; None for at once.
    """

    def say() -> None:
        if os.environ.get("RRFP_RANK", "0") == "0":
            text = "Ctrl-C while starting: ends; the same command starts it again"
            warn(f"{command}: {text}")

    return EndsAtOnce(say, end or partial(exit_now, INTERRUPTED))
