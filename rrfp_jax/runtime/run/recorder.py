"""What a process last did, readable while it runs and after it was killed: memory mapped from a file.

The kernel keeps what was stored in a shared mapping, whatever becomes of the process. There is no lock. A
record carries its number at both ends, written first and last, so a reader sees whether it is whole. The
phase has two places, written in turn. Dispatches have a ring of 64. A process that asks a living one for its
stacks writes the request here, too.

The messages of the present round of tasks (a step's training, or its evaluation) have a board, with a byte
for each message at its sender and at its receiver, and a bit in it for everything that has happened to it
there. So whoever reads the boards of both sees the first message that one has and the other lacks, even
after a kill. Beside them are counters: of the group's messages (`core/group.py`) and of programs that ended.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from ctypes import Structure, c_char, c_double, c_int32, c_int64, c_uint8, c_uint32, c_uint64
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import SHAPES, Direction, Input, Kind, Output, Placement, Task
from rrfp_jax.files import read_whole, staged

OFFERED, PRODUCED, DELIVERED = 1, 2, 4
"""Bits of what is sent: its task was dispatched, its program has ended, it has come to its receiver."""

COMING, ARRIVED = 1, 2
"""Bits of what is got: it has been announced, it is here."""

ASKED, ANSWERED, PLEAS, HEARD = range(4)
"""Counters, each with one writer. `ASKED` is written by whoever wants to know, `ANSWERED` by the process.
`PLEAS` is written by the process, which wants to be looked at, `HEARD` by whoever did."""

MAGIC = b"RRFPREC4"
"""Its last character counts the versions of the layout below."""

ENTRIES, MOST_OWN, MOST_MEMBERS, MOST_MESSAGES = 64, 256, 128, 32768
"""Room for ring entries, own stage replicas, a group's members, messages; what is beyond is not recorded."""

STAGE_WORDS = 4
"""Words of 64 stages each; stages beyond these are recorded as text only."""

ENTRY = struct.Struct("<QqiiiidQ")  # position, step, stage, kind, chunk, microbatch, time, position
PHASES = ("", "starting", "compiling", "step", "validation", "ended")


class PhaseLayout(Structure):
    """A phase."""

    _fields_ = (
        *(("count", c_uint64), ("since", c_double), ("training_step", c_int64)),
        *(("name", c_int64), ("number", c_int64), ("again", c_uint64)),
    )


class BoardLayout(Structure):
    """The present round."""

    _fields_ = (
        *(("count", c_uint64), ("round", c_int64), ("step", c_int64)),
        *((name, c_uint64) for name in ("stages", "chunks", "shape")),
        *((name, c_uint64) for name in ("microbatches", "forward_only", "owns", "again")),
        *((name, c_uint64) for name in ("before", "ended", "entered", "told", "membership")),
        ("collective", c_char * 80),
        ("own", c_uint32 * MOST_OWN),
        ("members", c_uint32 * MOST_MEMBERS),
        ("heard", c_uint32 * MOST_MEMBERS),
        ("sent", c_uint8 * MOST_MESSAGES),
        ("got", c_uint8 * MOST_MESSAGES),
    )


class PageLayout(Structure):
    """The file."""

    _fields_ = (
        *(("magic", c_char * 8), ("rank", c_int32), ("pid", c_int32)),
        *(("started", c_uint64), ("dump_signal", c_int64), ("beat", c_double), ("counters", c_uint64 * 4)),
        *(("stages", c_char * 64), ("stage_bits", c_uint64 * STAGE_WORDS), ("host", c_char * 64)),
        *(("phases", PhaseLayout * 2), ("ring", c_uint8 * (ENTRIES * ENTRY.size)), ("board", BoardLayout)),
    )


SIZE = ctypes.sizeof(PageLayout)
RING_AT, PHASES_AT = PageLayout.ring.offset, PageLayout.phases.offset
SENT_AT, GOT_AT = (PageLayout.board.offset + board.offset for board in (BoardLayout.sent, BoardLayout.got))

LONGEST_STAT = 4096
"""Bytes of `/proc/<pid>/stat`."""

STATE, START = 0, 19
"""Places, in what follows the program's name, of the state's letter and of the start in clock ticks."""


def start_of(pid: int) -> int | None:
    """When a process was started, in clock ticks after the machine was; None if it has ended, or unknown.

    With its number it tells a process from a later one that got the same number.
    """
    found = _stat(pid)
    return None if found is None or found[STATE] in "ZX" else int(found[START])


def is_stopped(pid: int) -> bool:
    """Whether it stands still: after SIGSTOP or Ctrl-Z."""
    found = _stat(pid)
    return found is not None and found[STATE] == "T"


def _stat(pid: int) -> list[str] | None:
    with suppress(OSError):
        return read_whole(f"/proc/{pid}/stat", LONGEST_STAT).rpartition(b")")[2].decode("ascii").split()
    return None


def host_name() -> bytes:
    """The name of this machine as flight recorders have it."""
    return socket.gethostname().encode()[:64]


SILENT = 2.0
"""Seconds without a heartbeat that are worth a word."""


class RunPhase(NamedTuple):
    """What a process is at: the name of the phase, one of `PHASES`, and its number if it has one."""

    name: str = ""
    number: int | None = None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name} {self.number}"


STARTING, COMPILING, ENDED = RunPhase("starting"), RunPhase("compiling"), RunPhase("ended")


class RecordedRound:
    """What was recorded of a round."""

    def __init__(self, board: BoardLayout) -> None:
        self.round: int = board.round
        self.step: int = board.step
        self.placement = Placement(board.stages, board.chunks, SHAPES[board.shape])
        self.microbatches: int = board.microbatches
        self.forward_only = bool(board.forward_only)
        self.before: int = board.before  # tasks that the process had dispatched before
        self.ended: int = board.ended  # tasks that had ended by now, those among them
        self.told: int = board.told  # messages to the members
        self.members = tuple(board.members[: board.membership])  # who agrees on what its stage runs
        self.heard = tuple(board.heard[: board.membership])  # messages, by member
        self.own = tuple(board.own[: board.owns])  # stage replicas
        count = 2 * board.owns * board.chunks * board.microbatches
        self.sent_bits, self.got_bits = bytes(board.sent[:count]), bytes(board.got[:count])

    def sent(self, stage_replica: int, output: Output) -> int:
        """The bits of what a task of the process sends."""
        return self.sent_bits[self._place(stage_replica, *output)]

    def got(self, stage_replica: int, wanted: Input) -> int:
        """The bits of what a task of the process needs."""
        return self.got_bits[self._place(stage_replica, *wanted)]

    def _place(self, stage_replica: int, direction: Direction, chunk: int, microbatch: int) -> int:
        part = 2 * self.own.index(stage_replica) + (direction > 0)
        return (part * self.placement.chunks + chunk) * self.microbatches + microbatch


def _round_of(board: BoardLayout) -> RecordedRound | None:
    """The round on a board; None if there is none, it is just beginning, or it cannot be."""
    whole = board.count and board.count == board.again and board.shape < len(SHAPES)
    fits = board.owns <= MOST_OWN and 2 * board.owns * board.chunks * board.microbatches <= MOST_MESSAGES
    return RecordedRound(board) if whole and fits and board.stages and board.chunks else None


class RecordedDispatch(NamedTuple):
    """A task that was dispatched."""

    position: int  # in the process's sequence of dispatches, from 1
    step: int
    stage: int
    task: Task
    at: float  # in the seconds of `time.time()`


@dataclass(frozen=True)
class Recording:
    """What a flight recorder holds; times are in the seconds of `time.time()`."""

    rank: int
    pid: int
    stages: str  # as text: "stage 2 of replica 1"
    phase: RunPhase  # without a name if the process had not said what it was at
    phase_since: float
    beat: float  # when it was last known alive
    last: tuple[RecordedDispatch, ...]  # oldest first, at most 64
    host: str = ""
    started: int | None = None  # as `start_of` has it
    dump_signal: int = 0  # has the process dump its stacks; 0 for none
    entered: int = 0  # programs of several processes that are no tasks, and the latest of them:
    collective: str = ""
    round: RecordedRound | None = None
    training_step: int | None = None  # the latest that it has begun
    stage_bits: tuple[int, ...] = ()  # numbers of its stages, as bits, alike for all replicas

    @property
    def name(self) -> str:
        """Rank and stages: "rank 2 (stage 2)"."""
        return f"rank {self.rank} ({self.stages})" if self.stages else f"rank {self.rank}"

    @property
    def lives(self) -> bool:
        """Whether its process, which is on this machine, still runs."""
        return self.started is not None and start_of(self.pid) == self.started

    @property
    def tasks(self) -> dict[int, Task]:
        return {entry.position: entry.task for entry in self.last}

    def sentence(self, now: float) -> str:
        """What it did last, with times before `now`, the seconds of `time.time()` at which it ended."""
        place = str(self.phase) or "at an unknown point"
        if self.phase.number is not None:
            place = f"in {place}"
        words = ["at its end" if self.phase == ENDED else place]
        if self.last:
            last = self.last[-1]
            step = "" if self.phase == RunPhase("step", last.step) else f" in step {last.step}"
            words.append(f"last dispatched {last.task} on stage {last.stage}{step}")
            words.append(f"{_ago(now - last.at)} before")
        else:
            words.append(f"for {_ago(now - self.phase_since)}")
        alive = max(self.beat, self.phase_since, *(entry.at for entry in self.last))
        if now - alive > SILENT:
            words.append(f"last sign of life {_ago(now - alive)} before")
        return ", ".join(words)


def _ago(seconds: float) -> str:
    return f"{max(seconds, 0.0):.1f} s"


def _noting(at: int) -> Callable[[FlightRecorder, int, Task | Output | Input, int], None]:
    """A method that notes a bit of a message of a stage replica among those at a place of the page."""

    def note(self: FlightRecorder, stage_replica: int, what: Task | Output | Input, bit: int) -> None:
        if (first := self._first.get(stage_replica)) is not None:
            direction, chunk, microbatch = what
            place = first + ((direction > 0) * self._chunks + chunk) * self._microbatches + microbatch
            self._memory[at + place] |= bit

    return note


class FlightRecorder:
    """Writes the record; times are those of `time.time()`. Allocates nothing once a round has begun."""

    sent = _noting(SENT_AT)  # something has happened to what a task of this process sends, or to the task
    got = _noting(GOT_AT)  # something has happened to what a task of this process needs

    def __init__(self, path: Path | None, rank: int, stages: str) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE) if path is None else _mapped(path)
        self.page = page = PageLayout.from_buffer(self._memory)
        self._board = page.board
        self._phases, self._training_step, self._position = 0, -1, 0
        self._first: dict[int, int] = {}  # by stage replica, the place of its first message
        self._ended = self._told = self._chunks = self._microbatches = 0
        page.rank, page.pid = rank, os.getpid()
        page.started, page.host = start_of(os.getpid()) or 0, host_name()
        self.runs(stages)
        self.phase(STARTING)
        self.beat()
        page.magic = MAGIC

    def runs(self, stages: str, numbers: Collection[int] = ()) -> None:
        """Say which stages the process runs: as text, and their numbers, as far as there is room for them."""
        self.page.stages = stages.encode("utf-8", "replace")[:62]
        for word in range(STAGE_WORDS):
            self.page.stage_bits[word] = sum(1 << number % 64 for number in numbers if number // 64 == word)

    def begin_round(self, round: int, step: int, rules: StepRules, own: Sequence[int]) -> None:
        """A round of tasks begins on these stage replicas."""
        board, placement = self._board, rules.placement
        self._chunks, self._microbatches = placement.chunks, rules.microbatches
        each = 2 * self._chunks * self._microbatches
        fits = len(own) <= MOST_OWN and each * len(own) <= MOST_MESSAGES
        self._first = dict(zip(own, range(0, each * len(own), each), strict=True)) if fits else {}
        self._told, self._ended = 0, self._position
        # The number at the end comes first, that at the front last: who reads meanwhile finds them differ.
        board.again += 1
        used = each * len(self._first)
        for at in (SENT_AT, GOT_AT):
            self._memory[at : at + used] = bytes(used)
        board.owns = len(self._first)
        board.own[: board.owns] = [*self._first]
        board.round, board.step, board.shape = round, step, SHAPES.index(placement.shape)
        board.stages, board.chunks, board.microbatches = placement.stages, self._chunks, self._microbatches
        board.forward_only = rules.forward_only
        board.before = board.ended = self._position
        board.told = board.membership = 0
        board.count = board.again

    def ended(self) -> None:
        self._ended = self._board.ended = self._ended + 1

    def enters(self, what: str) -> None:
        """A program is dispatched that runs on several processes together and is no task."""
        self._board.collective = what.encode("utf-8", "replace")[:78]
        self._board.entered += 1

    def joins(self, ranks: Sequence[int]) -> None:
        """These share the process's stage in this round, in the order of members."""
        count = min(len(ranks), MOST_MEMBERS)
        self._board.members[:count], self._board.heard[:count] = [*ranks[:count]], [0] * count
        self._board.told, self._board.membership = 0, count  # the number last: a reader takes what it counts

    def told(self) -> None:
        """A message to the others of the group has been sent in this round."""
        self._told = self._board.told = self._told + 1

    def heard(self, member: int) -> None:
        """A message has come from a member of the group."""
        if member < MOST_MEMBERS:
            self._board.heard[member] += 1

    def phase(self, phase: RunPhase) -> None:
        if phase.name == "step" and phase.number is not None:
            self._training_step = phase.number
        self._phases += 1
        place = self.page.phases[self._phases % 2]
        place.again = 0
        place.since, place.training_step = time.time(), self._training_step
        place.name, place.number = PHASES.index(phase.name), -1 if phase.number is None else phase.number
        place.count = place.again = self._phases

    def beat(self) -> None:
        self.page.beat = time.time()

    def dispatched(self, step: int, stage: int, task: Task) -> None:
        """Say that a task is being dispatched. Takes about half a microsecond."""
        self._position = number = self._position + 1
        kind, chunk, microbatch = task
        at = RING_AT + number % ENTRIES * ENTRY.size
        ENTRY.pack_into(self._memory, at, number, step, stage, kind, chunk, microbatch, time.time(), number)


def read(path: Path) -> Recording:
    """Read a flight recorder, whether or not its process lives; ValueError if the file is none."""
    data = read_whole(path, SIZE)
    if len(data) != SIZE or not data.startswith(MAGIC):
        raise ValueError(f"{path}: not a flight recorder ({len(data)} bytes, beginning with {data[:8]!r})")
    page = PageLayout.from_buffer_copy(data)
    whole = [p for p in page.phases if p.count and p.count == p.again and 0 <= p.name < len(PHASES)]
    phase = max(whole, key=lambda p: p.count, default=PhaseLayout(training_step=-1, number=-1))
    last = []  # the whole entries of the ring
    ring = data[RING_AT : RING_AT + ENTRIES * ENTRY.size]
    for i, (position, step, stage, kind, chunk, microbatch, at, again) in enumerate(ENTRY.iter_unpack(ring)):
        if position and position == again and position % ENTRIES == i and 0 <= kind < len(Kind):
            last.append(RecordedDispatch(position, step, stage, Task(Kind(kind), chunk, microbatch), at))
    return Recording(
        rank=page.rank,
        pid=page.pid,
        stages=_text(page.stages),
        phase=RunPhase(PHASES[phase.name], phase.number if phase.number >= 0 else None),
        phase_since=phase.since,
        beat=page.beat,
        last=tuple(sorted(last, key=lambda entry: entry.position)),
        host=_text(page.host),
        started=page.started or None,
        dump_signal=page.dump_signal,
        entered=page.board.entered,
        collective=_text(page.board.collective),
        round=_round_of(page.board),
        training_step=phase.training_step if phase.training_step >= 0 else None,
        stage_bits=tuple(page.stage_bits),
    )


def recorder_in(folder: Path, rank: int) -> Path:
    """Where a rank's flight recorder is."""
    return folder / f"flight-{rank}"


def recorded(folder: Path) -> dict[int, Recording]:
    """The flight recorders in a folder by rank, without those that are being made, or of other versions."""
    found = {}
    for path in folder.glob("flight-*"):
        with suppress(OSError, ValueError):
            found[int(path.name.removeprefix("flight-"))] = read(path)
    return found


def latest_recorded(run: Path) -> tuple[Path, dict[int, Recording]]:
    """A run's flight recorders by rank, and the folder that they are in: its own, or where it is prepared.

    Where a process lives, or else did last: killed launchers leave what they had prepared, and a new one
    begins beside what a run has left.
    """
    found = [(folder, recorded(folder)) for folder in (run, *staged(run))]
    life = [max(((one.lives, one.beat) for one in own.values()), default=(False, 0.0)) for _, own in found]
    return found[life.index(max(life))]


def shared_page(path: Path) -> PageLayout:
    """Another process's flight recorder, to be looked at and written; OSError if it is another user's."""
    with path.open("r+b") as file:
        return PageLayout.from_buffer(mmap.mmap(file.fileno(), SIZE))


def _mapped(path: Path) -> mmap.mmap:
    """The file, filled with zeros and mapped."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Zeros are written, not left as a hole: on a full disk a hole would end in SIGBUS at the first store.
        # No truncation to 0 first, for the same signal would hit whoever still maps an earlier file here.
        if os.pwrite(file, bytes(SIZE), 0) < SIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.ftruncate(file, SIZE)
        return mmap.mmap(file, SIZE)
    finally:
        os.close(file)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "ignore")
