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

from rrfp_jax.launcher.why.sight import Sight
from rrfp_jax.launcher.why.trail import Lost
from rrfp_jax.launcher.why.waiting import Missing, Waiting, waiting
from rrfp_jax.runtime.group.dispatch_hash import difference, first_difference

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
