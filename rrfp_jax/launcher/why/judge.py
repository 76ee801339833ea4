"""Who is to blame that a run does not move. Pure: snapshots in, a value out; `words.py` says it.

In this order of belief:

1. a rank that has ended, stands still, does not answer, or has not begun to join the others;
2. two ranks of a stage that have dispatched different tasks at one position;
3. a message, a decision or a gathered value that one rank has told and another, which waits for it, has not
   heard;
4. the rank to which the others' waiting leads, and which itself waits for nobody: it is in the user's code,
   loads data, compiles, or runs a program that does not end;
5. a rank that has not entered a program of several ranks, in which others wait;
6. nobody: the ranks wait for one another.

A run that moves is not looked into any further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.events import WaitCause
from rrfp_jax.core.tasks import Direction, Input, Output, Task
from rrfp_jax.launcher.why.snapshot import RankSnapshot
from rrfp_jax.runtime.run.consensus import first_difference
from rrfp_jax.runtime.run.recorder import (
    ARRIVED,
    COMING,
    COMPILING,
    ENDED,
    OFFERED,
    PRODUCED,
    STARTING,
    RecordedRound,
)
from rrfp_jax.runtime.run.waits import ForAnswer, ForDevices, ForGather, ForProgram, ForTask

Snapshots: TypeAlias = Mapping[int, RankSnapshot]
"""By rank."""

STILL_SECONDS, STILL_PAUSES = 2.0, 1.5
"""A run moves if it did something within this time, or within so many of its longest pauses."""

TRACED_SECONDS = 30.0
"""For so long a rank that prepares may be in the user's code, which JAX traces."""


class HangCause(StrEnum):
    """Why a run does not move, or that it does."""

    MOVES = "moves"  # it did something `seconds` ago
    PAUSES = "pauses"  # nothing for `seconds`, but it paused for `paused` before
    PREPARES = "prepares"  # all ranks start or compile, since `seconds`, and none waits for another
    OUT = "out"  # a rank has ended, stands still, or does not answer
    ABSENT = "absent"  # ranks have not begun to join the others
    ORDERS_DIFFER = "orders differ"  # two ranks of a stage dispatched different tasks at `position`
    LOST = "lost"  # the first of two ranks has sent `lost.what`, which the second one lacks
    LATE = "late"  # `others` wait for a rank, directly or not, which waits for nobody
    NOT_ENTERED = "not entered"  # a rank has not entered `program`, in which the second one waits for it
    RING = "ring"  # all ranks wait for one another


class SentInput(NamedTuple):
    """A message between stages."""

    input: Input
    stage: int
    step: int


class SentValue(NamedTuple):
    """A value of a gather."""

    gather: str


class SentToGroup(NamedTuple):
    """A message to members of a group; if its leader has `decided`, on a task, unless that is forgotten."""

    number: int
    step: int
    decided: bool = False
    task: Task | None = None


class Lost(NamedTuple):
    """A message that one rank has sent and the other lacks; `heard`: only its data is missing."""

    sender: int
    receiver: int
    what: SentInput | SentValue | SentToGroup
    heard: bool = False


class NotEntered(NamedTuple):
    """A program of several ranks that `rank` has not entered and `waits`, which waits for it there, has."""

    rank: int
    waits: int
    what: str


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """Why a run does not move, or that it moves; `blamed` are the ranks that it is about, in order.

    Attributes:
        more: further lost messages, besides the first.
        program: that has not been entered, also by a rank that is late.
    """

    cause: HangCause
    seen: Snapshots
    blamed: Sequence[int] = ()
    seconds: float = 0.0
    paused: float = 0.0
    position: int = 0
    lost: Lost | None = None
    more: int = 0
    others: int = 0
    program: NotEntered | None = None

    @property
    def moves(self) -> bool:
        """Whether it does."""
        return self.cause in (HangCause.MOVES, HangCause.PAUSES, HangCause.PREPARES)


def judge(seen: Sequence[RankSnapshot], *, absent: Sequence[int] = (), stalls: bool = False) -> HangReport:
    """Say why a run does not move, naming who is to blame, or that it moves.

    Args:
        seen: the ranks that have flight recorders; at least one.
        absent: those that have none yet.
        stalls: a wait of the run has come to its limit, so it does not move.
    """
    ranks = {one.rank: one for one in sorted(seen, key=lambda one: one.rank)}
    if not stalls and not any(map(_is_out, seen)):
        quiet = min(one.now for one in seen) - max(map(_latest, seen))
        paused = _longest_pause(seen)
        if quiet < max(STILL_SECONDS, STILL_PAUSES * paused):
            cause = HangCause.PAUSES if quiet >= STILL_SECONDS else HangCause.MOVES
            return HangReport(cause=cause, seen=ranks, seconds=quiet, paused=paused)
        if not absent and all(map(_prepares, seen)):
            return HangReport(cause=HangCause.PREPARES, seen=ranks, seconds=quiet)
    return _missing(ranks, absent) or _blame(ranks)


def _missing(seen: Snapshots, absent: Sequence[int]) -> HangReport | None:
    """Ranks that cannot do their part whatever the others do."""
    for one in sorted(seen.values(), key=lambda one: one.state != "gone"):
        if _is_out(one) or (one.state == "silent" and one.phase != STARTING):
            return HangReport(cause=HangCause.OUT, seen=seen, blamed=[one.rank])
    if absent:
        return HangReport(cause=HangCause.ABSENT, seen=seen, blamed=absent)
    return None


def _blame(seen: Snapshots) -> HangReport:
    if (differing := _differing_orders(seen)) is not None:
        *two, position = differing
        return HangReport(cause=HangCause.ORDERS_DIFFER, seen=seen, blamed=two, position=position)
    on, lost, missing = waiting(seen)
    if lost:
        first, more = min(lost, key=lambda one: one.heard), len(lost) - 1
        two = [first.sender, first.receiver]
        return HangReport(cause=HangCause.LOST, seen=seen, blamed=two, lost=first, more=more)
    if ends := _ends(on) or {rank: 0 for rank in seen if rank not in on}:
        rank = max(ends, key=lambda rank: (ends[rank], seen[rank].users is not None, -rank))
        program = next((one for one in missing if one.rank == rank), None)
        return HangReport(cause=HangCause.LATE, seen=seen, blamed=[rank], others=ends[rank], program=program)
    if missing:
        blamed, program = [missing[0].rank], missing[0]
        return HangReport(cause=HangCause.NOT_ENTERED, seen=seen, blamed=blamed, program=program)
    return HangReport(cause=HangCause.RING, seen=seen, blamed=list(seen))


def _is_out(one: RankSnapshot) -> bool:
    """Whether a rank takes no part although it has not come to its end."""
    return one.state in ("gone", "stopped") and one.phase != ENDED


def _prepares(one: RankSnapshot) -> bool:
    """Whether a rank starts or compiles, and waits for nobody."""
    if one.phase not in (STARTING, COMPILING) or one.state != "answers" or one.waiting:
        return False
    return one.users is None or one.now - one.recording.phase_since < TRACED_SECONDS


def _latest(one: RankSnapshot) -> float:
    """When a rank last did something, in the seconds of `time.time()`."""
    return max([one.recording.phase_since, *(entry.at for entry in one.recording.last[-1:])])


def _longest_pause(seen: Sequence[RankSnapshot]) -> float:
    """Between two of the latest dispatches of a rank, in seconds."""
    times = [[entry.at for entry in one.recording.last] for one in seen]
    return max((after - at for own in times for at, after in pairwise(own)), default=0.0)


def _differing_orders(seen: Snapshots) -> tuple[int, int, int] | None:
    """Two ranks of a stage that have dispatched different tasks, and the position."""
    for rank, one in seen.items():
        for other in one.round.members if one.round is not None else ():
            if other > rank and other in seen:
                number = first_difference(one.recording.tasks, seen[other].recording.tasks)
                if number is not None:
                    return rank, other, number
    return None


# Who waits for whom.


def waiting(seen: Snapshots) -> tuple[dict[int, list[int]], list[Lost], list[NotEntered]]:
    """The ranks that each one waits for; messages that are lost or on their way; programs not entered."""
    inputs = MissingInputs(seen)
    on: dict[int, list[int]] = {}
    lost: list[Lost] = []
    missing: list[NotEntered] = []
    for rank, one in seen.items():
        others: list[int] = []
        place = one.waiting[0] if one.waiting else None
        if one.state == "answers" and (isinstance(place, ForDevices) or one.is_busy):
            others, without = _partners(one, seen)
            missing += without
        elif not one.listens:
            continue
        elif isinstance(place, ForGather | ForAnswer):
            unheard = [other for other in place.ranks if _has_told(seen.get(other), place)]
            lost += [Lost(other, rank, SentValue(place.what)) for other in unheard]
            others = [other for other in place.ranks if other not in unheard]
        elif isinstance(place, ForTask | ForProgram) and one.round and place.step == one.round.step:
            for end in inputs.of(rank):
                lost += [end] if isinstance(end, Lost) else []
                others.append(end.sender if isinstance(end, Lost) else end)
            lost += _decisions(one, one.round, seen)
            others += _group(one, one.round, seen)
        if others := [other for other in dict.fromkeys(others) if other != rank and other in seen]:
            on[rank] = others
    return on, list(dict.fromkeys(lost)), missing


def _ends(on: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """The ranks that wait for nobody, by how many others wait for them, directly or not."""
    found: dict[int, int] = {}
    for rank in on:
        reached, new = {rank}, [rank]
        while new:
            new = [other for one in new for other in on.get(one, ()) if other not in reached]
            reached.update(new)
        for end in reached - on.keys():
            found[end] = found.get(end, 0) + 1
    return found


def _has_told(other: RankSnapshot | None, place: object) -> bool:
    """Whether a rank has begun the gather in which another one waits for it, and so told its value."""
    if other is None or other.report is None or not isinstance(place, ForGather):
        return False
    return other.report.gathers >= place.number


def _partners(one: RankSnapshot, seen: Snapshots) -> tuple[list[int], list[NotEntered]]:
    """Whom a rank waits for that waits for devices, or is inside a program that it has called.

    They share its stage and are at another point. Of a rank that is busy it is known only that it waits for
    somebody if another one has not entered what it has.
    """
    elsewhere, missing = [], []
    for rank, other in seen.items():
        shares = rank != one.rank and other.recording.stage_bits == one.recording.stage_bits
        if not shares or (other.listens and other.place == one.place):
            continue
        behind = other.recording.entered < one.recording.entered
        if behind or not one.is_busy:
            elsewhere.append(rank)
        if other.listens and behind:
            missing.append(NotEntered(rank, one.rank, one.recording.collective))
    return elsewhere, missing


def _decisions(one: RankSnapshot, mine: RecordedRound, seen: Snapshots) -> list[Lost]:
    """What other members of its group have told a rank and it has not heard."""
    found, voting = [], one.cause is WaitCause.PROPOSALS
    for member, rank in enumerate(mine.members):
        other = seen.get(rank)
        theirs = None if other is None else other.round
        spoken_to = member == 0 or one.rank == mine.members[0] or voting
        if other is None or theirs is None or theirs.round != mine.round or not spoken_to:
            continue
        number = mine.heard[member]
        if rank != one.rank and theirs.told > number:
            task = other.recording.tasks.get(theirs.before + number + 1)
            decides = member == 0 and not voting
            what = SentToGroup(number, mine.step, decides, task if decides else None)
            found.append(Lost(rank, one.rank, what))
    return found


def _group(one: RankSnapshot, mine: RecordedRound, seen: Snapshots) -> list[int]:
    """The members of its group that a rank waits for: to decide, or to run what it runs, too."""
    found = [mine.members[0]] if one.cause is WaitCause.LEADER else []
    for rank in mine.members:
        other = seen.get(rank)
        if other is None or other.round is None or rank == one.rank:
            continue
        dispatched = [entry.position for entry in other.recording.last]
        behind = max(dispatched, default=0) - other.round.before <= mine.ended - mine.before
        silent = one.cause is WaitCause.PROPOSALS and other.round.told < mine.told
        if (one.running and behind) or silent:
            found.append(rank)
    return found


class MissingInputs:
    """Where the inputs that ranks lack are held up, at one moment."""

    def __init__(self, seen: Snapshots) -> None:
        self._seen = seen
        self._ranks: dict[int, list[int]] = {}  # by stage replica
        for rank, one in sorted(seen.items()):
            if one.round is not None:
                for stage_replica in one.round.own:
                    self._ranks.setdefault(stage_replica, list(one.round.members) or [rank])

    def of(self, rank: int) -> list[Lost | int]:
        """Each place once: a lost message, or a rank that has not run a task, or come to the round."""
        round = self._seen[rank].round
        lacking = () if round is None else _lacking(round)
        found = (self._follow(rank, *lacked) for lacked in lacking)
        return list(dict.fromkeys(end for end in found if end is not None))

    def _follow(self, rank: int, stage_replica: int, wanted: Input) -> Lost | int | None:
        """Where an input that a rank lacks is held up; None if its sender is not known."""
        round = self._seen[rank].round
        assert round is not None
        stage = stage_replica % round.placement.stages
        source = round.placement.source(stage, wanted)
        assert source is not None
        at, output = stage_replica - stage + source[0], source[1]
        sender = self._sender(rank, stage_replica, at)
        if sender is None:
            return None
        theirs = self._seen[sender].round
        assert theirs is not None
        if theirs.round != round.round:
            return sender
        bits = theirs.sent(at, output)
        if bits & PRODUCED:
            heard = bool(round.got(stage_replica, wanted) & COMING)
            return Lost(sender, rank, SentInput(wanted, stage, round.step), heard)
        asks = not bits & OFFERED and self._seen[sender].listens
        lacked = _lacked_for(theirs, at, output) if asks else None
        return sender if lacked is None else self._follow(sender, at, lacked)

    def _sender(self, rank: int, stage_replica: int, at: int) -> int | None:
        """Who sends to a rank what is for a stage replica of it; as `Layout.receivers` has it."""
        group, senders = self._ranks[stage_replica], self._ranks.get(at, [])
        if not senders:
            return None
        sender = senders[group.index(rank) * len(senders) // len(group)]
        return sender if sender in self._seen and self._seen[sender].round is not None else None


def _lacking(round: RecordedRound) -> list[tuple[int, Input]]:
    """Stage replica and input of what has not come in a round, forwards first."""
    wanted = [
        (stage_replica, Input(direction, chunk, microbatch))
        for direction in [Direction.FORWARD, Direction.BACKWARD][: 1 if round.forward_only else 2]
        for microbatch in range(round.microbatches)
        for stage_replica in round.own
        for chunk in range(round.placement.chunks)
    ]
    return [(stage_replica, one) for stage_replica, one in wanted if _lacks(round, stage_replica, one)]


def _lacks(round: RecordedRound, stage_replica: int, wanted: Input) -> bool:
    """Whether an input comes from another virtual stage, and has not come."""
    needed = round.placement.source(stage_replica % round.placement.stages, wanted) is not None
    return needed and not round.got(stage_replica, wanted) & ARRIVED


def _lacked_for(round: RecordedRound, stage_replica: int, output: Output) -> Input | None:
    """What the task of an output lacks at its own stage; None if it could run."""
    directions = [output.direction] + ([Direction.FORWARD] if output.direction != Direction.FORWARD else [])
    wanted = [Input(direction, output.chunk, output.microbatch) for direction in directions]
    return next((one for one in wanted if _lacks(round, stage_replica, one)), None)
