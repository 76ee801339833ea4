"""What a process last did, readable after it was killed: one page of memory mapped from a file.

The kernel keeps what was stored in a shared mapping, whatever becomes of the process. There is no lock. A
record carries its number at both ends, written first and last, so a reader sees whether it is whole. The
phase has two places, written in turn. Dispatches have a ring of 64.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from rrfp_jax.core.tasks import Kind, Task
from rrfp_jax.files import read_whole

MAGIC = b"RRFPREC1"
SIZE = 4096  # bytes: one page
ENTRIES = 64

HEADER = struct.Struct("<8sii")  # magic, rank, pid
STAGES = struct.Struct("<H62s")  # length, text
BEAT = struct.Struct("<d")  # time
PHASE = struct.Struct("<QdH110sQ")  # number, since, length, text, number
ENTRY = struct.Struct("<QqiiiidQ")  # position, step, stage, kind, chunk, microbatch, time, position

HEADER_AT, STAGES_AT, BEAT_AT, PHASE_AT, RING_AT = 0, 16, 80, 96, 384
assert PHASE_AT + 2 * PHASE.size <= RING_AT and RING_AT + ENTRIES * ENTRY.size <= SIZE

SILENT = 2.0  # seconds without a heartbeat that are worth a word


class FlightRecorder:
    """The writer's side. Times are those of `time.time()`, in seconds, so that another process can compare.

    Args:
        path: of the file, made anew; None for no file.
        rank: of this process.
        stages: which stages it runs, as text: "stage 2", "stages 2-3"; "" until `runs` says.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path | None, rank: int, stages: str) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE) if path is None else _mapped(path)
        self._phases = 0
        self._position = 0
        self.runs(stages)
        HEADER.pack_into(self._memory, HEADER_AT, MAGIC, rank, os.getpid())
        self.phase("starting")
        self.beat()

    def runs(self, stages: str) -> None:
        """Say which stages the process runs."""
        STAGES.pack_into(self._memory, STAGES_AT, *_clipped(stages, 62))

    def phase(self, text: str) -> None:
        """Say what begins now, in a few words: "compiling", "step 12", "validation 3", "ended"."""
        self._phases = number = self._phases + 1
        at = PHASE_AT + number % 2 * PHASE.size
        PHASE.pack_into(self._memory, at, number, time.time(), *_clipped(text, 110), number)

    def beat(self) -> None:
        """Say that the process is alive."""
        BEAT.pack_into(self._memory, BEAT_AT, time.time())

    def dispatched(self, step: int, stage: int, task: Task) -> None:
        """Say that a task is being dispatched. Takes about half a microsecond."""
        self._position = position = self._position + 1
        kind, chunk, microbatch = task
        at = RING_AT + position % ENTRIES * ENTRY.size
        ENTRY.pack_into(
            self._memory, at, position, step, stage, kind, chunk, microbatch, time.time(), position
        )


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
    """

    rank: int
    pid: int
    stages: str
    phase: str
    phase_since: float
    beat: float
    last: tuple[RecordedDispatch, ...]

    @property
    def training_step(self) -> int | None:
        """The training step that it was in, if it was in one."""
        number = self.phase.removeprefix("step ")
        return int(number) if number.isdecimal() else None

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


def read(path: Path) -> Recording:
    """Read a flight recorder, whether or not its process lives.

    Raises:
        ValueError: the file is no flight recorder.
        OSError: it cannot be read.
    """
    data = read_whole(path, SIZE)
    if len(data) != SIZE or not data.startswith(MAGIC):
        raise ValueError(f"{path}: not a flight recorder ({len(data)} bytes, beginning with {data[:8]!r})")
    _, rank, pid = HEADER.unpack_from(data, HEADER_AT)
    phases = [PHASE.unpack_from(data, PHASE_AT + i * PHASE.size) for i in range(2)]
    whole = [p for p in phases if p[0] and p[0] == p[-1]]
    _, since, length, text, _ = max(whole, default=(0, 0.0, 0, b"", 0))
    return Recording(
        rank=rank,
        pid=pid,
        stages=_text(*STAGES.unpack_from(data, STAGES_AT)),
        phase=_text(length, text),
        phase_since=since,
        beat=BEAT.unpack_from(data, BEAT_AT)[0],
        last=_entries(data),
    )


def _entries(data: bytes) -> tuple[RecordedDispatch, ...]:
    """The whole entries of the ring, oldest first."""
    known = {int(kind) for kind in Kind}
    found = []
    for i in range(ENTRIES):
        position, step, stage, kind, chunk, microbatch, at, again = ENTRY.unpack_from(
            data, RING_AT + i * ENTRY.size
        )
        if position and position == again and position % ENTRIES == i and kind in known:
            found.append(RecordedDispatch(position, step, stage, Task(Kind(kind), chunk, microbatch), at))
    return tuple(sorted(found, key=lambda entry: entry.position))


def _mapped(path: Path) -> mmap.mmap:
    """The file, filled with zeros and mapped."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Zeros are written, not left as a hole: on a full disk a hole would end in SIGBUS at the first store.
        # No truncation to 0 first, for the same signal would hit whoever still maps an earlier file here.
        os.pwrite(file, bytes(SIZE), 0)
        os.ftruncate(file, SIZE)
        return mmap.mmap(file, SIZE)
    finally:
        os.close(file)


def _clipped(text: str, most: int) -> tuple[int, bytes]:
    data = text.encode("utf-8", "replace")[:most]
    return len(data), data


def _text(length: int, data: bytes) -> str:
    return data[:length].decode("utf-8", "ignore")


def _ago(seconds: float) -> str:
    return f"{max(seconds, 0.0):.1f} s"
