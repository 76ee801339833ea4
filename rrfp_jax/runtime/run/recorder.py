"""What a process last did, readable while it runs and after it was killed: memory mapped from a file.

The kernel keeps what was stored in a shared mapping, whatever becomes of the process. There is no lock. A
record carries its number at both ends, written first and last, so a reader sees whether it is whole. The
phase has two places, written in turn. Dispatches have a ring of 64. The messages of the present round have a
board. A process that asks a living one for its stacks writes the request here, too.

The board says what a round of tasks has sent and got in this process, a byte a message.

A round is one run of tasks: a step's training, or its evaluation. Each message between virtual stages has a
place at its sender and one at its receiver, with a bit for everything that has happened to it there. So
whoever reads the boards of both sees the first message that one has and the other lacks, even after a kill.
Beside them are counters: of the group's messages (`core/group.py`) and of programs that ended.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Direction, Input, Kind, Output, Placement, Shape, Task
from rrfp_jax.files import opened, read_whole
from rrfp_jax.runtime.run.proc import host_name, start_of

ASKED, ANSWERED, PLEAS, HEARD = range(4)
COUNTER = struct.Struct("<Q")
COUNTERS_SIZE = 4 * COUNTER.size


class Counters:
    """See above; each number has one writer.

    `ASKED` is written by whoever wants to know, `ANSWERED` by the process. `PLEAS` is written by the process,
    which wants to be looked at, `HEARD` by whoever did.

    Args:
        memory: of the flight recorder.
        at: where in it they are.
    """

    def __init__(self, memory: mmap.mmap | bytearray, at: int) -> None:
        self._memory, self._at = memory, at

    def __getitem__(self, which: int) -> int:
        found: int = COUNTER.unpack_from(self._memory, self._at + which * COUNTER.size)[0]
        return found

    def __setitem__(self, which: int, value: int) -> None:
        COUNTER.pack_into(self._memory, self._at + which * COUNTER.size, value)


OFFERED, PRODUCED, DELIVERED = 1, 2, 4
"""Bits of what is sent: its task was dispatched, its program has ended, it has come to its receiver."""

COMING, ARRIVED = 1, 2
"""Bits of what is got: it has been announced, it is here."""

ROUND = struct.Struct("<Q2q6IQ")  # number, round, step, stages, chunks, shape, microbatches, whether forward
# only, own stage replicas, number
COUNTS = struct.Struct("<3Q")  # dispatched before the round, programs ended, collectives entered
COLLECTIVE = struct.Struct("<H78s")  # length, text
GROUP = struct.Struct("<QI")  # messages told, members
NUMBER = struct.Struct("<I")
COUNT = struct.Struct("<Q")

SHAPES: Sequence[Shape] = ("looped", "v")
MOST_OWN, MOST_MEMBERS, MOST_MESSAGES = 256, 128, 32768
"""Of stage replicas, of a group's members, of messages; what is beyond is not recorded."""

ROUND_AT, COUNTS_AT, COLLECTIVE_AT, GROUP_AT = 0, 64, 96, 192
OWN_AT = 256
MEMBERS_AT = OWN_AT + MOST_OWN * NUMBER.size
HEARD_AT = MEMBERS_AT + MOST_MEMBERS * NUMBER.size
SENT_AT = 4096
GOT_AT = SENT_AT + MOST_MESSAGES
BOARD_SIZE = GOT_AT + MOST_MESSAGES
assert HEARD_AT + MOST_MEMBERS * NUMBER.size <= SENT_AT


class RoundBoard:
    """The writer's side; nothing is allocated once a round has begun.

    Args:
        memory: of the flight recorder.
        at: where in it the board begins.
    """

    def __init__(self, memory: mmap.mmap | bytearray, at: int) -> None:
        self._memory, self._at = memory, at
        self._sent_at, self._got_at = at + SENT_AT, at + GOT_AT
        self._rounds = self._told = self._ended = self._entered = 0
        self._first: dict[int, int] = {}  # by stage replica, the place of its first message
        self._chunks = self._microbatches = 0

    def begin(self, round: int, step: int, rules: StepRules, own: Sequence[int], dispatched: int) -> None:
        """A round begins.

        Args:
            round: its number.
            step: its step's.
            rules: of the step.
            own: the stage replicas of this process.
            dispatched: how many tasks this process has dispatched before.
        """
        placement = rules.placement
        self._chunks, self._microbatches = placement.chunks, rules.microbatches
        each = 2 * self._chunks * self._microbatches
        fits = len(own) <= MOST_OWN and each * len(own) <= MOST_MESSAGES
        self._first = {stage: i * each for i, stage in enumerate(own)} if fits else {}
        self._rounds = number = self._rounds + 1
        self._told, self._ended = 0, dispatched
        memory, at = self._memory, self._at
        # The number at the end comes first, that at the front last: who reads meanwhile finds them differ.
        COUNT.pack_into(memory, at + ROUND_AT + ROUND.size - COUNT.size, number)
        for board in (SENT_AT, GOT_AT):
            memory[at + board : at + board + each * len(self._first)] = bytes(each * len(self._first))
        for i, stage in enumerate(self._first):
            NUMBER.pack_into(memory, at + OWN_AT + i * NUMBER.size, stage)
        COUNTS.pack_into(memory, at + COUNTS_AT, dispatched, dispatched, self._entered)
        GROUP.pack_into(memory, at + GROUP_AT, 0, 0)
        shape, forward_only = SHAPES.index(placement.shape), int(rules.forward_only)
        sizes = placement.stages, placement.chunks, shape, rules.microbatches, forward_only, len(self._first)
        ROUND.pack_into(memory, at + ROUND_AT, number, round, step, *sizes, number)

    def sent(self, stage_replica: int, what: Task | Output, bit: int) -> None:
        """Something has happened to what a task of this process sends: `what`, or the task itself.

        About 0.4 us, as `got`.
        """
        first = self._first.get(stage_replica)
        if first is not None:
            direction, chunk, microbatch = what
            place = first + ((direction > 0) * self._chunks + chunk) * self._microbatches + microbatch
            self._memory[self._sent_at + place] |= bit

    def got(self, stage_replica: int, wanted: Input, bit: int) -> None:
        """Something has happened to what a task of this process needs."""
        first = self._first.get(stage_replica)
        if first is not None:
            direction, chunk, microbatch = wanted
            place = first + ((direction > 0) * self._chunks + chunk) * self._microbatches + microbatch
            self._memory[self._got_at + place] |= bit

    def ended(self) -> None:
        """One more program has ended."""
        self._ended = count = self._ended + 1
        COUNT.pack_into(self._memory, self._at + COUNTS_AT + 8, count)

    def enters(self, what: str) -> None:
        """A program is dispatched that runs on several processes together and is no task."""
        self._entered += 1
        text = what.encode()[:78]
        COLLECTIVE.pack_into(self._memory, self._at + COLLECTIVE_AT, len(text), text)
        COUNT.pack_into(self._memory, self._at + COUNTS_AT + 16, self._entered)

    def joins(self, ranks: Sequence[int]) -> None:
        """These share the process's stage in this round, in the order of members."""
        ranks = ranks[:MOST_MEMBERS]
        for i, rank in enumerate(ranks):
            NUMBER.pack_into(self._memory, self._at + MEMBERS_AT + i * NUMBER.size, rank)
            NUMBER.pack_into(self._memory, self._at + HEARD_AT + i * NUMBER.size, 0)
        GROUP.pack_into(self._memory, self._at + GROUP_AT, 0, len(ranks))

    def told(self) -> None:
        """A message to the others of the group has been sent in this round."""
        self._told = count = self._told + 1
        COUNT.pack_into(self._memory, self._at + GROUP_AT, count)

    def heard(self, member: int) -> None:
        """A message has come from a member of the group."""
        if member < MOST_MEMBERS:
            at = self._at + HEARD_AT + member * NUMBER.size
            NUMBER.pack_into(self._memory, at, NUMBER.unpack_from(self._memory, at)[0] + 1)


@dataclass(frozen=True)
class RecordedRound:
    """What a board holds.

    Attributes:
        round, step: their numbers.
        placement: of the stages.
        microbatches: of each replica.
        forward_only: whether it is an evaluation.
        before: how many tasks the process had dispatched before.
        ended: how many had ended by now, those among them.
        members: the ranks that share its stage and agree on what to run; none if it is alone.
        told: messages that it has sent to them.
        heard: by member, messages that have come.
        own: its stage replicas.
        sent_bits, got_bits: a byte for each message.
    """

    round: int
    step: int
    placement: Placement
    microbatches: int
    forward_only: bool
    before: int
    ended: int
    members: tuple[int, ...]
    told: int
    heard: tuple[int, ...]
    own: tuple[int, ...]
    sent_bits: bytes
    got_bits: bytes

    def sent(self, stage_replica: int, output: Output) -> int:
        """The bits of what a task of the process sends."""
        return self.sent_bits[self._place(stage_replica, *output)]

    def got(self, stage_replica: int, wanted: Input) -> int:
        """The bits of what a task of the process needs."""
        return self.got_bits[self._place(stage_replica, *wanted)]

    def _place(self, stage_replica: int, direction: Direction, chunk: int, microbatch: int) -> int:
        part = 2 * self.own.index(stage_replica) + (direction > 0)
        return (part * self.placement.chunks + chunk) * self.microbatches + microbatch


def read_round(data: bytes, at: int) -> RecordedRound | None:
    """The round on a board; None if there is none, or it is just beginning."""
    number, round, step, stages, chunks, shape, microbatches, forward_only, own, again = ROUND.unpack_from(
        data, at + ROUND_AT
    )
    if not number or number != again or shape >= len(SHAPES) or own > MOST_OWN:
        return None
    count = 2 * own * chunks * microbatches
    if not stages or not chunks or count > MOST_MESSAGES:
        return None
    before, ended, _ = COUNTS.unpack_from(data, at + COUNTS_AT)
    told, members = GROUP.unpack_from(data, at + GROUP_AT)
    return RecordedRound(
        round=round,
        step=step,
        placement=Placement(stages, chunks, SHAPES[shape]),
        microbatches=microbatches,
        forward_only=bool(forward_only),
        before=before,
        ended=ended,
        members=_numbers(data, at + MEMBERS_AT, members),
        told=told,
        heard=_numbers(data, at + HEARD_AT, members),
        own=_numbers(data, at + OWN_AT, own),
        sent_bits=data[at + SENT_AT : at + SENT_AT + count],
        got_bits=data[at + GOT_AT : at + GOT_AT + count],
    )


def read_entered(data: bytes, at: int) -> tuple[int, str]:
    """How many programs of several processes one has entered that are no tasks, and the latest of them."""
    length, text = COLLECTIVE.unpack_from(data, at + COLLECTIVE_AT)
    return COUNTS.unpack_from(data, at + COUNTS_AT)[2], text[:length].decode("utf-8", "ignore")


def _numbers(data: bytes, at: int, count: int) -> tuple[int, ...]:
    found = struct.iter_unpack("<I", data[at : at + NUMBER.size * min(count, MOST_OWN)])
    return tuple(number for (number,) in islice(found, count))


SILENT = 2.0  # seconds without a heartbeat that are worth a word


PHASES = ("", "starting", "compiling", "step", "validation", "ended")


class RunPhase(NamedTuple):
    """What a process is at: the name of the phase, one of `PHASES`, and its number if it has one."""

    name: str = ""
    number: int | None = None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name} {self.number}"


STARTING, COMPILING, ENDED = RunPhase("starting"), RunPhase("compiling"), RunPhase("ended")


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
        phase: what the process was at; without a name if it had not said.
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
    phase: RunPhase
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
    def name(self) -> str:
        """Rank and stages: "rank 2 (stage 2)"."""
        return f"rank {self.rank} ({self.stages})" if self.stages else f"rank {self.rank}"

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
        place = str(self.phase) or "at an unknown point"
        if self.phase.number is not None:
            place = f"in {place}"
        words = ["at its end" if self.phase == ENDED else place]
        if self.last:
            entry = self.last[-1]
            step = "" if self.phase == RunPhase("step", entry.step) else f" in step {entry.step}"
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


MAGIC = b"RRFPREC4"
BOARD_AT = 4096
SIZE = BOARD_AT + BOARD_SIZE  # bytes
ENTRIES = 64

HEADER = struct.Struct("<8sii")  # magic, rank, pid
STAGES = struct.Struct("<H62s")  # length, text
BEAT = struct.Struct("<d")  # time
PHASE = struct.Struct("<QdqiqQ")  # count, since, training step, name, number, count
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
        self.phase(STARTING)
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

    def phase(self, phase: RunPhase) -> None:
        """Say what begins now."""
        number = -1 if phase.number is None else phase.number
        if phase.name == "step":
            self._training_step = number
        self._phases = count = self._phases + 1
        at, name = PHASE_AT + count % 2 * PHASE.size, PHASES.index(phase.name)
        PHASE.pack_into(self._memory, at, count, time.time(), self._training_step, name, number, count)

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
    whole = [p for p in phases if p[0] and p[0] == p[-1] and 0 <= p[3] < len(PHASES)]
    _, since, step, name, number, _ = max(whole, default=(0, 0.0, -1, 0, -1, 0))
    started, dump_signal, host = PROCESS.unpack_from(data, PROCESS_AT)
    entered, collective = read_entered(data, BOARD_AT)
    return Recording(
        rank=rank,
        pid=pid,
        stages=_text(*STAGES.unpack_from(data, STAGES_AT)),
        phase=RunPhase(PHASES[name], number if number >= 0 else None),
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
