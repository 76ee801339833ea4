"""A few ranks, each with its machine, the links between them, and what is true of each rank.

Time goes in units; whoever runs ticks once in each, after it has heard what is due. A message is due in the
unit after that in which it was sent, unless the link is cut; it may be heard before. What a machine says is
compared with `Known`, where its rules are written down a second time, and with the truth.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from rrfp_jax.errors import PeerLost
from rrfp_jax.runtime.run.membership import Failed, Goodbye, Membership, Said, Send, Silent
from tests.verification.exploration.visits import Enough, Move, Reach, never, visit
from tests.verification.exploration.witness import Broken

UNIT = 2.0  # seconds
SILENCE = 3  # units
GRACE = 2  # units, as the machine has it
STOOD_STILL = 2  # units between two ticks
ENOUGH = SILENCE + 2  # units after which whoever runs must know who does not
APART = 1000.0  # seconds between the clocks of neighbouring ranks

Machine: TypeAlias = type[Membership]
Item: TypeAlias = Said | None
"""A message under way; None for the end of the connection."""


@dataclass(frozen=True)
class Case:
    """What may happen: each of the faults once, to any rank, at any time."""

    ranks: int
    faults: tuple[str, ...] = ()
    leaves: bool = False
    host: bool = False

    def __str__(self) -> str:
        more = [*self.faults, *(["leave"] if self.leaves else []), *(["host"] if self.host else [])]
        return f"{self.ranks} ranks: {', '.join(more)}"


class Known(NamedTuple):
    """What a rank should know of another one; ages in units."""

    silent: int = 0
    word: tuple[str, int, str] | None = None  # how it is gone, whose trouble that is, and the sentence
    age: int = 0  # of the word

    def told(self, word: tuple[str, int, str]) -> Known:
        """With a word more: the first one stays, but a failure's own one beats the others."""
        beats = self.word is None or (word[0] == "failed" and self.word[0] != "failed")
        return self._replace(word=word, age=0) if beats else self


class Rank(NamedTuple):
    """A rank: its machine, and what is true of it."""

    machine: Membership
    known: tuple[Known, ...]
    state: str = "runs"  # or "frozen", "left", "failed", "killed"
    said: tuple[int, str] = (-1, "")  # the culprit and the sentence that it failed with
    cut: bool = False
    guilty: bool = False  # something was wrong with it, by itself
    mute: bool = False  # it may have been silent for too long
    ticked: bool = False  # in this unit
    idle: int = 0  # units since its latest tick
    up: int = 0  # units for which it has run
    down: int = 0  # units for which it has not, or was cut off


class World(NamedTuple):
    """All of that; a move makes a new one."""

    case: Case
    ranks: tuple[Rank, ...]
    links: tuple[
        tuple[tuple[Item, bool], ...], ...
    ]  # from a to b at a * ranks + b; whether of an earlier unit
    faults: tuple[str, ...]
    now: int = 0

    def clock(self, rank: int) -> float:
        """The time as a rank has it (s)."""
        return self.now * UNIT + rank * APART

    def key(self) -> Hashable:
        """All that matters for what may follow."""
        ranks = tuple((_memory(one.machine, self.clock(r)), *one[1:]) for r, one in enumerate(self.ranks))
        links = tuple(tuple((_plain(item), old) for item, old in link) for link in self.links)
        return ranks, links, self.faults


def start(case: Case, machine: Machine = Membership) -> World:
    """All have just connected to each other."""
    ranks = range(case.ranks)
    machines = [
        machine(r, [other for other in ranks if other != r], r * APART, SILENCE * UNIT) for r in ranks
    ]
    known = (Known(),) * case.ranks
    return World(case, tuple(Rank(one, known) for one in machines), ((),) * case.ranks**2, case.faults)


def moves(world: World) -> Iterator[tuple[str, World]]:
    """What may happen next, with the world after it."""
    running = [r for r, one in enumerate(world.ranks) if one.state == "runs"]
    for r in running:
        if not world.ranks[r].ticked and not _due(world, r):
            yield f"tick {r}", _tick(world, r)
        if any(known.word and known.word[0] != "left" for known in world.ranks[r].known):
            yield f"notice {r}", _fail(world, r, *_trouble(world.ranks[r].machine))
        if world.case.leaves and _may_leave(world, r):
            yield f"leave {r}", _leave(world, r)
        for sender in range(world.case.ranks):
            if _link(world, sender, r) and not world.ranks[r].cut and not world.ranks[sender].cut:
                yield f"{r} hears {sender}", _hear(world, sender, r)
    if running and _may_pass(world):
        yield "time passes", _pass(world, 1)
    for fault in sorted(set(world.faults)):
        left = list(world.faults)
        left.remove(fault)
        yield from _faults(world._replace(faults=tuple(left)), fault, running)


def _faults(world: World, fault: str, running: Sequence[int]) -> Iterator[tuple[str, World]]:
    if fault == "stop":
        yield "all stop", _pass(world, SILENCE + 1)
        return
    for r, one in enumerate(world.ranks):
        name = f"{fault} {r}"
        if fault == "thaw" and one.state == "frozen":
            yield name, _with(world, r, state="runs", up=0, down=0)
        elif fault in ("thaw",) or r not in running:
            continue
        elif fault == "fail":
            yield name, _fail(_with(world, r, guilty=True), r, r, f"rank {r}: broken")
        elif fault == "kill":
            yield name, _end(_with(world, r, guilty=True, mute=True), r, "killed")
        elif fault == "freeze":
            yield name, _with(world, r, state="frozen", guilty=True, mute=True, down=0)
        elif fault == "cut":
            yield name, _with(world, r, cut=True, guilty=True, mute=True, down=0)


def _tick(world: World, r: int) -> World:
    one, now = world.ranks[r], world.clock(r)
    machine = copied(one.machine)
    sends, gone = machine.tick(now), machine.overdue(now)
    still = one.idle >= STOOD_STILL
    known = list(one.known)
    unjudged = [each.silent for other, each in enumerate(known) if other != r and not each.word]
    for other, each in enumerate(known):
        if other != r and still:
            known[other] = each._replace(silent=0)
        elif other != r and max(unjudged, default=0) > SILENCE and each.silent > SILENCE / 2:
            known[other] = each.told(("lost", other, ""))  # whom it blames, `_fail` judges
    world = _send(_with(world, r, machine=machine, known=tuple(known), ticked=True, idle=0), r, sends)
    others = [each for other, each in enumerate(known) if other != r]
    lost = all(each.word and each.word[0] == "lost" for each in others)
    bad = [each for each in others if each.word and each.word[0] != "left"]
    late = bad and ((lost and len(others) > 1) or any(each.age > GRACE for each in bad))
    if bool(late) != (gone is not None):
        raise Broken(f"rank {r} ends {'too early' if gone else 'too late'}")
    if gone is None:
        return _checked(world, r)
    if gone.how == "left":
        raise Broken(f"rank {r} ends because of one that left")
    return _fail(_checked(world, r), r, *_trouble(machine))


def _hear(world: World, sender: int, r: int) -> World:
    one, now = world.ranks[r], world.clock(r)
    machine, known = copied(one.machine), one.known[sender]
    sends: list[Send] = []
    for item, _ in _link(world, sender, r):
        if item is None:
            machine.closed(sender, "closed its connection", now)
            known = known.told(("lost", sender, ""))
            continue
        machine.heard(sender, now)
        known = known._replace(silent=0)
        sends += machine.received(sender, item, now)
        if isinstance(item, Goodbye):
            known = known.told(("left", sender, ""))
        elif isinstance(item, Failed):
            known = known.told(("failed", item.culprit, item.sentence))
    world = _with(world, r, machine=machine, known=_put(one.known, sender, known))
    world = world._replace(links=_put(world.links, sender * world.case.ranks + r, ()))
    return _checked(_send(world, r, sends), r)


def _may_leave(world: World, r: int) -> bool:
    return not world.case.host or r > 0 or world.ranks[r].machine.all_gone


def _leave(world: World, r: int) -> World:
    machine = copied(world.ranks[r].machine)
    if world.case.host and r == 0 and (trouble := machine.trouble) is not None:
        return _fail(world, r, trouble.culprit, trouble.sentence)
    if world.case.host and r == 0:
        for other, one in enumerate(world.ranks[1:], 1):
            if one.state != "left" and one.said[0] != 0 and not world.ranks[0].guilty:
                raise Broken(f"rank 0 leaves in good order, although rank {other} has not")
    sends = machine.end(Goodbye())
    if not any(isinstance(said, Goodbye) for _, said in sends):
        raise Broken(f"rank {r} leaves without a word")
    return _quiet(_end(_send(_with(world, r, machine=machine), r, sends), r, "left"), r)


def _fail(world: World, r: int, culprit: int, sentence: str) -> World:
    machine = copied(world.ranks[r].machine)
    sends = machine.end(Failed(culprit, sentence))
    world = _send(_with(world, r, machine=machine, said=(culprit, sentence)), r, sends)
    if not any(said == Failed(culprit, sentence) for _, said in sends):
        raise Broken(f"rank {r} fails without saying why")
    silent = [other for other, one in enumerate(world.ranks) if other != r and one.mute]
    own = culprit == r and len(silent) == world.case.ranks - 1  # it takes itself for cut off, and may be
    if not (own or world.ranks[culprit].guilty or world.ranks[r].cut):
        raise Broken(f"rank {r} blames rank {culprit}, which is innocent")
    return _quiet(_end(world, r, "failed"), r)


def _trouble(machine: Membership) -> tuple[int, str]:
    """Whom a rank blames, as its exit does."""
    try:
        machine.require([rank for rank, gone in machine.gone.items() if gone.how != "left"])
    except PeerLost as error:
        if machine.is_cut_off:
            return machine.rank, "cut off"
        assert error.culprit is not None
        return error.culprit, str(error)
    raise Broken(f"rank {machine.rank} finds nobody to blame")


def _quiet(world: World, r: int) -> World:
    """After its end a rank says and judges nothing."""
    machine, later = copied(world.ranks[r].machine), world.clock(r) + 10 * UNIT
    if machine.tick(later) or machine.end(Goodbye()) or machine.overdue(later):
        raise Broken(f"rank {r} goes on after its end")
    return world


def _end(world: World, r: int, state: str) -> World:
    world = _with(world, r, state=state, down=0)
    links = list(world.links)
    for other in range(world.case.ranks):
        if other != r and world.ranks[other].state in ("runs", "frozen"):
            links[r * world.case.ranks + other] += ((None, False),)
        links[other * world.case.ranks + r] = ()
    return world._replace(links=tuple(links))


def _send(world: World, r: int, sends: Sequence[Send]) -> World:
    links = list(world.links)
    for ranks, said in sends:
        for other in ranks:
            if world.ranks[other].state in ("runs", "frozen"):
                at, old = r * world.case.ranks + other, False
                if links[at] and _plain(links[at][-1][0]) == _plain(said):  # one of two that say the same
                    links[at], old = links[at][:-1], links[at][-1][1]
                links[at] = (*links[at], (said, old))
    return world._replace(links=tuple(links))


def _may_pass(world: World) -> bool:
    """Whether all who run have ticked, and have heard what is due."""
    return all(one.ticked and not _due(world, r) for r, one in enumerate(world.ranks) if one.state == "runs")


def _due(world: World, r: int) -> bool:
    senders = [] if world.ranks[r].cut else [s for s, one in enumerate(world.ranks) if not one.cut]
    return any(old for sender in senders for _, old in _link(world, sender, r))


def _pass(world: World, units: int) -> World:
    ranks = []
    for one in world.ranks:
        down = one.state != "runs" or one.cut
        known = tuple(
            each._replace(silent=min(each.silent + units, ENOUGH), age=min(each.age + units, ENOUGH))
            if each.word
            else each._replace(silent=min(each.silent + units, ENOUGH))
            for each in one.known
        )
        ranks.append(
            one._replace(
                known=known,
                ticked=False,
                idle=min(one.idle + units, STOOD_STILL),
                up=min(one.up + 1, ENOUGH) if units == 1 and one.state == "runs" else 0,
                down=min(one.down + units, ENOUGH) if down else 0,
            )
        )
    links = tuple(tuple((item, True) for item, _ in link) for link in world.links)
    return world._replace(ranks=tuple(ranks), links=links, now=world.now + units)


def _checked(world: World, r: int) -> World:
    """Compare what a rank knows with what it should know, and with the truth."""
    one = world.ranks[r]
    for other, truth in enumerate(world.ranks):
        if other == r:
            continue
        gone, word = one.machine.gone.get(other), one.known[other].word
        says = None if gone is None else (gone.how, other if gone.how == "lost" else gone.culprit)
        if says != (word and word[:2]) or (
            gone and word and word[0] == "failed" and gone.sentence != word[2]
        ):
            raise Broken(f"rank {r} holds rank {other} for {says}, and should for {word}")
        if gone and gone.how == "lost" and not (truth.mute or one.cut):
            raise Broken(f"rank {r} has lost rank {other}, which nothing has happened to")
        if gone and gone.how != "lost" and truth.state != gone.how:
            raise Broken(f"rank {r} says rank {other} has {gone.how}, and it has not")
        away = max(truth.down, one.down if one.cut else 0)
        if gone is None and one.ticked and min(away, one.up) >= ENOUGH:
            raise Broken(f"rank {r} does not know that rank {other} is gone")
    clock = one.machine.clock
    if clock.samples and abs(clock.offset + r * APART) > clock.precision:
        raise Broken(f"rank {r} is wrong about the clock of rank 0")
    return world


def copied(machine: Membership) -> Membership:
    """A machine with a memory of its own."""
    new = copy.copy(machine)
    new._heard, new.clock = dict(machine._heard), copy.copy(machine.clock)
    new.clock.samples = machine.clock.samples.copy()
    return new


def _memory(machine: Membership, now: float) -> Hashable:
    """All that a machine remembers but rank 0's clock, in units ago."""
    gone = sorted(
        (rank, one.how, one.culprit, one.sentence, min(now - one.since, ENOUGH * UNIT))
        for rank, one in machine.gone.items()
    )
    heard = tuple(min(now - heard, ENOUGH * UNIT) for heard in machine._heard.values())
    silent, still = tuple(sorted(machine._silent.items())), min(now - machine._stood_still, ENOUGH * UNIT)
    return tuple(gone), heard, silent, still, min(now - machine._ticked, STOOD_STILL * UNIT), machine._ended


def _plain(item: Item) -> Hashable:
    return item if item is None or isinstance(item, Failed | Silent) else type(item).__name__


def _link(world: World, sender: int, r: int) -> tuple[tuple[Item, bool], ...]:
    return world.links[sender * world.case.ranks + r]


def _with(world: World, r: int, **changes: Any) -> World:
    return world._replace(ranks=_put(world.ranks, r, world.ranks[r]._replace(**changes)))


def _put(row: tuple[Any, ...], at: int, value: object) -> tuple[Any, ...]:
    return (*row[:at], value, *row[at + 1 :])


SMALL = (
    Case(2),
    Case(2, ("kill",), leaves=True, host=True),
    Case(2, ("fail",), leaves=True),
    Case(2, ("freeze", "thaw")),
    Case(2, ("cut",)),
    Case(2, ("stop",), leaves=True),
)
"""Whole in a few seconds together."""

LARGE = (
    Case(2, ("freeze", "thaw", "kill"), leaves=True, host=True),
    Case(2, ("freeze", "thaw", "stop"), leaves=True),
    Case(2, ("freeze", "thaw", "fail"), leaves=True),
    Case(3),
    Case(3, ("stop",)),
    Case(3, ("kill",)),
    Case(3, ("fail",)),
    Case(3, leaves=True, host=True),
    Case(3, ("kill",), leaves=True, host=True),
    Case(3, ("kill", "kill")),
    Case(3, ("kill", "fail")),
    Case(3, ("cut",)),
    Case(3, ("freeze", "thaw")),
    Case(3, ("freeze", "thaw", "kill"), leaves=True, host=True),
)


def explore(case: Case, machine: Machine = Membership, *, enough: Enough = never) -> Reach:
    """Visit all states of a case, or as many as are enough."""

    def happens(world: World) -> Iterator[Move]:
        for done, new in moves(world):
            yield done, partial(World._replace, new)

    return visit(start(case, machine), happens, enough)
