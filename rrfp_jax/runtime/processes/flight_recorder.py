"""What a process last did, readable while it runs and after it was killed: memory mapped from a file.

The kernel keeps what was stored in a shared mapping, whatever becomes of the process. There is no lock. A
record carries its number at both ends, written first and last, so a reader sees whether it is whole. The
phase has two places, written in turn. Dispatches have a ring of 64. The messages of the present round have a
board (`round_board.py`). Who asks a living process for its stacks writes that here, too (`counters.py`).
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Kind, Task
from rrfp_jax.files import opened, read_whole
from rrfp_jax.runtime.processes.counters import COUNTERS_SIZE, Counters
from rrfp_jax.runtime.processes.proc import host_name, start_of
from rrfp_jax.runtime.processes.recording import RecordedDispatch, Recording
from rrfp_jax.runtime.processes.round_board import BOARD_SIZE, RoundBoard, read_entered, read_round

MAGIC = b"RRFPREC3"
BOARD_AT = 4096
SIZE = BOARD_AT + BOARD_SIZE  # bytes
ENTRIES = 64

HEADER = struct.Struct("<8sii")  # magic, rank, pid
STAGES = struct.Struct("<H62s")  # length, text
BEAT = struct.Struct("<d")  # time
PHASE = struct.Struct("<QdqH102sQ")  # number, since, training step, length, text, number
ENTRY = struct.Struct("<QqiiiidQ")  # position, step, stage, kind, chunk, microbatch, time, position
PROCESS = struct.Struct("<Qi64s")  # start, signal that has stacks dumped, host

HEADER_AT, STAGES_AT, BEAT_AT, PHASE_AT, RING_AT, PROCESS_AT, COUNTERS_AT = 0, 16, 80, 96, 384, 3584, 3712
assert PHASE_AT + 2 * PHASE.size <= RING_AT and RING_AT + ENTRIES * ENTRY.size <= PROCESS_AT
assert PROCESS_AT + PROCESS.size <= COUNTERS_AT and COUNTERS_AT + COUNTERS_SIZE <= BOARD_AT


class FlightRecorder:
    """The writer's side. Times are those of `time.time()`, in seconds, so that another process can compare.

    Args:
        path: of the file, made anew; None for no file.
        rank: of this process.
        stages: which stages it runs, as text: "stage 2", "stages 2-3"; "" until `runs` says.

    Raises:
        OSError: the file cannot be written.

    Attributes:
        board: of the present round's messages.
        counters: through which this process and those who look at it tell each other something.
    """

    def __init__(self, path: Path | None, rank: int, stages: str) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE) if path is None else _mapped(path)
        self.board = RoundBoard(self._memory, BOARD_AT)
        self.counters = Counters(self._memory, COUNTERS_AT)
        self._phases, self._training_step = 0, -1
        self._position = 0
        self.runs(stages)
        self.dumps_by(0)
        HEADER.pack_into(self._memory, HEADER_AT, MAGIC, rank, os.getpid())
        self.phase("starting")
        self.beat()

    def runs(self, stages: str) -> None:
        """Say which stages the process runs."""
        STAGES.pack_into(self._memory, STAGES_AT, *_clipped(stages, 62))

    def dumps_by(self, number: int) -> None:
        """Say which signal makes the process dump its stacks; 0 for none."""
        PROCESS.pack_into(self._memory, PROCESS_AT, start_of(os.getpid()) or 0, number, host_name())

    def begin_round(self, round: int, step: int, rules: StepRules, own: Sequence[int]) -> None:
        """A round of tasks begins on these stage replicas; see `RoundBoard.begin`."""
        self.board.begin(round, step, rules, own, self._position)

    def phase(self, text: str, training_step: int | None = None) -> None:
        """Say what begins now, in a few words: "compiling", "step 12", "validation 3", "ended".

        Args:
            text: the words.
            training_step: its number, if it is one.
        """
        if training_step is not None:
            self._training_step = training_step
        self._phases = number = self._phases + 1
        at, step = PHASE_AT + number % 2 * PHASE.size, self._training_step
        PHASE.pack_into(self._memory, at, number, time.time(), step, *_clipped(text, 102), number)

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
    _, since, step, length, text, _ = max(whole, default=(0, 0.0, -1, 0, b"", 0))
    started, dump_signal, host = PROCESS.unpack_from(data, PROCESS_AT)
    entered, collective = read_entered(data, BOARD_AT)
    return Recording(
        rank=rank,
        pid=pid,
        stages=_text(*STAGES.unpack_from(data, STAGES_AT)),
        phase=_text(length, text),
        phase_since=since,
        beat=BEAT.unpack_from(data, BEAT_AT)[0],
        last=_entries(data),
        host=_text(len(host), host).rstrip("\0"),
        started=started or None,
        dump_signal=dump_signal,
        entered=entered,
        collective=collective,
        round=read_round(data, BOARD_AT),
        training_step=step if step >= 0 else None,
    )


def last_beat(path: Path) -> float:
    """When the process was last known alive, in the seconds of `time.time()`; without reading the rest.

    Raises:
        OSError: it cannot be read.
    """
    with opened(path) as descriptor:
        data = os.pread(descriptor, BEAT.size, BEAT_AT)
    found: float = BEAT.unpack(data.ljust(BEAT.size, b"\0"))[0]
    return found


@contextmanager
def counters_of(path: Path) -> Iterator[Counters]:
    """The counters of another process's flight recorder, to be written.

    Raises:
        OSError: it cannot be opened for writing, as when it is another user's.
        ValueError: it is no flight recorder.
    """
    with path.open("r+b") as file, mmap.mmap(file.fileno(), SIZE) as memory:
        yield Counters(memory, COUNTERS_AT)


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
