"""Why a run does not move. `judge` says it of snapshots, `render_report` adds what every rank is at.

The order of belief:

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

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise, product
from typing import NamedTuple, TypeAlias

from rrfp_jax.core.events import WaitCause
from rrfp_jax.core.tasks import Direction, Input
from rrfp_jax.launcher.snapshot import RankSnapshot
from rrfp_jax.runtime.run.consensus import difference, first_difference
from rrfp_jax.runtime.run.recorder import (
    ARRIVED,
    COMING,
    COMPILING,
    ENDED,
    OFFERED,
    PRODUCED,
    STARTING,
    RecordedRound,
    Recording,
)
from rrfp_jax.runtime.run.waits import ForAnswer, ForDevices, ForGather, ForProgram, ForTask, words

Snapshots: TypeAlias = Mapping[int, RankSnapshot]
"""By rank."""

STILL_SECONDS, STILL_PAUSES = 2.0, 1.5
"""A run moves if it did something within this time, or within so many of its longest pauses."""

TRACED_SECONDS = 30.0
"""For so long a rank that prepares may be in the user's code, which JAX traces."""


class Lost(NamedTuple):
    """A message that one rank has sent and the other lacks; `heard`: only its data is missing."""

    sender: int
    receiver: int
    what: str
    heard: bool = False


class NotEntered(NamedTuple):
    """A program of several ranks that `rank` has not entered and `waits`, which waits for it there, has."""

    rank: int
    waits: int
    what: str


class HangReport(NamedTuple):
    """Why a run does not move, or that it `moves`; `blamed` are the ranks that it is about, in order."""

    sentence: str
    seen: Snapshots
    blamed: Sequence[int] = ()
    moves: bool = False


def judge(seen: Sequence[RankSnapshot], *, absent: Sequence[int] = (), stalls: bool = False) -> HangReport:
    """Say why a run does not move, or that it moves; it `stalls` if a wait has come to its limit."""
    ranks = {one.rank: one for one in sorted(seen, key=lambda one: one.rank)}
    if not stalls and not any(map(_is_out, seen)):
        times = [[entry.at for entry in one.recording.last] for one in seen]
        latest = max(*(one.recording.phase_since for one in seen), *(own[-1] for own in times if own), 0.0)
        quiet = min(one.now for one in seen) - latest
        paused = max((after - at for own in times for at, after in pairwise(own)), default=0.0)
        known = quiet > -STILL_SECONDS  # else the clock has been set back
        phases = list(dict.fromkeys(str(one.recording.phase) for one in ranks.values()))
        at = f"({', '.join(phases)})"
        if known and quiet < STILL_SECONDS:
            text = f"the run moves {at}: {max(quiet, 0.0):.1f} s ago it began something"
            return HangReport(text, ranks, moves=True)
        if known and quiet < STILL_PAUSES * paused:
            before = f"there was such a pause before, of {paused:.1f} s: ask again"
            text = f"nothing has moved for {quiet:.1f} s {at}, but {before}"
            return HangReport(text, ranks, moves=True)
        if not absent and all(map(_prepares, seen)):
            text = f"all ranks are {' or '.join(phases)}, for {quiet:.1f} s; none waits for another"
            return HangReport(text, ranks, moves=True)
    return _absent(ranks, absent) or _blame(ranks)


def _is_out(one: RankSnapshot) -> bool:
    """Whether a rank takes no part although it has not come to its end."""
    return one.state in ("gone", "stopped") and one.recording.phase != ENDED


def _prepares(one: RankSnapshot) -> bool:
    """Whether a rank starts or compiles, and waits for nobody."""
    if one.recording.phase not in (STARTING, COMPILING) or one.state != "answers" or one.waiting:
        return False
    return one.users is None or one.now - one.recording.phase_since < TRACED_SECONDS


def _absent(seen: Snapshots, absent: Sequence[int]) -> HangReport | None:
    """Ranks that cannot do their part whatever the others do."""
    for one in sorted(seen.values(), key=lambda one: one.state != "gone"):
        if _is_out(one) or (one.state == "silent" and one.recording.phase != STARTING):
            text = f"{one.recording.name} {_how_absent(one)}"
            return HangReport(text, seen, [one.rank])
    if not absent:
        return None
    names, has = ", ".join(name_of(seen, rank) for rank in absent), "have" if absent[1:] else "has"
    text = f"{names} {has} not begun to join the others: no rrfp.Trainer is made there yet"
    return HangReport(text, seen, absent)


def _blame(seen: Snapshots) -> HangReport:
    """The first that holds, by the order of belief."""
    if (found := differing_orders(one.recording for one in seen.values())) is not None:
        one, other, text = found
        return HangReport(text, seen, [one.rank, other.rank])
    on, lost, missing = _waiting(seen)
    if lost:
        first = min(lost, key=lambda one: one.heard)
        return HangReport(_lost(seen, first, len(lost) - 1), seen, [first.sender, first.receiver])
    if ends := _ends(on) or {rank: 0 for rank in seen if rank not in on}:
        rank = max(ends, key=lambda rank: (ends[rank], seen[rank].users is not None, -rank))
        program = next((one.what for one in missing if one.rank == rank), None)
        return HangReport(_late(seen, rank, ends[rank], program), seen, [rank])
    if not missing:
        text = f"the ranks wait for one another: {', '.join(name_of(seen, rank) for rank in seen)}"
        return HangReport(text, seen, list(seen))
    rank, waits, what = missing[0]
    name, at = name_of(seen, rank), _at(seen, seen[rank])
    text = f"{name} has not entered {what}, in which {name_of(seen, waits)} waits for it; {name} {at}"
    return HangReport(text, seen, [rank])


def differing_orders(recordings: Iterable[Recording]) -> tuple[Recording, Recording, str] | None:
    """The first two of one stage that dispatched different tasks at a position, and that in words."""
    for one, other in combinations(recordings, 2):
        alike = one.stages and one.stages == other.stages
        if alike and (number := first_difference(one.tasks, other.tasks)) is not None:
            step = next(entry.step for entry in one.last if entry.position == number)
            return one, other, difference(one.name, other.name, number, step, one.tasks, other.tasks)
    return None


# Who waits for whom.


def _waiting(seen: Snapshots) -> tuple[dict[int, list[int]], list[Lost], list[NotEntered]]:
    """The ranks that each one waits for; messages that are lost or on their way; programs not entered."""
    on: dict[int, list[int]] = {}
    lost: list[Lost] = []
    missing: list[NotEntered] = []
    for rank, one in seen.items():
        others: list[int] = []
        place, round = one.waiting[0] if one.waiting else None, one.recording.round
        if one.state == "answers" and (isinstance(place, ForDevices) or one.is_busy):
            others, without = _partners(one, seen)
            missing += without
        elif not one.listens:
            continue
        elif isinstance(place, ForGather | ForAnswer):
            for other in place.ranks:
                report = seen[other].report if other in seen else None
                if isinstance(place, ForGather) and report is not None and report.gathers >= place.number:
                    lost.append(Lost(other, rank, f"its value of {place.what}"))
                else:
                    others.append(other)
        elif isinstance(place, ForTask | ForProgram) and round and place.step == round.step:
            for found in (*_missing_inputs(seen, rank, round), *_group(one, round, seen)):
                lost += [found] if isinstance(found, Lost) else []
                others.append(found.sender if isinstance(found, Lost) else found)
        if others := [other for other in dict.fromkeys(others) if other != rank and other in seen]:
            on[rank] = others
    return on, list(dict.fromkeys(lost)), missing


def _ends(on: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """The ranks that wait for nobody, by how many others wait for them, directly or not."""
    found: Counter[int] = Counter()
    for rank in on:
        reached, new = {rank}, [rank]
        while new:
            new = [other for one in new for other in on.get(one, ()) if other not in reached]
            reached.update(new)
        found.update(reached - on.keys())
    return found


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


def _group(one: RankSnapshot, mine: RecordedRound, seen: Snapshots) -> list[Lost | int]:
    """Messages of its group that a rank has not heard; members that are to decide, or to run what it runs."""
    voting = one.cause is WaitCause.PROPOSALS
    found: list[Lost | int] = [mine.members[0]] if one.cause is WaitCause.LEADER else []
    for member, rank in enumerate(mine.members):
        other = seen.get(rank)
        theirs = None if other is None else other.recording.round
        if other is None or theirs is None or rank == one.rank:
            continue
        number, speaks = mine.heard[member], voting or one.rank == mine.members[0] or member == 0
        if speaks and theirs.round == mine.round and theirs.told > number:
            decided = member == 0 and not voting
            task = other.recording.tasks.get(theirs.before + number + 1)
            told = f"decision {number} ({task})" if decided else f"message {number}"
            found.append(Lost(rank, one.rank, f"{told} of their group in step {mine.step}"))
        dispatched = max((entry.position for entry in other.recording.last), default=0) - theirs.before
        early = theirs.round < mine.round
        behind = bool(one.running) and (early or dispatched <= mine.ended - mine.before)
        if behind or (voting and (early or theirs.told < mine.told)):
            found.append(rank)
    return found


def _missing_inputs(seen: Snapshots, rank: int, round: RecordedRound) -> list[Lost | int]:
    """Where the inputs that a rank lacks are held up: lost messages, ranks that have not run a task."""
    ranks: dict[int, Sequence[int]] = {}  # by stage replica
    for other, one in seen.items():
        if (own := one.recording.round) is not None:
            for stage_replica in own.own:
                ranks.setdefault(stage_replica, own.members or [other])
    directions = (Direction.FORWARD,) if round.forward_only else (Direction.FORWARD, Direction.BACKWARD)
    wanted = product(directions, range(round.microbatches), round.own, range(round.placement.chunks))
    found = [
        _held_up(seen, ranks, rank, stage_replica, Input(direction, chunk, microbatch))
        for direction, microbatch, stage_replica, chunk in wanted
    ]
    return [one for one in dict.fromkeys(found) if one is not None]


def _held_up(
    seen: Snapshots, ranks: Mapping[int, Sequence[int]], rank: int, stage_replica: int, wanted: Input
) -> Lost | int | None:
    """Where an input that a rank may lack is held up; None if it has it, or its sender is not known."""
    round = seen[rank].recording.round
    assert round is not None
    if not _lacks(round, stage_replica, wanted):
        return None
    stage = stage_replica % round.placement.stages
    source = round.placement.source(stage, wanted)
    assert source is not None
    at, output = stage_replica - stage + source[0], source[1]
    group, senders = ranks[stage_replica], ranks.get(at, ())
    number = group.index(rank) * len(senders) // len(group)  # as `Layout.receivers` has it
    sender = next(iter(senders[number:]), None)
    theirs = seen[sender].recording.round if sender is not None and sender in seen else None
    if sender is None or theirs is None:
        return None
    if theirs.round != round.round:
        return sender
    bits = theirs.sent(at, output)
    if bits & PRODUCED:
        heard = bool(round.got(stage_replica, wanted) & COMING)
        return Lost(sender, rank, f"the input of {wanted} on stage {stage} in step {round.step}", heard)
    if bits & OFFERED or not seen[sender].listens:
        return sender
    # What the task of the output lacks at its own stage; without that it could run.
    directions = dict.fromkeys((output.direction, Direction.FORWARD))
    inputs = (Input(direction, output.chunk, output.microbatch) for direction in directions)
    lacked = next((one for one in inputs if _lacks(theirs, at, one)), None)
    return sender if lacked is None else _held_up(seen, ranks, sender, at, lacked)


def _lacks(round: RecordedRound, stage_replica: int, wanted: Input) -> bool:
    """Whether an input comes from another virtual stage, and has not come."""
    needed = round.placement.source(stage_replica % round.placement.stages, wanted) is not None
    return needed and not round.got(stage_replica, wanted) & ARRIVED


# Words.

BOOTSTRAP = ("_bootstrap", "_bootstrap_inner")
"""Outermost in every thread but the main one, and of no interest."""


def render_report(report: HangReport, *, blamed_only: bool = False) -> str:
    """The finding, every rank, then the Python stacks: of those that it blames first, equal ones once."""
    alike: dict[str, list[str]] = {}
    for one in sorted(report.seen.values(), key=lambda one: (one.rank not in report.blamed, one.rank)):
        if one.rank in report.blamed or not blamed_only:
            alike.setdefault("\n".join(_stacks(one)), []).append(one.recording.name)
    blocks = [f"{', '.join(names)}:\n{stacks}" for stacks, names in alike.items()]
    head = ["the stacks of all threads, the latest call first:"] if blocks else []
    lines = (f"  {line(report.seen, one)}" for one in report.seen.values())
    return "\n".join([report.sentence, *lines, *head, *blocks])


def line(seen: Snapshots, one: RankSnapshot) -> str:
    """What a rank is at."""
    return f"{one.recording.name}, {one.recording.sentence(one.now)}: {_at(seen, one)}"


def _lost(seen: Snapshots, lost: Lost, others: int) -> str:
    sender, receiver = name_of(seen, lost.sender), name_of(seen, lost.receiver)
    how = "heard of it, but its data has not come" if lost.heard else "not heard of it"
    more = f" (and {others} more such {'message' if others == 1 else 'messages'})" if others else ""
    return f"{sender} has sent {lost.what} to {receiver}, which has {how}{more}"


def _late(seen: Snapshots, rank: int, others: int, program: str | None) -> str:
    missing = "" if program is None else f"has not entered {program}, "
    who = "another rank waits" if others == 1 else f"{others} other ranks wait"
    late = f"{name_of(seen, rank)} {missing}{_at(seen, seen[rank])}"
    return f"{late}; {who} for it" if others else late


def _how_absent(one: RankSnapshot) -> str:
    if one.state == "gone":
        return "has ended, and the others have not noticed yet"
    if one.state == "stopped":
        return "stands still: it was stopped, as by SIGSTOP"
    where = f"; it is in {one.users or _where(one)}" if one.main_frames else ""
    since = f"its last sign of life was {one.now - one.recording.beat:.1f} s ago"
    return f"does not answer: something holds its interpreter, {since}{where}"


def _where(one: RankSnapshot) -> str:
    """Where its main thread is: its latest call, and the latest that is no library's."""
    innermost, *_ = one.main_frames
    caller = next((frame for frame in one.main_frames if frame.whose != "library"), innermost)
    return str(innermost) if caller == innermost else f"{innermost}, called by {caller}"


def _at(seen: Snapshots, one: RankSnapshot) -> str:
    """What a rank is at, after its name."""
    if one.state in ("gone", "stopped"):
        return _how_absent(one)
    does = ""
    if one.running:
        oldest = one.running[0]
        does = f"runs {oldest.task}, dispatched {one.now - oldest.at:.1f} s ago, which has not ended"
    elif one.waiting:
        does = f"waits for {words(one.waiting[0], partial(name_of, seen))}"
    if one.users is not None:
        return f"{does}, in the user's {one.users}" if does else f"is in the user's {one.users}"
    if does:
        return does
    compiles = "compiles, and " if one.recording.phase == COMPILING and one.is_busy else ""
    return f"{compiles}is in {_where(one)}" if one.main_frames else f"{compiles}has not said what it does"


def name_of(seen: Snapshots, rank: int) -> str:
    """A rank's name."""
    return seen[rank].recording.name if rank in seen else f"rank {rank}"


def _stacks(one: RankSnapshot) -> Sequence[str]:
    if not one.threads:
        return [f"  none: {'it stands still' if one.state == 'stopped' else 'it does not answer'}"]
    lines = []
    for thread in one.threads:
        frames = (frame for frame in thread.frames if frame.function not in BOOTSTRAP)
        lines.append(f"  thread {thread.name}{' (main)' * thread.is_main}")
        lines += [f"    {frame.file}:{frame.line} {frame.function}" for frame in frames]
    return lines
