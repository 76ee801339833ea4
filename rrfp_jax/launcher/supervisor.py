"""The ranks of a run while it lasts: prints their output, passes signals on, ends those that must end.

It looks at its ranks while it goes on watching them: when it is asked to, by SIGUSR1; when a rank's wait has
come to its limit; and when a rank that runs has given no sign of life for half the time after which the
others give it up.
"""

from __future__ import annotations

import selectors
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

from rrfp_jax.errors import DONE, HANDED_OVER, INTERRUPTED
from rrfp_jax.files import shown_path
from rrfp_jax.launcher.folders import RunFolder
from rrfp_jax.launcher.hang import HangReport, judge, render_report
from rrfp_jax.launcher.rank_process import RankProcess
from rrfp_jax.launcher.restarts import BACK_OFF_SECONDS
from rrfp_jax.launcher.snapshot import Look
from rrfp_jax.printing import is_terminal, write_bytes
from rrfp_jax.progress import LIVE, MARK
from rrfp_jax.runtime.run.place import SILENCE_SECONDS, silence_seconds
from rrfp_jax.runtime.run.recorder import (
    ENDED,
    HEARD,
    PLEAS,
    STARTING,
    is_stopped,
    read,
    recorded,
    recorder_in,
    shared_page,
)
from rrfp_jax.runtime.run.signals import SAVE_SECONDS, Signals, save_seconds

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ASKS_WHY = signal.SIGUSR1
"""Upon which the launcher says what every rank is at, and the run goes on."""

POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long ranks are waited for, in seconds."""

    grace: float = 8.0  # for the others to end by themselves after one has ended badly; then SIGTERM
    terminate: float = 1.0  # after that, or for a stopped rank that all others have left; then SIGKILL
    silence: float = SILENCE_SECONDS  # for a stopped rank that has not begun, or the last that runs
    interrupt: float = 10.0  # after a signal was passed on; then SIGKILL, at once after a second one
    save: float = SAVE_SECONDS  # before that, after SIGINT and SIGTERM, to come to a step boundary and save
    back_off: Sequence[float] = BACK_OFF_SECONDS  # before restarts

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Patience:
        """The usual limits, with those that the ranks have, too: RRFP_SILENCE_SECONDS, RRFP_SAVE_SECONDS."""
        return cls(silence=silence_seconds(environment), save=save_seconds(environment))

    def after(self, signals: Sequence[int]) -> float:
        """How long ranks may take to end after the last of these signals was passed on."""
        asked = [number for number in signals if number in (signal.SIGINT, signal.SIGTERM)]
        if len(asked) > 1:
            return 0.0
        return self.interrupt + (self.save if len(asked) == len(signals) else 0.0)


class Supervisor:
    """The ranks of a run while it lasts; `say` is told of signals, and of why the ranks do not move."""

    def __init__(
        self,
        patience: Patience,
        folder: RunFolder,
        signals: Signals,
        say: Callable[[str], None],
        count: int,
        may_hand_over: bool = False,
    ) -> None:
        self._screen = screen = Screen()

        def say_alone(text: str) -> None:
            screen.live()  # a live line makes room
            say(text)

        self.ranks: list[RankProcess] = []
        self.passed_on: list[int] = []
        self.monitor = HangMonitor(count, folder, say_alone, patience.silence)
        self._was_well, self._may_hand_over = False, may_hand_over
        self._patience, self._folder, self._signals, self.say = patience, folder, signals, say_alone
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._terminate_at = self._kill_at = inf

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run while nothing was wrong, and did not come too late for that."""
        # After SIGTERM ranks may also have saved themselves, which is a good end.
        asked = {*self.passed_on} <= {signal.SIGINT, signal.SIGTERM}
        return self._was_well and not (asked and not any(rank.end.status for rank in self.ranks))

    @property
    def handed_over(self) -> bool:
        """Whether all ranks have stopped after a step because they were asked to hand over."""
        return self._may_hand_over and all(rank.end.status == HANDED_OVER for rank in self.ranks)

    def start(self, rank: int, argv: Sequence[str], env: Mapping[str, str], where: Path) -> None:
        """Start one more rank, with its log in the folder `where`."""
        env, log = {**env, **self._screen.environment}, where / f"rank-{rank}.log"
        process = RankProcess(rank, argv, env, log, partial(self._screen.show, rank))
        self.ranks.append(process)
        self._selector.register(process.output, selectors.EVENT_READ, process)

    def watch(self, meanwhile: Callable[[], None]) -> None:
        """Until all have ended: pass on output and signals, and end whatever would not end by itself."""
        while not all(rank.gone for rank in self.ranks):
            for key, _ in self._selector.select(POLL_SECONDS):
                if key.data is not None and not key.data.read():
                    self._selector.unregister(key.fileobj)
                    key.data.close()
            for rank in self.ranks:
                rank.look()
            now = time.monotonic()
            self._heed_signals(now)
            self._heed_ends(now)
            self._end_frozen(now)
            self.monitor.go_on()
            meanwhile()

    def close(self) -> None:
        """Kill whatever is left, and read no more."""
        self._end_all(signal.SIGKILL)
        for rank in self.ranks:
            while rank.runs:
                rank.look()
                time.sleep(0.001)
            rank.close()
        self._screen.live()
        self._selector.close()

    def _end_all(self, number: int) -> None:
        for rank in self.ranks:
            rank.send(number)

    def _heed_signals(self, now: float) -> None:
        for came in self._signals.take():
            if came == ASKS_WHY:
                self.monitor.wanted = True
                continue
            if came == signal.SIGHUP and self.passed_on:
                continue  # a terminal that closes sends it twice, or after Ctrl-C: nobody is impatient
            number = signal.SIGTERM if came == signal.SIGHUP else came
            self._was_well = self._was_well or not any(map(self._ended_badly, self.ranks))
            self.passed_on.append(number)
            for rank in self.ranks:
                rank.send(number, to_group=False)
            seconds = self._patience.after(self.passed_on)
            self._kill_at = min(self._kill_at, now + seconds)
            names = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGTERM, for SIGHUP,"}
            name = names.get(signal.Signals(came), signal.Signals(came).name)
            has = f"is passed on to the ranks, which have {seconds:g} s; a second one kills them"
            self.say(f"{name} {has if seconds else 'again: the ranks are killed'}")

    def _ended_badly(self, rank: RankProcess) -> bool:
        """Whether a rank has ended otherwise than it was to, upon which the others cannot go on."""
        good = [None, DONE]
        good += [INTERRUPTED] if self.passed_on else []
        good += [HANDED_OVER] if self._may_hand_over else []
        return rank.end.status not in good

    def _heed_ends(self, now: float) -> None:
        """Give the others some time once one has ended badly."""
        if any(map(self._ended_badly, self.ranks)):
            self._terminate_at = min(self._terminate_at, now + self._patience.grace)
        if now >= self._terminate_at and self._kill_at > now + self._patience.terminate:
            self._end_all(signal.SIGTERM)
            self._kill_at = now + self._patience.terminate
        if now >= self._kill_at:
            self._end_all(signal.SIGKILL)

    def _end_frozen(self, now: float) -> None:
        """Kill stopped ranks that nobody else can miss, or that all others have left."""
        running = [rank for rank in self.ranks if rank.runs]
        alone = all(rank.stopped_since < inf for rank in running)
        others_ended = alone and len(running) < len(self.ranks)
        limit = self._patience.terminate if others_ended else self._patience.silence
        for rank in running:
            if now - rank.stopped_since >= limit:
                recording = recorded(self._folder.path).get(rank.end.rank)
                if alone or recording is None or recording.phase == STARTING:
                    rank.send(signal.SIGKILL)


CLEAR = b"\r\x1b[K"


class Screen:
    """The launcher's stdout. When it is gone the run goes on; its logs have it all."""

    def __init__(self) -> None:
        self._live = b""

    @property
    def environment(self) -> dict[str, str]:
        """What ranks are told, so that they write live lines where these can be seen."""
        return {LIVE: "1"} if is_terminal() else {}

    def show(self, rank: int, line: bytes) -> None:
        """A line that a rank has printed, ended or not."""
        text = line.removesuffix(b"\n")
        if text.startswith(MARK.encode()):
            self.live(text.removeprefix(MARK.encode()))
        else:
            write_bytes(self._cleared() + b"[%d] " % rank + text + b"\n" + self._live)

    def live(self, text: bytes = b"") -> None:
        """Another live line, cut to the width of the terminal; without a text there is none any more."""
        if text or self._live:
            before, self._live = self._cleared(), text[: shutil.get_terminal_size().columns - 1]
            write_bytes(before + self._live)

    def _cleared(self) -> bytes:
        return CLEAR if self._live else b""


LOOK_SECONDS = 0.5
"""Between looks at whether ranks want to be looked at."""

LEAST_SILENCE_SECONDS = 5.0
"""How long a rank is silent before it is looked at unasked."""

KEPT = "why.txt"


class HangMonitor:
    """Looks at the ranks of a run and says why they do not move."""

    def __init__(self, count: int, folder: RunFolder, say: Callable[[str], None], silence: float) -> None:
        self._count, self._folder, self._say = count, folder, say
        self._silence = max(silence / 2, LEAST_SILENCE_SECONDS)
        self._beats: dict[int, tuple[float, float]] = {}  # by rank, the latest, and when it was first seen
        self.stall: HangReport | None = None
        self.wanted = False
        self._look: Look | None = None
        self._requests: dict[int, int] = {}  # those that this look is for, by rank
        self._polled = 0.0

    def go_on(self) -> None:
        """Do what there is to do; returns at once."""
        try:
            if self._look is not None:
                if self._look.done():
                    self._judge(self._look)
                    self._end()
                return
            if (now := time.monotonic()) - self._polled >= LOOK_SECONDS:
                self._polled = now
                self._poll(self._folder.path, now)
            if self.wanted or self._requests:
                self.wanted, where = False, self._folder.path
                self._look = Look(where, sorted(recorded(where)))
        except (OSError, ValueError) as error:
            self._say(f"the ranks cannot be looked at: {error}")
            self._end()

    def _judge(self, look: Look) -> None:
        """Say what is found, and keep it with the stacks of all ranks in the run's folder."""
        seen = look.snapshots()
        if not seen:
            self._say("no rank has joined the run yet: they still start")
            return
        absent = sorted({*range(self._count)} - {one.rank for one in seen})
        report = judge(seen, absent=absent, stalls=bool(self._requests))
        self.stall = self.stall or (report if self._requests else None)
        path = self._folder.path / KEPT
        try:
            path.write_text(f"{render_report(report)}\n", encoding="utf-8", errors="backslashreplace")
            where = f"the stacks of all ranks: {shown_path(path)}"
        except OSError as error:  # a full disk
            where = f"{path} cannot be written: {error.strerror}"
        self._say(f"{render_report(report, blamed_only=True)}\n{where}")

    def _end(self) -> None:
        self._look = None
        for rank, request in self._requests.items():
            with suppress(OSError, ValueError):
                shared_page(recorder_in(self._folder.path, rank)).counters[HEARD] = request
        self._requests.clear()

    def _poll(self, folder: Path, now: float) -> None:
        """Note which ranks want to be looked at, or have become silent."""
        for rank in range(self._count):
            path = recorder_in(folder, rank)
            with suppress(OSError, ValueError):
                page = shared_page(path)
                counters, beat = page.counters, page.beat
                if counters[PLEAS] > counters[HEARD]:
                    self._requests[rank] = counters[PLEAS]
                known, since = self._beats.get(rank, (None, now))
                if beat != known:
                    self._beats[rank] = beat, now
                elif now - since >= self._silence:
                    recording = read(path)
                    if recording.lives and recording.phase not in (STARTING, ENDED):
                        self._beats[rank] = beat, inf  # it is looked at once
                        # A stopped one is the supervisor's business.
                        self.wanted = self.wanted or not is_stopped(recording.pid)
