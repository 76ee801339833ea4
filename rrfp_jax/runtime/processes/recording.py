"""What is read from a flight recorder."""

from __future__ import annotations

from dataclasses import dataclass

from rrfp_jax.core.tasks import Task
from rrfp_jax.runtime.processes.proc import host_name, start_of
from rrfp_jax.runtime.processes.round_board import RecordedRound

SILENT = 2.0  # seconds without a heartbeat that are worth a word


@dataclass(frozen=True)
class RecordedDispatch:
    """A task that was dispatched.

    Attributes:
        position: in the process's sequence of dispatches, from 1.
        at: when, in the seconds of `time.time()`.
    """

    position: int
    step: int
    stage: int
    task: Task
    at: float


@dataclass(frozen=True)
class Recording:
    """What a flight recorder holds.

    Attributes:
        stages: as text: "stage 2".
        phase: what the process was at; "" if it had not said.
        phase_since, beat: when that began and when it was last known alive, in the seconds of `time.time()`.
        last: the latest dispatches, oldest first, at most 64.
        host, started: of the process: the machine's name, and its start as `start_of` has it; None if that
            is unknown.
        dump_signal: that makes the process dump its stacks; 0 for none.
        entered, collective: how many programs of several processes it has entered that are no tasks; the
            latest of them.
        round: what it has sent and got in the present round.
        training_step: the latest that it has begun; None if there is none.
    """

    rank: int
    pid: int
    stages: str
    phase: str
    phase_since: float
    beat: float
    last: tuple[RecordedDispatch, ...]
    host: str = ""
    started: int | None = None
    dump_signal: int = 0
    entered: int = 0
    collective: str = ""
    round: RecordedRound | None = None
    training_step: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether its process is, or was, on this machine."""
        return self.host.encode() == host_name()

    @property
    def lives(self) -> bool:
        """Whether its process, which is on this machine, still runs."""
        return self.started is not None and start_of(self.pid) == self.started

    @property
    def tasks(self) -> dict[int, Task]:
        """The latest dispatches by position."""
        return {entry.position: entry.task for entry in self.last}

    def sentence(self, now: float) -> str:
        """What it did last, with times before `now`, the seconds of `time.time()` at which it ended."""
        numbered = self.phase[-1:].isdigit()
        place = f"in {self.phase}" if numbered else self.phase or "at an unknown point"
        words = ["at its end" if self.phase == "ended" else place]
        if self.last:
            entry = self.last[-1]
            step = "" if self.phase == f"step {entry.step}" else f" in step {entry.step}"
            words.append(
                f"last dispatched {entry.task} on stage {entry.stage}{step}, {_ago(now - entry.at)} before"
            )
        else:
            words.append(f"for {_ago(now - self.phase_since)}")
        alive = max(self.beat, self.phase_since, *(entry.at for entry in self.last))
        if now - alive > SILENT:
            words.append(f"last sign of life {_ago(now - alive)} before")
        return ", ".join(words)


def _ago(seconds: float) -> str:
    return f"{max(seconds, 0.0):.1f} s"
