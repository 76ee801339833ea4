"""The launcher's look at its ranks while it goes on watching them.

It looks when it is asked to, by SIGUSR1; when a rank's wait has come to its limit; and when a rank that runs
has given no sign of life for half the time after which the others give it up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.files import read_whole, shown_path
from rrfp_jax.launcher.why.verdict import Sight, State, Verdict, judge
from rrfp_jax.runtime.run.proc import is_stopped
from rrfp_jax.runtime.run.recorder import (
    ANSWERED,
    ASKED,
    HEARD,
    PLEAS,
    Counters,
    Recording,
    counters_of,
    last_beat,
    read,
)
from rrfp_jax.runtime.run.stacks import Thread, dumped_threads
from rrfp_jax.runtime.run.status_report import read_testimony

ANSWER_SECONDS = 3.0
"""For a rank to answer; it looks twice a second. One that cannot has its stacks dumped then."""

DUMP_SECONDS = 0.5

LARGEST_DUMP = 2**22
"""Bytes of a file of dumped stacks that is read."""


class Look:
    """A look at some ranks, whose runs all are on this machine; use as a context manager.

    `done` is called again and again until it says that all have answered, or do not.

    Args:
        folder: of the run.
        ranks: that have flight recorders there.

    Raises:
        PermissionError: they are another user's.
        OSError, ValueError: a flight recorder cannot be read.
    """

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._asked: dict[int, int] = {}
        self._counters: dict[int, Counters] = {}
        self._began, self._dumped = time.monotonic(), 0.0
        self._dumps: set[int] = set()
        with ExitStack() as stack:
            for rank in ranks:
                counters = stack.enter_context(counters_of(folder / f"flight-{rank}"))
                self._counters[rank] = counters
                counters[ASKED] = self._asked[rank] = max(counters[ASKED], counters[ANSWERED]) + 1
            self._stack = stack.pop_all()

    def __enter__(self) -> Look:
        return self

    def __exit__(self, *why: object) -> None:
        self._stack.close()

    def done(self) -> bool:
        """Whether there is nothing more to wait for."""
        silent = [rank for rank in self._counters if not self._has_answered(rank) and self._can_answer(rank)]
        if not silent:
            return True
        waited = time.monotonic() - self._began
        if waited > ANSWER_SECONDS and not self._dumped:
            for rank in silent:
                self._have_dumped(rank)
            self._dumped = waited
        return bool(self._dumped) and waited > self._dumped + DUMP_SECONDS

    def sights(self) -> list[Sight]:
        """What is seen of every rank."""
        return [self._sight(rank) for rank in self._counters]

    def _sight(self, rank: int) -> Sight:
        recording = read(self._folder / f"flight-{rank}")
        testimony = read_testimony(self._folder, rank) if self._has_answered(rank) else None
        if testimony is not None and testimony.number < self._asked[rank]:
            testimony = None
        state: State = "silent" if testimony is None else "answers"
        if not recording.lives:
            state = "gone"
        elif is_stopped(recording.pid):
            state = "stopped"
        threads = testimony.threads if testimony is not None else self._dumped_threads(rank)
        return Sight(
            rank=rank,
            state=state,
            now=time.time(),
            recording=recording,
            testimony=testimony,
            threads=threads,
        )

    def _has_answered(self, rank: int) -> bool:
        return self._counters[rank][ANSWERED] >= self._asked[rank]

    def _can_answer(self, rank: int) -> bool:
        recording = read(self._folder / f"flight-{rank}")
        return recording.lives and not is_stopped(recording.pid)

    def _have_dumped(self, rank: int) -> None:
        """Have a rank's stacks dumped by the signal that it listens to, if it does."""
        recording = read(self._folder / f"flight-{rank}")
        if recording.dump_signal and recording.lives:
            with suppress(ProcessLookupError):
                os.kill(recording.pid, recording.dump_signal)
                self._dumps.add(rank)

    def _dumped_threads(self, rank: int) -> tuple[Thread, ...]:
        if rank not in self._dumps:
            return ()
        try:
            text = read_whole(self._folder / f"stacks-{rank}.txt", LARGEST_DUMP)
        except OSError:
            return ()
        return tuple(dumped_threads(text.decode("utf-8", "replace").splitlines()))


def recorded(folder: Path) -> dict[int, Recording]:
    """The flight recorders in a folder by rank, without those that are being made just now."""
    found = {}
    for path in folder.glob("flight-*"):
        with suppress(OSError, ValueError):
            recording = read(path)
            found[recording.rank] = recording
    return found


def living_ranks(folder: Path) -> Sequence[int] | None:
    """The ranks of a run if any of them lives, else none; None if there are no flight recorders yet.

    Raises:
        UsageError: they are on another machine.
    """
    found = recorded(folder)
    hosts = sorted({recording.host for recording in found.values() if not recording.is_here})
    if hosts:
        raise UsageError(f"{folder}: the run is on {', '.join(hosts)}; run this command there")
    if not found:
        return None
    return sorted(found) if any(recording.lives for recording in found.values()) else []


def absent_ranks(folder: Path) -> Sequence[int]:
    """Those that the launcher has started and that have no flight recorder yet."""
    started = (path.stem.removeprefix("rank-") for path in folder.glob("rank-*.log"))
    return sorted(int(n) for n in started if n.isdecimal() and not (folder / f"flight-{n}").exists())


BOOTSTRAP = ("_bootstrap", "_bootstrap_inner")
"""Outermost in every thread but the main one, and of no interest."""


def told(verdict: Verdict, seen: Sequence[Sight], *, blamed_only: bool = False) -> str:
    """The verdict, then the Python stacks of all threads: of those that it blames first, equal ones once.

    Args:
        verdict: of the run.
        seen: its ranks.
        blamed_only: leave out the stacks of all others.
    """
    order = sorted(seen, key=lambda sight: (sight.rank not in verdict.blamed, sight.rank))
    alike: dict[str, list[str]] = {}
    for sight in order:
        if sight.rank in verdict.blamed or not blamed_only:
            alike.setdefault("\n".join(_stacks(sight)), []).append(sight.name)
    blocks = [f"{', '.join(names)}:\n{stacks}" for stacks, names in alike.items()]
    head = ["the stacks of all threads, the latest call first:"] if blocks else []
    return "\n".join([verdict.text, *head, *blocks])


def _stacks(sight: Sight) -> Sequence[str]:
    if not sight.threads:
        return [f"  none: {'it stands still' if sight.state == 'stopped' else 'it does not answer'}"]
    return [line for thread in sight.threads for line in _lines(thread)]


def _lines(thread: Thread) -> Sequence[str]:
    frames = [frame for frame in thread.frames if frame.function not in BOOTSTRAP]
    name = f"{thread.name} (main)" if thread.is_main else thread.name
    return [f"  thread {name}", *(f"    {frame.file}:{frame.line} {frame.function}" for frame in frames)]


PLEA_POLL_SECONDS = 0.5

LEAST_SILENCE_SECONDS = 5.0
"""Of a rank, before it is looked at unasked."""

KEPT = "why.txt"


class Inquiry:
    """See above.

    Args:
        count: of ranks.
        folder: gives that of the run, which may be renamed.
        say: is told what is found.
        silence: the limit on a rank's silence, in seconds.

    Attributes:
        stall: what was found when a wait first came to its limit; None if none has.
    """

    def __init__(
        self, count: int, folder: Callable[[], Path], say: Callable[[str], None], silence: float
    ) -> None:
        self._count, self._folder, self._say = count, folder, say
        self._silence = max(silence / 2, LEAST_SILENCE_SECONDS)
        self._silent: set[int] = set()  # ranks
        self._beats: dict[int, tuple[float, float]] = {}  # by rank, the latest, and when it was first seen
        self.stall: Verdict | None = None
        self._look: Look | None = None
        self._wanted = False
        self._pleas: dict[int, int] = {}  # those that this look is for, by rank
        self._polled = 0.0

    def ask(self) -> None:
        """Look at the ranks as soon as that can be."""
        self._wanted = True

    def go_on(self) -> None:
        """Do what there is to do; returns at once."""
        if self._look is None:
            self._hear_pleas()
            if self._wanted or self._pleas:
                self._begin()
        elif self._look.done():
            self._end(self._look)

    def close(self) -> None:
        """Look no more."""
        if self._look is not None:
            self._look.__exit__()
            self._look = None

    def _begin(self) -> None:
        self._wanted = False
        folder = self._folder()
        try:
            self._look = Look(folder, sorted(recorded(folder)))
        except (OSError, ValueError) as error:
            self._pleas.clear()
            self._say(f"the ranks cannot be looked at: {error}")

    def _end(self, look: Look) -> None:
        """Say what is found, and let those go on that had asked for it."""
        try:
            seen = look.sights()
        except (OSError, ValueError) as error:
            self._say(f"the ranks cannot be looked at: {error}")
        else:
            if seen:
                absent = sorted({*range(self._count)} - {sight.rank for sight in seen})
                verdict = judge(seen, absent=absent, stalls=bool(self._pleas))
                self.stall = self.stall or (verdict if self._pleas else None)
                self._tell(verdict, seen)
            else:
                self._say("no rank has joined the run yet: they still start")
        self.close()
        for rank, plea in self._pleas.items():
            self._set_heard(rank, plea)
        self._pleas.clear()

    def _tell(self, verdict: Verdict, seen: Sequence[Sight]) -> None:
        """Say it, and keep it with the stacks of all ranks in the run's folder."""
        path = self._folder() / KEPT
        try:
            path.write_text(f"{told(verdict, seen)}\n", encoding="utf-8", errors="backslashreplace")
            where = f"the stacks of all ranks: {shown_path(path)}"
        except OSError as error:  # a full disk
            where = f"{path} cannot be written: {error.strerror}"
        self._say(f"{told(verdict, seen, blamed_only=True)}\n{where}")

    def _hear_pleas(self) -> None:
        """Note which ranks want to be looked at; a few times a second is enough."""
        now = time.monotonic()
        if now - self._polled < PLEA_POLL_SECONDS:
            return
        self._polled, folder = now, self._folder()
        for rank in range(self._count):
            with suppress(OSError, ValueError), counters_of(folder / f"flight-{rank}") as counters:
                if counters[PLEAS] > counters[HEARD]:
                    self._pleas[rank] = counters[PLEAS]
                self._note_silence(rank, folder / f"flight-{rank}", now)

    def _note_silence(self, rank: int, path: Path, now: float) -> None:
        """Look at a rank that has become silent, once; a stopped one is the supervisor's business."""
        beat = last_beat(path)
        known, since = self._beats.setdefault(rank, (beat, now))
        if beat != known:
            self._beats[rank] = (beat, now)
            self._silent.discard(rank)
        elif now - since >= self._silence and rank not in self._silent:
            recording = read(path)
            if recording.lives and recording.phase not in ("starting", "ended"):
                self._silent.add(rank)
                self._wanted = self._wanted or not is_stopped(recording.pid)

    def _set_heard(self, rank: int, plea: int) -> None:
        with suppress(OSError, ValueError), counters_of(self._folder() / f"flight-{rank}") as counters:
            counters[HEARD] = plea
