"""How a process of several ends after an error: it says what happened, and never waits for the dead.

It leaves its last words for the launcher, tells the other processes, and ends at once, because JAX's own way
out waits for processes that may be gone.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf, isinf
from pathlib import Path
from time import monotonic, sleep
from time import time as wall_time
from typing import Literal, TypeAlias

from msgspec import to_builtins

from rrfp_jax.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    REFUSED,
    FaultOfRank,
    PeerLost,
    TrainingError,
    UsageError,
    text_of,
)
from rrfp_jax.json_files import Unreadable, as_kind, parse_json, read_json
from rrfp_jax.printing import settle_streams, warn
from rrfp_jax.runtime.run.coordinator import Coordinator
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.membership import Failed, Gone, Goodbye
from rrfp_jax.runtime.run.recorder import ENDED
from rrfp_jax.runtime.run.signals import children_give_up, exit_now
from rrfp_jax.runtime.run.stacks import own_threads
from rrfp_jax.runtime.run.status_report import TICK_SECONDS, StatusResponder, leave_file
from rrfp_jax.runtime.run.waits import AnyAwaited
from rrfp_jax.runtime.run.world import World

END_SECONDS = 10.0
"""After so long a thread that ends the process is stuck itself, as on a disk that does not answer."""

WORDS = "\x1d"
"""How a printed line of last words begins, ASCII's group separator; its launcher shows no such line."""

LONGEST_LINE = 60_000
"""Characters of such a line, of which the launcher waits for 65,536; a longer traceback is left out."""

ExitKind: TypeAlias = Literal["done", "failed", "refused", "peer lost", "interrupted"]
"""How ranks and runs end."""

STATUSES: Mapping[ExitKind, int] = {"done": DONE, "refused": REFUSED, "interrupted": INTERRUPTED}
"""The exit status that goes with each; FAILED with all others."""

CAUSES: Sequence[tuple[type[BaseException], ExitKind]] = (
    (PeerLost, "peer lost"),
    (UsageError, "refused"),
    (KeyboardInterrupt, "interrupted"),
    (BaseException, "failed"),
)
"""The first that fits an error says how a rank ends by it."""


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """Why a rank ended."""

    rank: int
    stages: str  # that it ran, as text: "stage 2", "stages 2-3"
    kind: ExitKind  # "failed" by its own fault, "refused" what it was asked
    sentence: str  # the reason: for "failed", the exception as `ValueError: ...`
    waiting: tuple[AnyAwaited, ...] = ()
    culprit: int | None = None  # the rank whose loss ended it, if one did
    traceback: str | None = None  # of its own failure
    time: float = field(default_factory=wall_time)

    def write(self, folder: Path | int) -> None:
        """Write `last-words-<rank>.json`, whole or not at all, by the path or the descriptor of a folder."""
        leave_file(folder, f"last-words-{self.rank}.json", self)

    def line(self) -> str:
        """The report as a line, for when no file can be written: a full disk, a folder that was removed."""
        text = json.dumps(to_builtins(self))
        if len(text) > LONGEST_LINE:
            text = json.dumps(to_builtins(replace(self, traceback=None)))
        return f"{WORDS}{text}"


def report_in(line: bytes) -> ExitReport | None:
    """The last words that a printed line holds; None if it holds none."""
    text = line.removeprefix(WORDS.encode())
    with suppress(ValueError):
        return None if text == line else as_kind(parse_json(text), ExitReport)
    return None


def read_all(folder: Path) -> dict[int, ExitReport]:
    """The last words in a folder by rank; a file that holds none is passed over."""
    found = {}
    for path in sorted(folder.glob("last-words-*.json")):
        with suppress(Unreadable):
            words = read_json(path, ExitReport)
            found[words.rank] = words
    return found


LONGEST_SENTENCE = 4000
"""Characters of an exception's text that are told; its traceback has them all."""

FLUSH_SECONDS = 1.0


def exit_report(world: World, error: BaseException) -> ExitReport:
    """Why this process ends."""
    kind = next(kind for cause, kind in CAUSES if isinstance(error, cause))
    culprit = error.culprit if isinstance(error, FaultOfRank) else None
    ours = isinstance(error, (UsageError, TrainingError))
    sentence = text_of(error) if ours else f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")
    # It goes into a frame and on terminals, which texts of any length, or with odd bytes in them, could not.
    sentence = sentence[:LONGEST_SENTENCE].encode("utf-8", "backslashreplace").decode()
    if kind == "interrupted":
        sentence = "interrupted"
    if kind == "peer lost" and world.membership.is_cut_off:
        culprit, sentence = world.rank, "lost all other processes at once: cut off, if they were not killed"
    return ExitReport(
        rank=world.rank,
        stages=world.membership.stages[world.rank],
        kind=kind,
        sentence=sentence,
        waiting=world.waits.awaited(),
        culprit=culprit,
        traceback="".join(traceback.format_exception(error)) if kind == "failed" and not ours else None,
    )


def report(world: World, words: ExitReport) -> None:
    """Tell the launcher if there is one, else whoever reads standard error; then the other processes."""
    who = world.describe(world.rank)
    if world.folder_descriptor is not None:
        try:
            words.write(world.folder_descriptor)  # the launcher tells it, once for all ranks
        except OSError:
            warn(f"\n{words.line()}")  # a line of its own, whatever was printed before
    elif words.kind != "interrupted" or world.size > 1:  # whoever interrupts one process knows it
        text = [words.traceback or "", f"{who}: {words.sentence}\n"]
        text += [f"  it waited for {world.waits.words(item)}\n" for item in words.waiting]
        warn("".join(text), end="")
    if world.mailbox is not None:
        culprit = world.rank if words.culprit is None else words.culprit
        of_another = words.kind == "peer lost" and culprit != world.rank  # all tell of that one alike
        sentence = words.sentence if of_another else f"{who}: {words.sentence}"
        if words.kind == "interrupted":
            sentence = f"{who} was interrupted"
        world.mailbox.end(Failed(culprit, sentence))


def settle(mailbox: Mailbox, is_settled: Callable[[], bool], seconds: float) -> None:
    """Wait, at most so long, until all that was posted is sent, or has arrived, as `is_settled` says.

    Meanwhile what comes is read: closing a connection with something unread would reset it, and what is still
    on its way would be lost.
    """
    deadline = monotonic() + seconds
    while not is_settled() and monotonic() < deadline:
        mailbox.read()
        sleep(0.01)
    mailbox.read()


def end(world: World, status: int) -> None:
    """End this process now, without the ways out that wait for others."""
    try:
        if world.mailbox is not None:
            settle(world.mailbox, world.mailbox.flushed, FLUSH_SECONDS)
        settle_streams()
    finally:
        exit_now(status)


def fail(world: World, error: BaseException) -> None:
    """Report an error and end this process with its status; from any thread, of which one does."""
    world.ending.acquire(timeout=END_SECONDS)
    status = FAILED
    try:
        words = exit_report(world, error)
        status = STATUSES.get(words.kind, FAILED)
        report(world, words)
    except Exception:
        warn(traceback.format_exc(), end="")
    finally:
        end(world, status)


WORD_SECONDS = 5.0
"""Or half of the limit: after so long it is said who is waited for."""


def limit_overtime(world: World, limit: float) -> None:
    """Limit how long (s) this process outlasts its main thread; not if nobody waits for it."""
    if world.folder is None and world.size == 1:
        limit = inf

    def outlast(seconds: float) -> None:
        """Let so many seconds pass in which this process does not say goodbye."""
        while seconds > 0:
            begun = monotonic()
            sleep(min(TICK_SECONDS, seconds))
            if not world.says_goodbye:
                seconds -= monotonic() - begun

    def watch() -> None:
        # Joining it would be in Python's way, which looks at its lock.
        while threading.main_thread().is_alive():
            sleep(TICK_SECONDS)
        early = min(WORD_SECONDS, limit / 2)
        outlast(early)
        at_most = "" if isinf(limit) else f", {limit:g} s at most"
        warn(f"{world.describe(world.rank)}: its work is done; it waits for {waited_for()} to end{at_most}")
        outlast(limit - early)
        sentence = f"its work is done, but {waited_for()} has not ended within {limit:g} s"
        fail(world, TrainingError(f"{sentence}; RRFP_EXIT_SECONDS allows more"))

    threading.Thread(target=watch, name="rrfp-overtime", daemon=True).start()


def waited_for() -> str:
    """What keeps this process from ending: a thread, or an exit handler, by name and line."""
    lasting = {thread.name for thread in threading.enumerate() if not thread.daemon}
    threads = own_threads()
    for thread in threads:
        if thread.name in lasting and not thread.is_main:
            return f"the thread {thread.name}, in {thread.users or thread.frames[0]},"
    at = next((thread.users or next(iter(thread.frames), None) for thread in threads if thread.is_main), None)
    return f"an exit handler{f', in {at},' if at else ''}"


class Shutdown:
    """The end of a process of several; one that serves the coordination service ends last."""

    def __init__(self, world: World, coordinator: Coordinator | None = None) -> None:
        assert world.mailbox is not None
        self._world, self._mailbox, self._coordinator = world, world.mailbox, coordinator
        self._watchdog = Watchdog(world.mailbox, StatusResponder(world).attend, self._give_up)
        self._done = threading.Event()
        # Started now: from Python 3.12 on no thread can be once the main one has ended.
        self._leaver = threading.Thread(target=self._leave_when_done, name="rrfp-leave", daemon=True)
        self._leaver.start()
        sys.excepthook = lambda kind, error, trace: fail(world, error)
        atexit.register(self._say_goodbye)
        children_give_up(self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: it is no rank, and others must not take it for a sign of this one's life."""
        sys.excepthook = sys.__excepthook__
        atexit.unregister(self._say_goodbye)
        self._mailbox.let_go()

    def _give_up(self, gone: Gone) -> None:
        fail(self._world, PeerLost(gone.sentence, gone.culprit))

    def _leave_when_done(self) -> None:
        self._done.wait()
        from rrfp_jax.runtime._jax import leave_run  # here: the launcher reads this file without JAX

        leave_run()

    def _say_goodbye(self) -> None:
        """At Python's end, after the main thread's."""
        world = self._world
        world.says_goodbye = True
        world.recorder.phase(ENDED)
        if self._coordinator is not None:
            while not world.membership.all_gone:  # one that is silent for too long counts as lost
                self._mailbox.read()
                sleep(0.02)
            if (gone := world.membership.trouble) is not None:
                self._give_up(gone)
        self._leave_service()
        for act in world.at_last:
            act()
        self._mailbox.end(Goodbye())
        settle(self._mailbox, self._mailbox.delivered, world.membership.silence)  # a link may come back
        if self._coordinator is not None:
            self._coordinator.close()
        self._watchdog.stop()
        self._mailbox.close()
        world.says_goodbye = False  # exit handlers that were there before follow

    def _leave_service(self) -> None:
        """Leave the coordination service, in the thread that was started for it: it may stand still."""
        limit = self._world.membership.silence
        self._done.set()
        self._leaver.join(min(limit, threading.TIMEOUT_MAX))
        if self._leaver.is_alive():
            sentence = (
                f"its work is done, but the process with the key-value store, started by the launcher or "
                f"rank 0, has not answered for {limit:g} s: frozen or cut off"
            )
            fail(self._world, TrainingError(sentence))


HANG_UP_SECONDS = 0.01
"""Pause before a connection that was closed is read again."""


class Watchdog:
    """Lives from joining a run to leaving it, whatever the main thread does: compile, load data, wait.

    At every tick it reads the mailbox and calls `attend`. When a process is gone and the main thread has not
    noticed, it calls `give_up`, which must not return.

    JAX aborts a process that loses the coordination service, as does one that is cut off from everybody: then
    the main thread is not waited for.
    """

    def __init__(self, mailbox: Mailbox, attend: Callable[[], None], give_up: Callable[[Gone], None]) -> None:
        self._mailbox, self._attend, self._give_up = mailbox, attend, give_up
        self._stop_end, self._stopper = os.pipe()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rrfp-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. From another one, once."""
        self._stopped = True
        os.write(self._stopper, b"\0")  # closing it would wake nobody while a forked child has it open
        self._thread.join()
        os.close(self._stopper)
        os.close(self._stop_end)

    def _run(self) -> None:
        while not self._stopped:
            known = len(self._mailbox.membership.gone)
            if self._mailbox.await_hang_up(TICK_SECONDS, self._stop_end):
                self._mailbox.read()
                # Nothing new: the main thread reads just now, or there is more to come.
                if len(self._mailbox.membership.gone) == known:
                    sleep(HANG_UP_SECONDS)
            self._attend()
            if (gone := self._mailbox.tick()) is not None:
                self._give_up(gone)
