"""Ctrl-C and SIGTERM: noted where nothing is half done, and answered at once, whatever the main thread does.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: after a program has eaten its
donated inputs and before its outputs are stored, between two stages' updates, or while a thread starts. So
`interrupts_held` holds it there.

A thread of its own hears signals: while modules are imported, while XLA compiles, while a step hangs. What
the answer is depends on how far the process has come, see `SignalAnswer`. Imports no JAX: a command listens
before it imports that. Between steps the answer is to stop at the next step boundary, all processes at the
same one. Perhaps only one process gets the signal, or all at different moments. So each notes it
(`Stop.requested`), and the notes travel with every gather. After the gather that ends a step all know the
same (`Stop.agreed`).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import INTERRUPTED, TrainingError
from rrfp_jax.printing import warn
from rrfp_jax.runtime.run.place import SecondsVariable
from rrfp_jax.runtime.run.waits import LONGEST_SECONDS

if TYPE_CHECKING:
    from rrfp_jax.runtime.run.world import World

SAVE_SECONDS = 120.0
"""After SIGTERM or Ctrl-C a run has so long to come to a step boundary."""

save_seconds = SecondsVariable(
    *("RRFP_SAVE_SECONDS", SAVE_SECONDS, 0.0),
    f"that a run has after SIGTERM to end its step and save, at most {LONGEST_SECONDS:.0f}",
    LONGEST_SECONDS,
)


WORDS_SECONDS = 1.0
"""How long what is said at a signal may take; then the signal is answered in any case."""


def _say_within_limit(say: Callable[..., object], *about: object) -> None:
    """Say something for which a disk may have to be asked, which may not answer."""
    words = threading.Thread(target=say, args=about, daemon=True)
    with suppress(RuntimeError):  # this process has as many threads as it may have
        words.start()
        words.join(WORDS_SECONDS)


@contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C is noted, and raised at the end; the value tells whether it came.

    A second Ctrl-C is not held, so that even a hanging program can be left.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False  # KeyboardInterrupt is not raised here, or not by Python's own handler
        return
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


class StopReason(IntEnum):
    """Why a run is to stop; of several reasons the greatest counts."""

    NOTHING = 0
    ASKED = 1  # by the run's own code
    HANDS_OVER = 2  # to an attempt with more replicas
    SIGTERM = 3
    CTRL_C = 4

    def __str__(self) -> str:
        return {StopReason.SIGTERM: "SIGTERM", StopReason.CTRL_C: "Ctrl-C"}.get(self, self.name.lower())


class Stop:
    """A request to stop: `requested` of this process; `agreed` of all, as of the latest gather."""

    requested = agreed = StopReason.NOTHING

    def forget(self) -> None:
        """Forgets what was requested; to be called in all processes at the same point."""
        self.requested = self.agreed = StopReason.NOTHING

    def request(self, why: StopReason) -> None:
        """Ask this process to stop; from any thread."""
        self.requested = max(self.requested, why)


_given_up: list[Callable[[], object]] = []


def children_give_up(act: Callable[[], object]) -> None:
    """From now on forked children begin by calling this; what was asked for last is called first."""
    _given_up.append(act)


@contextmanager
def children_giving_up(act: Callable[[], object]) -> Iterator[None]:
    """Inside, forked children begin by calling this."""
    children_give_up(act)
    try:
        yield
    finally:
        with suppress(ValueError):  # a child has called it
            _given_up.remove(act)


@contextmanager
def undone(act: Callable[[], object]) -> Iterator[None]:
    """Inside, forked children begin by calling this; at the end it is called, too."""
    try:
        with children_giving_up(act):
            yield
    finally:
        act()


def _give_up() -> None:
    while _given_up:
        with suppress(OSError):
            _given_up.pop()()


os.register_at_fork(after_in_child=_give_up)


def exit_now(status: int, *, also_waited_for: bool = False) -> NoReturn:
    """End this process without Python's way out, and the workers that `multiprocessing` would end with it."""
    try:
        if (multiprocessing := sys.modules.get("multiprocessing")) is not None:
            for worker in multiprocessing.active_children():
                if worker.daemon or also_waited_for:
                    worker.terminate()
    finally:
        os._exit(status)


class Signals:
    """The signals that came, readable like a file when there are some; `told` are those that it tells."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.told = set(numbers)
        self._reader, self.writer = socket.socketpair()
        self._reader.setblocking(False)
        self.writer.setblocking(False)
        self.fileno = self._reader.fileno  # readable also for signals that are not told

    def take(self) -> Sequence[int]:
        """Signals since the last call, in order."""
        try:
            return [number for number in self._reader.recv(4096) if number in self.told]
        except BlockingIOError:
            return ()

    def wake(self) -> None:
        """Make this readable, though no signal has come; from any thread."""
        with suppress(BlockingIOError):  # it is readable already
            self.writer.send(b"\0")

    def close(self) -> None:
        self._reader.close()
        self.writer.close()


@contextmanager
def collected_signals(numbers: Sequence[int], *, wakes: Sequence[int] = ()) -> Iterator[Signals]:
    """Collect signals instead of dying of them; to be called in the main thread.

    One that is ignored, as by nohup, stays so; `wakes` are those that only make the result readable.
    """
    signals = Signals(numbers)
    woken = [*(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN), *wakes]
    wakeup = signal.set_wakeup_fd(signals.writer.fileno(), warn_on_full_buffer=False)

    def give_back() -> None:
        signal.set_wakeup_fd(wakeup)
        signals.close()

    def outlast_ctrl_c() -> None:  # a terminal sends it to all; the parent may need its workers to the end
        if signal.SIGINT in woken:
            signal.signal(signal.SIGINT, _only_wake)

    with undone(give_back), children_giving_up(outlast_ctrl_c), _only_waking(woken):
        yield signals


@contextmanager
def _only_waking(numbers: Sequence[int]) -> Iterator[None]:
    """Inside, signals do nothing but wake."""
    before = {number: signal.signal(number, _only_wake) for number in numbers}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    with undone(put_back):
        yield


def _only_wake(number: int, frame: object) -> None:
    """A handler for signals whose number, written to the wake-up socket, is all that is wanted."""


class SignalAnswer:
    """What follows a signal; its methods are called in the thread that listens."""

    def heed(self, number: int) -> None:
        """A signal has come."""

    def check(self) -> float | None:
        """See whether a limit has passed; seconds until the next look if no signal comes, None for never."""


class EndsAtOnce(SignalAnswer):
    """The answer of a process that has nothing to save yet: it says so, and ends by `end`."""

    def __init__(self, say: Callable[[], None], end: Callable[[], None]) -> None:
        self._say, self._end = say, end

    def heed(self, number: int) -> None:
        _say_within_limit(self._say)
        self._end()


class StopSignals:
    """The signals of a process that are `told`, and its answer to them."""

    def __init__(self, told: set[int], answer: SignalAnswer) -> None:
        self._told, self.answer = told, answer

    @contextmanager
    def answered_by(self, answer: SignalAnswer, *also: int) -> Iterator[None]:
        """Inside, signals have another answer, and some more are heard that nobody has handlers for."""
        before, self.answer = self.answer, answer
        more = replaceable(also)
        self._told.update(more)
        try:
            with _only_waking(more):
                yield
        finally:
            self._told.difference_update(more)
            self.answer = before


@contextmanager
def heard_signals(*numbers: int, answer: SignalAnswer) -> Iterator[StopSignals]:
    """Inside, a thread answers these signals, as far as nobody has handlers for them; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield StopSignals(set(), answer)
        return
    with collected_signals(replaceable(numbers)) as signals:
        heard, ended = StopSignals(signals.told, answer), threading.Event()

        def listen() -> None:
            while not ended.is_set():
                select.select([signals], [], [], heard.answer.check())
                for number in signals.take():
                    heard.answer.heed(number)

        thread = threading.Thread(target=listen, name="rrfp-signals", daemon=True)
        thread.start()
        try:
            yield heard
        finally:
            ended.set()
            signals.wake()
            thread.join()


def replaceable(numbers: Sequence[int]) -> list[int]:
    """Those that nobody ignores or has a handler of their own for; none outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return []
    usual = (signal.SIG_DFL, signal.default_int_handler)
    return [number for number in numbers if signal.getsignal(number) in usual]


def ends_at_once(command: str, end: Callable[[], None] | None = None) -> EndsAtOnce:
    """The answer of a command that has begun nothing yet; of several processes of a launcher one says it."""

    def say() -> None:
        if ENVIRONMENT.get("RRFP_RANK", "0") == "0":
            warn(f"{command}: Ctrl-C while starting: ends; the same command starts it again")

    return EndsAtOnce(say, end or partial(exit_now, INTERRUPTED))


ECHO_SECONDS = 2.0


class StopsAfterStep(SignalAnswer):
    """The answer to signals between the first step and the last: the run is to stop at a step boundary.

    A second signal ends this process at once, and so does the limit if there was no step boundary: even if
    the main thread is stuck. `say` is told why the run is to stop, and whether this was the last warning;
    `leave` is called just before this process ends from here, to leave its terminal in order.
    """

    def __init__(
        self,
        world: World,
        limit_seconds: float,
        say: Callable[[StopReason, bool], None] = lambda why, at_once: None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._world, self._limit = world, limit_seconds
        self._say, self._leave = say, leave
        self._deadline: float | None = None

    def heed(self, number: int) -> None:
        stop = self._world.stop
        why = StopReason.CTRL_C if number == signal.SIGINT else StopReason.SIGTERM
        asked = stop.requested >= StopReason.SIGTERM
        first = (self._deadline or 0.0) - self._limit
        # A launcher sends on what this process has got, too: some end whole groups of processes.
        if asked and self._world.folder is not None and monotonic() < first + ECHO_SECONDS:
            return
        stop.request(why)
        _say_within_limit(self._say, why, asked)
        if asked:
            self._fail(KeyboardInterrupt())
        self._deadline = monotonic() + self._limit

    def check(self) -> float | None:
        stop = self._world.stop
        if self._deadline is None or stop.agreed >= StopReason.SIGTERM:
            return None
        if (left := self._deadline - monotonic()) <= 0.0:
            sentence = f"{stop.requested} came, and no step ended in the next {self._limit:g} s"
            self._fail(TrainingError(sentence))
        return max(left, 0.0)

    def _fail(self, error: BaseException) -> None:
        from rrfp_jax.runtime.run.exits import fail  # here: a command hears signals before it imports JAX

        self._leave()
        fail(self._world, error)
