"""What a process does for those who look at it from outside, in a thread that is not the main one.

It shows that it lives, and answers whoever asks what it is at (`launcher/hang.py`). Asking costs a look at a
number in memory, twice a second. If the interpreter itself is stuck, nobody answers. Then a signal has the
stacks dumped by `faulthandler`, which needs no interpreter.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from msgspec import to_builtins

from rrfp_jax.json_files import Unreadable, read_json
from rrfp_jax.runtime.run.recorder import ANSWERED, ASKED, HEARD, PLEAS, FlightRecorder
from rrfp_jax.runtime.run.stacks import Thread, own_threads
from rrfp_jax.runtime.run.waits import AnyAwaited
from rrfp_jax.runtime.run.world import World


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """An answer of a rank."""

    rank: int
    number: int  # of the question
    waiting: tuple[AnyAwaited, ...]  # of the main thread
    gathers: int  # begun, each of which tells its value to the others
    threads: tuple[Thread, ...]  # the main one first


def read_report(folder: Path, rank: int) -> StatusReport | None:
    """The latest of a rank; None if there is none that can be read."""
    with suppress(Unreadable):
        return read_json(folder / f"testimony-{rank}.json", StatusReport)
    return None


def leave_file(folder: Path | int, name: str, content: Any) -> None:
    """Write plain data as JSON into a folder, or its descriptor, which leads there when it was renamed."""
    where, path = (folder, "") if isinstance(folder, int) else (None, f"{folder}/")
    part = f"{path}.{name}.part"
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=where), "w") as out:
        json.dump(to_builtins(content), out)
    os.replace(part, f"{path}{name}", src_dir_fd=where, dst_dir_fd=where)


TICK_SECONDS = 0.5

PLEA_SECONDS = 10.0
"""For the launcher to look at all ranks, which takes two seconds or so, before a wait is given up."""

DUMP_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9
"""Nobody sends it but us, and nobody else is in its way: SIGUSR1 is often a cluster's."""


class StatusResponder:
    """Answers requests for status in one process: the watchdog, or `alone`, calls `attend` twice a second.

    Waits that come to their limit request a diagnosis from now on.
    """

    def __init__(self, world: World) -> None:
        self._world, self._counters = world, world.recorder.page.counters
        world.waits.at_limit = self.request_diagnosis

    def attend(self) -> None:
        """Show a sign of life, and answer who asks."""
        world = self._world
        world.recorder.beat()
        asked = self._counters[ASKED]
        if asked > self._counters[ANSWERED] and world.folder_descriptor is not None:
            with suppress(OSError):  # a full disk; who asks finds no answer
                report = StatusReport(
                    rank=world.rank,
                    number=asked,
                    waiting=world.waits.awaited(),
                    gathers=world.gathers,
                    threads=tuple(own_threads()),
                )
                leave_file(world.folder_descriptor, f"testimony-{world.rank}.json", report)
            self._counters[ANSWERED] = asked

    def alone(self) -> None:
        """Attend from a thread of its own, for a process without others, which has no watchdog."""

        def run() -> None:
            while True:
                sleep(TICK_SECONDS)
                self.attend()

        threading.Thread(target=run, name="rrfp-status", daemon=True).start()

    def request_diagnosis(self) -> None:
        """Have the launcher look at all ranks, now that a wait has come to its limit; returns when it has."""
        if self._world.folder_descriptor is None:
            return
        self._counters[PLEAS] = plea = self._counters[PLEAS] + 1
        deadline = monotonic() + PLEA_SECONDS
        while self._counters[HEARD] < plea and monotonic() < deadline:
            sleep(0.05)


def dump_on_signal(path: Path, recorder: FlightRecorder) -> None:
    """From now on `DUMP_SIGNAL` has all stacks written to a file, unless somebody else uses that signal."""
    if not hasattr(signal, "SIGRTMIN") or signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL:
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    faulthandler.register(DUMP_SIGNAL, file, all_threads=True)  # the descriptor stays open for good
    recorder.page.dump_signal = DUMP_SIGNAL
