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

import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import INTERRUPTED, TrainingError
from rrfp_jax.printing import warn
from rrfp_jax.runtime.run.place import seconds_of
from rrfp_jax.runtime.run.proc import children_giving_up, exit_now
from rrfp_jax.runtime.run.waits import LONGEST_SECONDS

if TYPE_CHECKING:
    from rrfp_jax.runtime.run.world import World

SAVE_SECONDS = 120.0
"""After SIGTERM or Ctrl-C a run has so long to come to a step boundary. RRFP_SAVE_SECONDS changes it."""

END_SECONDS = 10.0
"""After so long a thread that ends the process is stuck itself, as on a disk that does not answer."""


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
    """What this process knows of a request to stop.

    Attributes:
        requested: of this process.
        agreed: of some process, as of the latest gather; equal everywhere at the same point.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As if nothing had been requested; in all processes at the same point."""
        self.requested = self.agreed = StopReason.NOTHING

    def request(self, why: StopReason) -> None:
        """Ask this process to stop; from any thread."""
        self.requested = max(self.requested, why)

    def hear(self, requested: int) -> None:
        """Take in what all processes have just told each other."""
        self.agreed = max(self.agreed, StopReason(requested))


class ExitCallbacks:
    """What is to be done when this process leaves its run, and who may end it.

    Attributes:
        says_goodbye: whether this process is taking its leave of the others, and may wait for them.
    """

    def __init__(self) -> None:
        self.says_goodbye = False
        self._acts: list[Callable[[], None]] = []
        self._ending = threading.Lock()

    def at_last(self, act: Callable[[], None]) -> None:
        """Have something done once this process has left the run in good order, before it ends."""
        self._acts.append(act)

    def act(self) -> None:
        """Do all of that, in order."""
        for act in self._acts:
            act()

    def claim_end(self) -> None:
        """To be called before a thread ends the process: main thread or watchdog, never both at once.

        Returns at once to the first caller. Any other waits here while the process ends, and goes on only
        if it does not.
        """
        self._ending.acquire(timeout=END_SECONDS)


class Signals:
    """The signals that came, readable like a file when there are some; `numbers` are those that are told."""

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
        before = _only_waking(numbers)
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
    before = _only_waking([*wanted, *wakes])
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


def _only_waking(numbers: Sequence[int]) -> Mapping[int, Any]:
    """Have signals do nothing but wake; the handlers that they had."""
    return {number: signal.signal(number, _only_wake) for number in numbers}


def _put_back(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _only_wake(number: int, frame: object) -> None:
    """A handler for signals whose number, written to the wake-up socket, is all that is wanted."""


class SignalAnswer(Protocol):
    """What follows a signal; its methods are called in the thread that listens."""

    def heed(self, number: int) -> None:
        """A signal has come."""

    def left(self) -> float | None:
        """Seconds until `check` wants to be called if no signal comes; None for never."""

    def check(self) -> None:
        """See whether a limit has passed."""


class EndsAtOnce:
    """The answer of a process that has nothing to save yet: it says so, and ends by `end`."""

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

    def __init__(self, signals: Signals | None, answer: SignalAnswer) -> None:
        self._signals, self._answer, self._ended = signals, answer, False

    @contextmanager
    def answered_by(self, answer: SignalAnswer, *also: int) -> Iterator[None]:
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
def heard_signals(*numbers: int, answer: SignalAnswer) -> Iterator[StopSignals]:
    """Inside, a thread answers these signals, as far as nobody has handlers for them; main thread only."""
    if threading.current_thread() is not threading.main_thread():
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
        if ENVIRONMENT.get("RRFP_RANK", "0") == "0":
            warn(f"{command}: Ctrl-C while starting: ends; the same command starts it again")

    return EndsAtOnce(say, end or partial(exit_now, INTERRUPTED))


def save_seconds(environment: Mapping[str, str]) -> float:
    """How long a run is waited for after SIGTERM or Ctrl-C; UsageError if that is no number, or negative."""
    what = "the seconds that a run has after SIGTERM to end its step and save, at most "
    what += f"{LONGEST_SECONDS:.0f}"
    return seconds_of(environment, "RRFP_SAVE_SECONDS", SAVE_SECONDS, what, 0.0, LONGEST_SECONDS)


class StopsAfterStep:
    """The answer to signals between the first step and the last: the run is to stop at a step boundary.

    A second signal ends this process at once, and so does the limit if there was no step boundary: even if
    the main thread is stuck.

    Args:
        world: is asked to stop.
        limit_seconds: until a step must have ended.
        say: is told why the run is to stop, and whether this was the last warning.
        leave: is called just before this process ends from here, to leave its terminal in order.
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
        """Ask the run to stop; the second time, end."""
        stop = self._world.stop
        why = StopReason.CTRL_C if number == signal.SIGINT else StopReason.SIGTERM
        asked = stop.requested >= StopReason.SIGTERM
        stop.request(why)
        self._say(why, asked)
        if asked:
            self._fail(KeyboardInterrupt())
        self._deadline = monotonic() + self._limit

    def left(self) -> float | None:
        """Seconds until a step must have ended."""
        if self._deadline is None or self._world.stop.agreed >= StopReason.SIGTERM:
            return None
        return max(self._deadline - monotonic(), 0.0)

    def check(self) -> None:
        """End this process if no step has ended in time."""
        if self.left() == 0.0:
            why = self._world.stop.requested
            self._fail(TrainingError(f"{why} came, and no step ended in the next {self._limit:g} s"))

    def _fail(self, error: BaseException) -> None:
        from rrfp_jax.runtime.run.exits import fail  # here: a command hears signals before it imports JAX

        self._leave()
        fail(self._world, error)
