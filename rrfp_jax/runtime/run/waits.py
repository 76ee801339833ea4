"""What the main thread waits for, for whom, and for how long at most: every wait of a run is one of these.

    with world.waits_for(ForAnswer(what="the time", ranks=(2,)), limit) as wait:
        while not there():
            wait.check()
            sleep(wait.shortened(1.0))

What is waited for is a value. It travels in status reports and exit reports, where others decide by it;
`words` alone makes a text of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from time import perf_counter
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from rrfp_jax.core.events import Wait
from rrfp_jax.core.tasks import Task
from rrfp_jax.errors import TrainingError

SHORTEST_PAUSE, PAUSE_SHARE = 2e-5, 0.05
"""Pause between looks at data that is on its way: this time (s), or this share of the time it has taken so
far, so that a long wait costs no more looks than a short one."""

STALL_SECONDS = 300.0

LONGEST_SLEEP_SECONDS = 1.0
"""Whoever sleeps looks around at least so often."""

STOOD_STILL_SECONDS = 10.0
"""If nobody has looked for so much longer than a pause, the process stood still, as by Ctrl-Z."""

LONGEST_SECONDS = 366 * 86400.0
"""Longest limit that a system call gets: a year."""


class Awaited(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Something that a rank waits for."""

    waited: float = 0.0  # seconds without progress
    limit: float = inf

    @property
    def place(self) -> Awaited:
        """The wait without times: equal on ranks that are at the same point."""
        return replace(self, waited=0.0, limit=0.0)


class ForTask(Awaited, frozen=True, kw_only=True):
    """Something that a stage needs before it can dispatch another task of a step."""

    step: int
    stage: int
    replica: int
    why: Wait


class ForProgram(Awaited, frozen=True, kw_only=True):
    """The end of a task's program."""

    step: int
    task: Task


class ForGather(Awaited, frozen=True, kw_only=True):
    """Other ranks' values of a gather; `number` counts those of this process."""

    number: int
    what: str
    ranks: tuple[int, ...]


class ForAnswer(Awaited, frozen=True, kw_only=True):
    """Something that ranks tell whoever asks them."""

    what: str
    ranks: tuple[int, ...]


class ForDevices(Awaited, frozen=True, kw_only=True):
    """What devices compute outside of tasks, perhaps with those of other ranks."""

    what: str


class ForTransfer(Awaited, frozen=True, kw_only=True):
    """Arrays that are sent between stages outside of tasks; `stages` as messages name them."""

    what: str
    stages: tuple[str, ...]


class ForData(Awaited, frozen=True, kw_only=True):
    """The user's data; `call` is None between two calls."""

    call: Literal["plan", "load"] | None = None
    step: int = 0
    microbatch: int = 0


class ForOther(Awaited, frozen=True, kw_only=True):
    """Work of this process alone."""

    what: str


AnyAwaited: TypeAlias = (
    ForTask | ForProgram | ForGather | ForAnswer | ForDevices | ForTransfer | ForData | ForOther
)


def words(awaited: AnyAwaited, name: Callable[[int], str]) -> str:
    """What is waited for, as messages have it: "input of F3 on stage 2 in step 7, since 2.1 s"."""
    match awaited:
        case ForTask(stage=stage, replica=replica):
            of = f" of replica {replica}" if replica else ""
            text = f"{awaited.why} on stage {stage}{of} in step {awaited.step}"
        case ForProgram():
            text = f"the end of {awaited.task} in step {awaited.step}"
        case ForGather(ranks=ranks) | ForAnswer(ranks=ranks):
            text = f"{awaited.what} from {', '.join(map(name, ranks))}"
        case ForTransfer():
            text = f"{awaited.what} to {', '.join(awaited.stages)}"
        case ForData(call="plan"):
            text = f"the data's plan({awaited.step})"
        case ForData(call="load"):
            text = f"the data's load() of microbatch {awaited.microbatch} of step {awaited.step}"
        case ForData():
            text = "the data"
        case ForDevices() | ForOther():
            text = awaited.what
    return f"{text}, since {awaited.waited:.1f} s"


What: TypeAlias = AnyAwaited | Callable[[], Sequence[AnyAwaited]]
"""What is waited for; or what gives that as it is just now. The wait adds its times where there are none."""


def pause(waited_seconds: float) -> float:
    """How long to sleep (s) before the next look at what has been on its way for so long."""
    return max(SHORTEST_PAUSE, PAUSE_SHARE * waited_seconds)


class LimitedWait:
    """One wait under way, with a limit in seconds without progress; `since` is the last progress."""

    def __init__(self, waits: Waits, what: What, limit: float) -> None:
        self._waits, self._what, self.limit = waits, what, limit
        self.since = self._looked = perf_counter()

    def progressed(self) -> None:
        """Something has come: the limit counts from now on."""
        self.since = self._looked = perf_counter()

    @property
    def waited(self) -> float:
        """Seconds without progress."""
        return perf_counter() - self.since

    def shortened(self, seconds: float) -> float:
        """A sleep that does not outlast the limit."""
        return max(min(seconds, self.limit - self.waited), 0.0)

    def check(self) -> None:
        """Give up at the limit, by a TrainingError that names what was waited for."""
        if self.reached():
            raise TrainingError(self._waits.given_up(self.awaited()[0]))

    def reached(self) -> bool:
        """Whether it has come to its limit; then others have looked at why (`status_report.py`)."""
        before, self._looked = self._looked, perf_counter()
        if (still := self._looked - before) > STOOD_STILL_SECONDS + 2 * pause(before - self.since):
            self.since += still
        if self.waited < self.limit:
            return False
        self._waits.at_limit()
        return True

    def awaited(self) -> Sequence[AnyAwaited]:
        items = [self._what] if isinstance(self._what, Awaited) else self._what()
        return [replace(item, waited=item.waited or self.waited, limit=self.limit) for item in items]


class Waits:
    """The main thread's waits, one within another; `at_limit` is called before one is given up."""

    def __init__(self, rank: int, describe: Callable[[int], str]) -> None:
        self.stall_seconds = STALL_SECONDS
        self.at_limit: Callable[[], None] = lambda: None
        self._rank, self._describe = rank, describe
        self._current: LimitedWait | None = None
        self._broken_off: Sequence[AnyAwaited] = ()

    def words(self, awaited: AnyAwaited) -> str:
        return words(awaited, self._describe)

    def given_up(self, awaited: AnyAwaited) -> str:
        """What is said of a wait at its limit."""
        return f"{self._describe(self._rank)} gives up waiting for {self.words(awaited)}"

    @contextmanager
    def waits_for(self, what: What, limit_seconds: float | None = None) -> Iterator[LimitedWait]:
        """Inside, the main thread waits for this."""
        limit = self.stall_seconds if limit_seconds is None else limit_seconds
        outer, self._current = self._current, LimitedWait(self, what, limit)
        if outer is None:
            self._broken_off = ()
        try:
            yield self._current
        except BaseException:
            # As values: whoever catches the error must not keep alive what the wait was for.
            self._broken_off = self._broken_off or tuple(self._current.awaited())
            raise
        finally:
            self._current = outer

    def awaited(self) -> tuple[AnyAwaited, ...]:
        """What the main thread waits for, or waited for when an error came; from any thread.

        Nothing if the main thread was changing that just now.
        """
        current = self._current
        try:
            return tuple(self._broken_off if current is None else current.awaited())
        except Exception:  # also a hint of a user's may raise anything then
            return ()
