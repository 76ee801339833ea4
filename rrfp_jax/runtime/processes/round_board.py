"""What a round of tasks has sent and got in this process, a byte a message, in the flight recorder's memory.

A round is one run of tasks: a step's training, or its evaluation. Each message between virtual stages has a
place at its sender and one at its receiver, with a bit for everything that has happened to it there. So
whoever reads the boards of both sees the first message that one has and the other lacks, even after a kill.
Beside them are counters: of the group's messages (`core/group/messages.py`) and of programs that ended.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Direction, Input, Output, Placement, Shape, Task

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
