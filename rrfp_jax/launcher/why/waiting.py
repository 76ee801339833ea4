"""For whom each rank of a run waits, and what one has told that another has not heard. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rrfp_jax.launcher.why.sight import Sight
from rrfp_jax.launcher.why.trail import Late, Lost, Trails


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
