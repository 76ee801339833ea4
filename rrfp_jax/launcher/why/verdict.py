"""Who is to blame that a run does not move, in words. Pure: sights in, text out.

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
from itertools import pairwise
from typing import Literal, TypeAlias

from rrfp_jax.core.tasks import Direction, Input, Kind, Output, Task
from rrfp_jax.runtime.run.consensus import difference, first_difference
from rrfp_jax.runtime.run.recorder import (
    ARRIVED,
    COMING,
    OFFERED,
    PRODUCED,
    RecordedDispatch,
    RecordedRound,
    Recording,
)
from rrfp_jax.runtime.run.stacks import LOADER, Frame, Thread
from rrfp_jax.runtime.run.status_report import Testimony

State: TypeAlias = Literal["answers", "silent", "stopped", "gone"]


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What is seen of a rank.

    Attributes:
        rank: of the process.
        state: whether it answers; if it does not, it may be stopped (SIGSTOP), or have ended.
        now: when it was looked at, in the seconds of `time.time()`.
        recording: its flight recorder.
        testimony: its answer; None if there is none.
        threads: where they are, by its answer or dumped without it; none if unknown.
    """

    rank: int
    state: State
    now: float
    recording: Recording
    testimony: Testimony | None = None
    threads: Sequence[Thread] = ()

    @property
    def name(self) -> str:
        """Rank and stages: "rank 2 (stage 2)"."""
        stages = self.recording.stages
        return f"rank {self.rank} ({stages})" if stages else f"rank {self.rank}"

    @property
    def stages(self) -> str:
        """Its stages, alike for all their replicas."""
        return self.recording.stages.partition(" of replica ")[0]

    @property
    def round(self) -> RecordedRound | None:
        """The present round of tasks, or the latest."""
        return self.recording.round

    @property
    def waiting(self) -> Sequence[str]:
        """What its main thread waits for."""
        return () if self.testimony is None else self.testimony.waiting

    @property
    def place(self) -> str:
        """What it waits for, without since when: equal on ranks that are at the same point."""
        return self.waiting[0].rpartition(", since")[0] if self.waiting else ""

    @property
    def users(self) -> Frame | None:
        """The user's line that it is in: its main thread, or another one for which that waits."""
        threads = sorted(filter(self._may_wait_for, self.threads), key=lambda thread: not thread.is_main)
        return next((thread.users for thread in threads if thread.users is not None), None)

    def _may_wait_for(self, thread: Thread) -> bool:
        """Whether what a thread does may hold up the main one, or is that; of dumped ones nobody knows."""
        if thread.is_main or self.testimony is None:
            return True
        if thread.name == LOADER:  # it loads ahead
            return self.place.startswith("the data")
        return not thread.is_users_own

    @property
    def where(self) -> str:
        """Where its main thread is, in words: its latest call, and the latest that is no library's."""
        frames = self._main_frames
        if not frames:
            return ""
        caller = next((frame for frame in frames if frame.whose != "library"), frames[0])
        return str(frames[0]) if caller == frames[0] else f"{frames[0]}, called by {caller}"

    @property
    def awaits_device(self) -> bool:
        """Whether it waits for what devices compute outside of tasks, perhaps with those of other ranks."""
        return any(frame.function == "await_ready" and frame.whose == "ours" for frame in self._main_frames)

    @property
    def _main_frames(self) -> Sequence[Frame]:
        return next((thread.frames for thread in self.threads if thread.is_main), ())

    @property
    def listens(self) -> bool:
        """Whether it waits for others, and so takes in what comes."""
        return self.state == "answers" and bool(self.waiting) and self.users is None

    @property
    def is_busy(self) -> bool:
        """Whether its main thread does something that is neither a wait nor the user's code."""
        return self.state == "answers" and not self.waiting and self.users is None

    @property
    def running(self) -> Sequence[RecordedDispatch]:
        """The tasks on its devices, the oldest first, as far as it still knows them."""
        if self.round is None:
            return []
        return [entry for entry in self.recording.last if entry.position > self.round.ended]

    @property
    def lacking(self) -> Sequence[tuple[int, Input]]:
        """Stage replica and input of what has not come in this round, forwards first."""
        found: list[tuple[int, Input]] = []
        round = self.round
        if round is None:
            return found
        directions = [Direction.FORWARD] + ([] if round.forward_only else [Direction.BACKWARD])
        for direction in directions:
            for microbatch in range(round.microbatches):
                for stage_replica in round.own:
                    for chunk in range(round.placement.chunks):
                        wanted = Input(direction, chunk, microbatch)
                        needed = round.placement.source(stage_replica % round.placement.stages, wanted)
                        if needed is not None and not round.got(stage_replica, wanted) & ARRIVED:
                            found.append((stage_replica, wanted))
        return found


@dataclass(frozen=True)
class Lost:
    """A message that one rank has sent and the other lacks.

    Attributes:
        sender, receiver: their ranks.
        what: the message, in words.
        heard: whether the receiver has heard of it, and only its data is missing.
    """

    sender: int
    receiver: int
    what: str
    heard: bool = False


@dataclass(frozen=True)
class Late:
    """A rank that has not run a task which lacks nothing; no task if it is not in the round."""

    rank: int
    task: Task | None = None


class Trails:
    """The trails of one moment.

    Args:
        sights: of all ranks, by rank.
    """

    def __init__(self, sights: Mapping[int, Sight]) -> None:
        self._sights = sights
        self._ranks: dict[int, list[int]] = {}  # by stage replica
        for rank, sight in sorted(sights.items()):
            if sight.round is not None:
                for stage_replica in sight.round.own:
                    self._ranks.setdefault(stage_replica, list(sight.round.members) or [rank])

    def of(self, rank: int) -> list[Lost | Late]:
        """Where all that a rank lacks is held up, each place once."""
        found = (self._follow(rank, *lacked) for lacked in self._sights[rank].lacking)
        return list(dict.fromkeys(end for end in found if end is not None))

    def _follow(self, rank: int, stage_replica: int, wanted: Input) -> Lost | Late | None:
        """Where an input that a rank lacks is held up; None if its sender is not known."""
        round = self._sights[rank].round
        assert round is not None
        stage = stage_replica % round.placement.stages
        source = round.placement.source(stage, wanted)
        assert source is not None
        at, output = stage_replica - stage + source[0], source[1]
        sender = self._sender(rank, stage_replica, at)
        if sender is None:
            return None
        theirs = self._sights[sender].round
        assert theirs is not None
        if theirs.round != round.round:
            return Late(sender)
        bits = theirs.sent(at, output)
        if bits & PRODUCED:
            what = f"the input of {wanted} on stage {stage} in step {round.step}"
            return Lost(sender, rank, what, bool(round.got(stage_replica, wanted) & COMING))
        dispatched, listens = bool(bits & OFFERED), self._sights[sender].listens
        if not dispatched and listens and (lacked := _lacked_for(theirs, at, output)) is not None:
            return self._follow(sender, at, lacked)
        return Late(sender, Task(Kind(output.direction), output.chunk, output.microbatch))

    def _sender(self, rank: int, stage_replica: int, at: int) -> int | None:
        """Who sends to a rank what is for a stage replica of it; as `Layout.receivers` has it."""
        group, senders = self._ranks[stage_replica], self._ranks.get(at, [])
        if not senders:
            return None
        sender = senders[group.index(rank) * len(senders) // len(group)]
        return sender if sender in self._sights and self._sights[sender].round is not None else None


def _lacked_for(round: RecordedRound, stage_replica: int, output: Output) -> Input | None:
    """What the task of an output lacks at its own stage; None if it could run."""
    stage = stage_replica % round.placement.stages
    wanted = [Input(output.direction, output.chunk, output.microbatch)]
    if output.direction is not Direction.FORWARD:
        wanted.append(Input(Direction.FORWARD, output.chunk, output.microbatch))
    for one in wanted:
        needed = round.placement.source(stage, one) is not None
        if needed and not round.got(stage_replica, one) & ARRIVED:
            return one
    return None


@dataclass(frozen=True)
class Missing:
    """A program of several ranks that one has entered and another, which waits for something else, has not.

    Attributes:
        rank: that has not entered it.
        waits: the rank that waits in it.
        what: the program, in words.
    """

    rank: int
    waits: int
    what: str


@dataclass(frozen=True)
class Waiting:
    """Who waits for whom.

    Attributes:
        on: by rank, the ranks that it waits for; a rank that is not there waits for nobody.
        lost: messages that are lost, or on their way.
        missing: programs of several ranks that some have not entered.
    """

    on: Mapping[int, Sequence[int]]
    lost: Sequence[Lost]
    missing: Sequence[Missing]

    def ends(self) -> dict[int, int]:
        """The ranks that wait for nobody, by how many others wait for them, directly or not."""
        found: dict[int, int] = {}
        for rank in self.on:
            for end in self._reached(rank):
                found[end] = found.get(end, 0) + 1
        return found

    def _reached(self, rank: int) -> set[int]:
        """Whom a rank's waiting leads to, as far as those wait for nobody."""
        seen, new = {rank}, [rank]
        while new:
            new = [other for one in new for other in self.on.get(one, ()) if other not in seen]
            seen.update(new)
        return {one for one in seen if one not in self.on}


def waiting(sights: Mapping[int, Sight]) -> Waiting:
    """See `Waiting`, of all ranks by rank."""
    trails = Trails(sights)
    on: dict[int, Sequence[int]] = {}
    lost: list[Lost] = []
    missing: list[Missing] = []
    for rank, sight in sights.items():
        others: list[int] = []
        if sight.awaits_device or sight.is_busy:
            others, without = _partners(sight, sights)
            missing += without
        elif not sight.listens:
            continue
        elif sight.testimony is not None and (whom := sight.testimony.whom):
            unheard = [other for other in whom if _has_told(sights.get(other), sight)]
            lost += [Lost(other, rank, f"its value of {_gathered(sight)}") for other in unheard]
            others = [other for other in whom if other not in unheard]
        elif sight.place.endswith(_in_step(sight)):
            ends = trails.of(rank)
            lost += [end for end in ends if isinstance(end, Lost)]
            others = [end.rank if isinstance(end, Late) else end.sender for end in ends]
            lost += _decisions(sight, sights)
            others += _group(sight, sights)
        if others := [other for other in dict.fromkeys(others) if other != rank and other in sights]:
            on[rank] = others
    return Waiting(on, list(dict.fromkeys(lost)), missing)


def _in_step(sight: Sight) -> str:
    """How the waits of a driver end that runs tasks."""
    return f"in step {sight.round.step}" if sight.round is not None else "in no step"


def _has_told(other: Sight | None, sight: Sight) -> bool:
    """Whether a rank has begun the gather in which another one waits for it, and so told its value."""
    assert sight.testimony is not None
    theirs = None if other is None else other.testimony
    return theirs is not None and theirs.gathers >= sight.testimony.gathers


def _gathered(sight: Sight) -> str:
    """What is gathered, without whom it is waited for from."""
    return sight.place.partition(" from rank ")[0]


def _partners(sight: Sight, sights: Mapping[int, Sight]) -> tuple[list[int], list[Missing]]:
    """Whom a rank waits for that waits for devices, or is inside a program that it has called.

    They share its stage and are at another point. Of a rank that is busy it is known only that it waits for
    somebody if another one has not entered what it has.
    """
    mine = sight.recording
    elsewhere, missing = [], []
    for rank, other in sights.items():
        shares = rank != sight.rank and other.stages == sight.stages
        if not shares or (other.listens and other.place == sight.place):
            continue
        behind = other.recording.entered < mine.entered
        if sight.awaits_device or behind:
            elsewhere.append(rank)
        if other.listens and behind:
            missing.append(Missing(rank, sight.rank, mine.collective))
    return elsewhere, missing


def _decisions(sight: Sight, sights: Mapping[int, Sight]) -> list[Lost]:
    """What other members of its group have told a rank and it has not heard."""
    mine = sight.round
    assert mine is not None
    found = []
    voting = "the proposals of members" in sight.place
    for member, rank in enumerate(mine.members):
        other = sights.get(rank)
        theirs = None if other is None else other.round
        spoken_to = member == 0 or sight.rank == mine.members[0] or voting
        if other is None or theirs is None or theirs.round != mine.round or not spoken_to:
            continue
        number = mine.heard[member]
        if rank != sight.rank and theirs.told > number:
            task = other.recording.tasks.get(theirs.before + number + 1)
            decision = f"decision {number} ({task})" if member == 0 and not voting else f"message {number}"
            found.append(Lost(rank, sight.rank, f"{decision} of their group in step {mine.step}"))
    return found


def _group(sight: Sight, sights: Mapping[int, Sight]) -> list[int]:
    """The members of its group that a rank waits for: to decide, or to run what it runs, too."""
    mine = sight.round
    assert mine is not None
    found = []
    if "the leader's decision" in sight.place:
        found.append(mine.members[0])
    for rank in mine.members:
        other = sights.get(rank)
        if other is None or other.round is None or rank == sight.rank:
            continue
        dispatched = [entry.position for entry in other.recording.last]
        behind = max(dispatched, default=0) - other.round.before <= mine.ended - mine.before
        if (sight.running and behind) or ("proposals" in sight.place and other.round.told < mine.told):
            found.append(rank)
    return found


STILL_SECONDS, STILL_PAUSES = 2.0, 1.5
"""A run moves if it did something within this time, or within so many of its longest pauses."""

TRACED_SECONDS = 30.0
"""For so long a rank that prepares may be in the user's code, which JAX traces."""


@dataclass(frozen=True)
class Verdict:
    """What is said of a run.

    Attributes:
        moves: whether it does.
        sentence: what is wrong, in one sentence; of a run that moves, where it is.
        blamed: the ranks that it is about.
        lines: what every rank is at, one each.
    """

    moves: bool
    sentence: str
    blamed: Sequence[int]
    lines: Sequence[str]

    @property
    def text(self) -> str:
        """The sentence, and below it every rank."""
        return "\n".join([self.sentence, *(f"  {line}" for line in self.lines)])


def judge(seen: Sequence[Sight], *, absent: Sequence[int] = (), stalls: bool = False) -> Verdict:
    """Say why a run does not move, naming who is to blame, or that it moves.

    Args:
        seen: the ranks that have flight recorders; at least one.
        absent: those that have none yet.
        stalls: a wait of the run has come to its limit, so it does not move.
    """
    sights = {sight.rank: sight for sight in sorted(seen, key=lambda sight: sight.rank)}
    lines = [_line(sight) for sight in sights.values()]
    well = not any(map(_is_out, seen))
    quiet = min(sight.now for sight in seen) - max(map(_latest, seen))
    pause = _longest_pause(seen)
    if well and not stalls and quiet < max(STILL_SECONDS, STILL_PAUSES * pause):
        return Verdict(True, _moving(sights, quiet, pause), (), lines)
    if well and not stalls and not absent and all(map(_prepares, seen)):
        phases = " or ".join(dict.fromkeys(sight.recording.phase for sight in sights.values()))
        return Verdict(True, f"all ranks are {phases}, for {quiet:.1f} s; none waits for another", (), lines)
    sentence, blamed = _blame(sights, absent)
    return Verdict(False, sentence, blamed, lines)


def _blame(sights: Mapping[int, Sight], absent: Sequence[int]) -> tuple[str, Sequence[int]]:
    """The sentence, and whom it is about."""
    if known := _missed(sights, absent) or _differing_orders(sights):
        return known
    found = waiting(sights)
    for lost in sorted(found.lost, key=lambda lost: lost.heard):
        return _lost(lost, sights, len(found.lost)), [lost.sender, lost.receiver]
    ends = found.ends() or {rank: 0 for rank in sights if rank not in found.on}
    if ends:
        first = max(ends, key=lambda rank: (ends[rank], sights[rank].users is not None, -rank))
        return _late(sights[first], ends[first], found), [first]
    for missing in found.missing:
        return _missing(missing, sights), [missing.rank]
    names = ", ".join(sight.name for sight in sights.values())
    return f"the ranks wait for one another: {names}", list(sights)


def _missed(sights: Mapping[int, Sight], absent: Sequence[int]) -> tuple[str, Sequence[int]] | None:
    """A rank that could not do its part whatever the others do."""
    for sight in sorted(sights.values(), key=lambda sight: sight.state != "gone"):
        if _is_out(sight) or (sight.state == "silent" and _is_stuck(sight)):
            return f"{sight.name} {_how_absent(sight)}", [sight.rank]
    if not absent:
        return None
    names, has = ", ".join(f"rank {rank}" for rank in absent), "has" if len(absent) == 1 else "have"
    return f"{names} {has} not begun to join the others: no rrfp.Trainer is made there yet", absent


# How it is said.


def _how_absent(sight: Sight) -> str:
    if sight.state == "gone":
        return "has ended, and the others have not noticed yet"
    if sight.state == "stopped":
        return "stands still: it was stopped, as by SIGSTOP"
    where = f"; it is in {sight.users or sight.where}" if sight.where else ""
    since = f"its last sign of life was {sight.now - sight.recording.beat:.1f} s ago"
    return f"does not answer: something holds its interpreter, {since}{where}"


def _compiles(sight: Sight) -> bool:
    """Whether a rank is compiling and waits for nobody, nor is it in the user's code."""
    return sight.recording.phase == "compiling" and sight.is_busy


def _prepares(sight: Sight) -> bool:
    """Whether a rank starts or compiles, and waits for nobody."""
    if sight.recording.phase not in ("starting", "compiling") or sight.state != "answers" or sight.waiting:
        return False
    return sight.users is None or sight.now - sight.recording.phase_since < TRACED_SECONDS


def _is_out(sight: Sight) -> bool:
    """Whether a rank takes no part although it has not come to its end."""
    return sight.state in ("gone", "stopped") and sight.recording.phase != "ended"


def _is_stuck(sight: Sight) -> bool:
    """Whether a rank that does not answer could have: it has joined the others."""
    return sight.recording.phase != "starting"


def _lost(lost: Lost, sights: Mapping[int, Sight], count: int) -> str:
    sender, receiver = sights[lost.sender].name, sights[lost.receiver].name
    how = "which has heard of it, but its data has not come" if lost.heard else "which has not heard of it"
    more = f" (and {count - 1} more such message{'s' if count > 2 else ''})" if count > 1 else ""
    return f"{sender} has sent {lost.what} to {receiver}, {how}{more}"


def _late(sight: Sight, others: int, found: Waiting) -> str:
    """Of a rank that waits for nobody."""
    for missing in found.missing:
        if missing.rank == sight.rank:
            return f"{sight.name} has not entered {missing.what}, {_at(sight)}{_awaited_by(others)}"
    return f"{sight.name} {_at(sight)}{_awaited_by(others)}"


def _missing(missing: Missing, sights: Mapping[int, Sight]) -> str:
    rank, waits = sights[missing.rank], sights[missing.waits]
    return (
        f"{rank.name} has not entered {missing.what}, in which {waits.name} waits for it; {rank.name} "
        f"{_at(rank)}"
    )


def _awaited_by(others: int) -> str:
    if not others:
        return ""
    return "; another rank waits for it" if others == 1 else f"; {others} other ranks wait for it"


def _at(sight: Sight) -> str:
    """What a rank is at, after its name."""
    if sight.state in ("gone", "stopped"):
        return _how_absent(sight)
    users = f"in the user's {sight.users}" if sight.users is not None else ""
    if sight.running:
        oldest = sight.running[0]
        what = f"runs {oldest.task}, dispatched {sight.now - oldest.at:.1f} s ago, which has not ended"
        return f"{what}, {users}" if users else what
    if users:
        return f"waits for {sight.waiting[0]}, {users}" if sight.waiting else f"is {users}"
    if sight.waiting:
        return f"waits for {sight.waiting[0]}"
    compiles = "compiles, and " if _compiles(sight) else ""
    return f"{compiles}is in {sight.where}" if sight.where else f"{compiles}has not said what it does"


def _line(sight: Sight) -> str:
    """A rank's line."""
    return f"{sight.name}, {sight.recording.sentence(sight.now)}: {_at(sight)}"


def _moving(sights: Mapping[int, Sight], quiet: float, pause: float) -> str:
    phases = ", ".join(dict.fromkeys(sight.recording.phase for sight in sights.values()))
    if quiet >= STILL_SECONDS:
        return (
            f"nothing has moved for {quiet:.1f} s ({phases}), but there was such a pause before, of "
            f"{pause:.1f} s: ask again"
        )
    return f"the run moves ({phases}): {max(quiet, 0.0):.1f} s ago it began something"


def _differing_orders(sights: Mapping[int, Sight]) -> tuple[str, Sequence[int]] | None:
    """Two ranks of a stage that have dispatched different tasks at one position."""
    for rank, sight in sights.items():
        for other in sight.round.members if sight.round is not None else ():
            if other > rank and other in sights:
                tasks, theirs = sight.recording.tasks, sights[other].recording.tasks
                if (number := first_difference(tasks, theirs)) is not None:
                    step = next(e.step for e in sight.recording.last if e.position == number)
                    said = difference(sight.name, sights[other].name, number, step, tasks, theirs)
                    return said, [rank, other]
    return None


def _latest(sight: Sight) -> float:
    """When a rank last did something, in the seconds of `time.time()`."""
    return max([sight.recording.phase_since, *(entry.at for entry in sight.recording.last[-1:])])


def _longest_pause(seen: Sequence[Sight]) -> float:
    """Between two of the latest dispatches of a rank, in seconds."""
    times = [[entry.at for entry in sight.recording.last] for sight in seen]
    return max((after - at for own in times for at, after in pairwise(own)), default=0.0)
