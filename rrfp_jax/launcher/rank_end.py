"""How one rank of a run ended, and the words for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp_jax.errors import INTERRUPTED, REFUSED
from rrfp_jax.runtime.lifecycle.last_words import LastWords
from rrfp_jax.runtime.processes.recording import Recording

LOG_LINES = 12
WAITS_SHOWN = 3

TRACEBACK = "Traceback (most recent call last)"

REFUSAL = "rrfp_jax.errors.UsageError: "
"""What Python's report of our refusals begins with."""

CRASH = re.compile(r"F\d{4} |terminate called|Fatal Python error")
"""How the last messages of C++, and of Python's fault handler, begin."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        status: as `subprocess` has it: negative for a signal.
        by_launcher: the launcher had sent it a signal before.
        stopped: it stood still, in process state T, when it was ended.
        words: what it said at its end, if it did.
        recording: its flight recorder, if it had one.
        log_tail: its latest lines of output.
        ended: when, in the seconds of `time.time()`.
    """

    rank: int
    status: int
    by_launcher: bool = False
    stopped: bool = False
    words: LastWords | None = None
    recording: Recording | None = None
    log_tail: Sequence[str] = ()
    ended: float = 0.0

    @property
    def name(self) -> str:
        """Rank and stages: "rank 2 (stage 2)"."""
        stages = (self.words and self.words.stages) or (self.recording and self.recording.stages)
        return f"rank {self.rank} ({stages})" if stages else f"rank {self.rank}"

    @property
    def kind(self) -> str | None:
        """What it says of its end; without words, what its status says by convention."""
        if self.words is not None:
            return self.words.kind
        if self.by_launcher:
            return None
        if self._last_line.startswith(REFUSAL):  # before it joined the others, so Python said it
            return "refused"
        return {
            REFUSED: "refused",
            INTERRUPTED: "interrupted",
            -signal.SIGINT: "interrupted",
        }.get(self.status)

    @property
    def sentence(self) -> str:
        """Its reason; without words, its last line of output."""
        return self._last_line.removeprefix(REFUSAL) if self.words is None else self.words.sentence

    @property
    def _last_line(self) -> str:
        return next((line for line in reversed(self.log_tail) if line.strip()), "it says nothing")

    @property
    def doing(self) -> str:
        """What it did last, from its flight recorder or its words; may be empty."""
        if self.recording is not None:
            return self.recording.sentence(self.words.time if self.words else self.ended)
        return self.words.doing if self.words is not None else ""

    @property
    def spoke(self) -> float:
        """When it said its last words; without words, when it ended."""
        return self.words.time if self.words is not None else self.ended

    def how(self) -> str:
        """How it ended, after its name, if it is the cause."""
        if self.kind in ("refused", "interrupted"):
            return f"refused: {self.sentence}" if self.kind == "refused" else "was interrupted"
        if self.stopped:
            return "was frozen (stopped)"
        return self._how_by_status() if self.words is None else self._how_by_words(self.words)

    def _how_by_words(self, words: LastWords) -> str:
        if words.kind == "failed":
            return f"raised {_first_line(self.sentence)}" if words.traceback else f"failed: {self.sentence}"
        if words.culprit is None:
            return f"gave up: {self.sentence}"
        return "was cut off: it was alive, but others lost it, and it lost them"

    def _how_by_status(self) -> str:
        if self.by_launcher:
            return "gave no more signs of life and had to be killed"
        if self.status >= 0:
            raised = self.status == 1 and any(line.startswith(TRACEBACK) for line in self.log_tail)
            said = f" after {self.sentence}" if raised else " without a word"
            unusual = f"exited with status {self.status}{said}"
            return unusual if self.status else "ended with status 0 while others still needed it"
        name = _signal_name(-self.status)
        lost = any("JAX distributed service detected" in line for line in self.log_tail)
        without = ", as JAX does without its coordination service" if lost else ""
        hint = {
            "SIGABRT": f"aborted (SIGABRT){without}",
            "SIGKILL": "was killed by SIGKILL (sent by hand, or by the kernel for want of memory)",
        }
        return hint.get(name, f"was killed by {name}")

    def evidence(self) -> Iterable[str]:
        """Indented lines: what it did last, then its traceback, what it waited for, or the end of its log."""
        if self.doing:
            yield f"  it was {self.doing}"
        if self.words is not None:
            if self.words.traceback:
                yield from _indented(self.words.traceback.splitlines())
            elif self.words.waiting:
                yield f"  it waited for {self._waits()}"
        elif self.kind is None and self.status not in (0, -signal.SIGKILL) and self.log_tail:
            yield "  the end of its log:"
            yield from _indented(_end_of_log(self.log_tail))

    def beside(self) -> str:
        """A line about it if it is not the cause."""
        where = f"{self.name}, {self.doing}" if self.doing else self.name
        return f"{where}: {self._beside()}"

    def _beside(self) -> str:
        if self.words is not None:
            return f"waited for {self._waits()}" if self.words.waiting else _first_line(self.sentence)
        if self.stopped:
            return "stood still (stopped), ended by the launcher"
        if self.by_launcher:
            return (
                f"ended by the launcher ({_signal_name(-self.status)})"
                if self.status < 0
                else "ended by the launcher"
            )
        return (
            f"killed by {_signal_name(-self.status)}"
            if self.status < 0
            else f"exited with status {self.status}"
        )

    def _waits(self) -> str:
        waiting = self.words.waiting if self.words is not None else ()
        more = len(waiting) - WAITS_SHOWN
        return "; ".join(waiting[:WAITS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _end_of_log(lines: Sequence[str]) -> Sequence[str]:
    """The last lines; all of a Python traceback if they hold one, or where a crash begins."""
    crashes = [i for i, line in enumerate(lines) if CRASH.match(line)]
    if crashes:  # a dump of all threads follows
        return lines[crashes[0] : crashes[0] + LOG_LINES]
    starts = [i for i, line in enumerate(lines) if line.startswith(TRACEBACK)]
    latest = max(len(lines) - LOG_LINES, 0)
    return lines[min([latest, *starts[-1:]]) :]


def _indented(lines: Iterable[str]) -> Iterable[str]:
    return (f"    {line}".rstrip() for line in lines)


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
