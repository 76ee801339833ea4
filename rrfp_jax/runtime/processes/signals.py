"""Signals as something to be read, so that a loop or a thread can wait for them.

Python runs its handlers in the main thread, between two bytecodes. A main thread that is inside C++ does not
notice a signal. What is read here comes from the C handler at once, whatever the main thread does.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from rrfp_jax.runtime.processes.children import children_giving_up


class Signals:
    """The signals that came, readable like a file when there are some.

    Args:
        numbers: those that are told.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = frozenset(numbers)
        self._reader, self.writer = socket.socketpair()
        self._reader.setblocking(False)
        self.writer.setblocking(False)

    def fileno(self) -> int:
        """Of what becomes readable; so it does for signals that are not told."""
        return self._reader.fileno()

    def take(self) -> Sequence[int]:
        """Those since the last call, in order."""
        try:
            return [number for number in self._reader.recv(4096) if number in self._numbers]
        except BlockingIOError:
            return ()

    @contextmanager
    def also(self, numbers: Sequence[int]) -> Iterator[None]:
        """Inside, these are told, too; to be called in the main thread."""
        usual = self._numbers
        before = {number: signal.signal(number, _only_wake) for number in numbers}
        self._numbers |= frozenset(numbers)
        try:
            with children_giving_up(partial(_put_back, before)):
                yield
        finally:
            _put_back(before)
            self._numbers = usual

    def wake(self) -> None:
        """Make this readable, though no signal has come; from any thread."""
        with suppress(BlockingIOError):  # it is readable already
            self.writer.send(b"\0")

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self.writer.close()


@contextmanager
def collected_signals(numbers: Sequence[int], *, wakes: Sequence[int] = ()) -> Iterator[Signals]:
    """Collect signals instead of dying of them; to be called in the main thread.

    Args:
        numbers: those to collect; one that is ignored, as by nohup, stays so.
        wakes: those that only make the result readable.
    """
    signals = Signals(numbers)
    wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _only_wake) for number in (*wanted, *wakes)}
    wakeup = signal.set_wakeup_fd(signals.writer.fileno(), warn_on_full_buffer=False)

    def give_back() -> None:
        signal.set_wakeup_fd(wakeup)
        _put_back(before)
        signals.close()

    def leave_to_parent() -> None:
        give_back()
        if signal.SIGINT in before:  # a terminal sends it to all; the parent may need its workers to the end
            signal.signal(signal.SIGINT, _only_wake)

    try:
        with children_giving_up(leave_to_parent):
            yield signals
    finally:
        give_back()


def _put_back(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _only_wake(number: int, frame: object) -> None:
    """A handler for signals whose number, written to the wake-up socket, is all that is wanted."""
