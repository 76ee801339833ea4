"""A receiver, its senders, what is under way between them, and what lies in the slots.

Theory of operation. The real machines of `rrfp_jax/nixl` are driven (`actions`, `after`). Around them is
all that a transport adds: channels in order, writes and copies that take their time, programs that end when
they like, rounds, resets, deaths. What is written is followed by rules of its own: a slot that is being
written belongs to that write alone; what is copied must be whole, and stays until the copy has ended. A
sender that is dead may still write.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from rrfp_jax.core.tasks import Direction, Input
from rrfp_jax.nixl.memory import ALIGNMENT
from rrfp_jax.nixl.receiver import Copy, Give, Grow, Receiver, Slab
from rrfp_jax.nixl.sender import Ask, Dropped, Granted, Refused, Say, Sender, Write, Written
from rrfp_jax.runtime.transport.protocol import Key, Rounds
from tests.verification.exploration.witness import Broken, require

RECEIVER = 0
"""Its rank; senders are 1, 2, ..."""
STAGE = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is sent, and what may go wrong."""

    sends: Sequence[Sequence[Sequence[int]]]
    slots: int = 2
    ahead: int = 1
    resets: bool = False
    deaths: bool = False


class Makers(NamedTuple):
    """What makes the machines."""

    receiver: Callable[[Sequence[Slab], Mapping[int, int], int], Receiver] = Receiver
    sender: Callable[[], Sender] = Sender


REAL = Makers()


class Content(NamedTuple):
    """Of a slot: whose message, and whether all of it is there."""

    rank: int
    key: Key
    whole: bool


class Live(NamedTuple):
    """A place that somebody may write to, or that is being copied out; `number` of the message that asked."""

    place: int
    rank: int
    slot: int
    number: int | None


@dataclass
class End:
    """A sender. Messages have numbers from 1."""

    machine: bytes
    round: int = 1
    keys: tuple[Key, ...] = ()
    offered: int = 0
    unproduced: frozenset[int] = frozenset()
    writing: frozenset[tuple[int, int]] = frozenset()
    inbox: tuple[Any, ...] = ()
    outbox: tuple[Any, ...] = ()
    dead: bool = False
    alone: bool = False
    reset: bool = False


@dataclass
class World:
    """A state of the whole."""

    case: Case
    machine: bytes
    ends: tuple[End, ...]
    sizes: tuple[int, ...]
    contents: tuple[Content | None, ...]
    round: int = 0
    over: bool = True
    arrived: frozenset[Key] = frozenset()
    broken: frozenset[int] = frozenset()
    live: frozenset[Live] = frozenset()
    copies: frozenset[Live] = frozenset()
    dead: bool = False
    lost: frozenset[int] = frozenset()
    known: dict[bytes, tuple[Hashable, bool]] = field(default_factory=dict, repr=False)

    def key(self) -> Hashable:
        """Tells states apart."""
        ends = [(self._key_of(end.machine), *list(vars(end).values())[1:]) for end in self.ends]
        mine = list(vars(self).values())[3:-1]
        return (self._key_of(self.machine), *ends, *mine)

    def _key_of(self, machine: bytes) -> Hashable:
        return self._known(machine)[0]

    def _is_idle(self, machine: bytes) -> bool:
        return self._known(machine)[1]

    def _known(self, pickled: bytes) -> tuple[Hashable, bool]:
        if pickled not in self.known:
            machine = pickle.loads(pickled)
            self.known[pickled] = machine_key(machine), is_idle(machine)
        return self.known[pickled]

    @property
    def rounds(self) -> int:
        """How many there are."""
        return len(self.case.sends[0])

    def to_send(self, rank: int) -> Sequence[int]:
        """The sizes of what a sender sends in its round."""
        return self.case.sends[rank - 1][self.ends[rank - 1].round - 1]

    def has_arrived(self) -> bool:
        """Whether the receiver's round is complete."""
        count = sum(len(sends[self.round - 1]) for sends in self.case.sends)
        return not self.round or len(self.arrived) == count

    def finished(self) -> bool:
        """Whether nothing is left to do; after a death nothing need be."""
        if self.dead or any(end.dead for end in self.ends):
            return True
        through = self.round == self.rounds and (self.over or self.has_arrived()) and not self.copies
        return (
            through
            and self._is_idle(self.machine)
            and all(map(self._is_through, range(1, len(self.ends) + 1)))
        )

    def _is_through(self, rank: int) -> bool:
        end = self.ends[rank - 1]
        under_way = end.unproduced or end.writing or end.inbox or end.outbox
        sent = end.round == self.rounds and end.offered == len(self.to_send(rank)) and not under_way
        return sent and self._is_idle(end.machine)


def message_key(round: int, rank: int, i: int) -> Key:
    """Of a sender's message in a round."""
    return Key(round, STAGE, Input(Direction.FORWARD, rank, i))


def machine_key(machine: Receiver | Sender) -> Hashable:
    """All that a machine remembers, to compare states; of what was asked also the order."""
    return tuple(_frozen(value, name) for name, value in vars(machine).items())


def _frozen(value: Any, name: str = "") -> Hashable:
    if isinstance(value, dict):
        items = [(key, _frozen(own)) for key, own in value.items()]
        return tuple(items if name == "_asked" else sorted(items, key=lambda item: item[0]))
    if isinstance(value, set):
        return tuple(sorted(value, key=str))
    if isinstance(value, list | Slab):
        return tuple(map(_frozen, value))
    return _frozen(vars(value)) if is_dataclass(value) or isinstance(value, Rounds) else value


def is_idle(machine: Receiver | Sender) -> bool:
    """Whether every request has had an answer, everything written is taken, and every message has ended."""
    if isinstance(machine, Receiver):
        return not machine._asked and not machine._rounds.early
    return not machine._outgoing


def start(case: Case, makers: Makers = REAL) -> World:
    """The beginning of a case."""
    sizes = (ALIGNMENT,) * case.slots
    receiver = pickle.dumps(makers.receiver([Slab([*sizes], 1)], {STAGE: 0}, case.ahead))
    sender = pickle.dumps(makers.sender())
    return World(case, receiver, tuple(End(sender) for _ in case.sends), sizes, (None,) * case.slots)


Action: TypeAlias = tuple[Any, ...]
"""Its name, then the sender's rank if it is of one, then what it is about."""


def actions(world: World) -> Iterator[Action]:
    """All that can happen next."""
    nobody_died = not world.dead and not any(end.dead for end in world.ends)
    may_break = world.case.resets and not world.broken
    if not world.dead:
        if world.round < world.rounds and (world.over or world.has_arrived()):
            yield ("begin",)
        if not world.over and not world.has_arrived() and (may_break or world.round in world.broken):
            yield ("reset",)
        yield from (("copied", copy) for copy in sorted(world.copies))
        if world.case.deaths and nobody_died:
            yield ("die",)
    for rank, end in enumerate(world.ends, 1):
        yield from (("complete", rank, *write) for write in sorted(end.writing))
        if end.outbox and not world.dead:
            yield ("hear", rank)
        if end.dead:
            continue
        if end.inbox:
            yield ("answer", rank)
        if end.alone:
            continue
        yield from (("produce", rank, number) for number in sorted(end.unproduced))
        if end.offered < len(world.to_send(rank)):
            yield ("offer", rank)
        elif not end.unproduced and end.round < world.rounds:
            yield ("next", rank)
        if not end.reset and (may_break or end.round in world.broken):
            yield ("break_", rank)
        if world.case.deaths and nobody_died:
            yield ("kill", rank)


def after(world: World, action: Action) -> World:
    """The world after something has happened."""
    new = replace(world)
    name, *of = action
    try:
        getattr(_Moves(new), name)(*of)
    except Refused as refused:
        raise Broken(f"rank {refused.rank} is refused: it {refused}") from None
    return new


class _Moves:
    """Changes one world; each method is an action."""

    def __init__(self, world: World) -> None:
        self.w = world

    def begin(self) -> None:
        self.w.round, self.w.over, self.w.arrived = self.w.round + 1, False, frozenset()
        self._receive("begin", self.w.round)

    def reset(self) -> None:
        self.w.over, self.w.broken = True, self.w.broken | {self.w.round}
        self._receive("reset")

    def copied(self, copy: Live) -> None:
        self.w.copies -= {copy}
        self._end_place(copy.place)
        self._receive("release", copy.place)

    def die(self) -> None:
        self.w.dead = True
        for rank, end in enumerate(self.w.ends, 1):
            self._set(rank, inbox=(*end.inbox, None))

    def kill(self, rank: int) -> None:
        """What it has said arrives; of its writes nobody knows."""
        end = self.w.ends[rank - 1]
        self._set(rank, dead=True, inbox=(), outbox=(*end.outbox, None))

    def hear(self, rank: int) -> None:
        """The receiver gets a sender's oldest message."""
        end = self.w.ends[rank - 1]
        said, *rest = end.outbox
        self._set(rank, outbox=tuple(rest))
        if said is None:
            self.w.lost |= {rank}
            self._receive("lost", rank)
            return
        method = {"Ask": "asked", "Written": "written", "Dropped": "dropped"}[type(said).__name__]
        done = self._answers(method, rank, said)
        self._note(rank, said, any(isinstance(one, Copy) for one in done))
        self._carry_out(done)

    def answer(self, rank: int) -> None:
        """A sender gets the receiver's oldest message."""
        end = self.w.ends[rank - 1]
        said, *rest = end.inbox
        self._set(rank, inbox=tuple(rest))
        if said is None:
            self._set(rank, alone=True, unproduced=frozenset())
            self._send(rank, "lost", RECEIVER)
        else:
            self._send(rank, "granted" if isinstance(said, Granted) else "unwanted", RECEIVER, said)

    def offer(self, rank: int) -> None:
        end = self.w.ends[rank - 1]
        key = message_key(end.round, rank, end.offered)
        size = self.w.to_send(rank)[end.offered] * ALIGNMENT
        keys = (*end.keys, key)
        self._set(rank, offered=end.offered + 1, unproduced=end.unproduced | {len(keys)}, keys=keys)
        self._send(rank, "offer", RECEIVER, key, (((size,), "uint8"),))

    def produce(self, rank: int, number: int) -> None:
        end = self.w.ends[rank - 1]
        self._set(rank, unproduced=end.unproduced - {number})
        self._send(rank, "produced", number, 0.0)

    def complete(self, rank: int, number: int, slot: int) -> None:
        end = self.w.ends[rank - 1]
        content = self.w.contents[slot]
        assert content is not None
        self._set(rank, writing=end.writing - {(number, slot)})
        self._fill(slot, content._replace(whole=True))
        if not end.dead:
            self._send(rank, "complete", number)

    def next(self, rank: int) -> None:
        end = self.w.ends[rank - 1]
        self._set(rank, round=end.round + 1, offered=0, reset=False)

    def break_(self, rank: int) -> None:
        end = self.w.ends[rank - 1]
        self.w.broken |= {end.round}
        self._set(rank, reset=True, offered=len(self.w.to_send(rank)), unproduced=frozenset())
        self._send(rank, "reset", end.round)

    def _receive(self, method: str, *arguments: Any) -> None:
        self._carry_out(self._answers(method, *arguments))

    def _answers(self, method: str, *arguments: Any) -> Sequence[Any]:
        machine = pickle.loads(self.w.machine)
        done = getattr(machine, method)(*arguments)
        self.w.machine = pickle.dumps(machine)
        return done or ()

    def _carry_out(self, done: Sequence[Any]) -> None:
        for one in done:
            if isinstance(one, Grow):
                self._check_unused(one.slot, "grows")
                sizes = self.w.sizes
                self.w.sizes = (*sizes[: one.slot], one.room, *sizes[one.slot + 1 :])
            elif isinstance(one, Give):
                self._check_unused(one.slot, "is given")
                self.w.live |= {Live(one.place, one.rank, one.slot, one.number)}
                at = ((one.slot, 0),)
                self._say(one.rank, Granted(one.place, one.stage, one.number, one.room, at))
            elif isinstance(one, Say):
                self._say(one.rank, one.message)
            else:
                self._copy(one)

    def _copy(self, copy: Copy) -> None:
        require(copy.key.round == self.w.round and not self.w.over, f"the {copy.key} comes in another round")
        require(copy.key not in self.w.arrived, f"the {copy.key} comes twice")
        self.w.arrived |= {copy.key}
        if copy.slot is None or copy.place is None:
            return
        there = self.w.contents[copy.slot]
        right = Content(copy.rank, copy.key, True)
        require(there == right, f"the {copy.key} is read from slot {copy.slot}, which has {there}")
        (live,) = [live for live in self.w.live if live.place == copy.place]
        require(live[1:3] == (copy.rank, copy.slot), f"the {copy.key} is read from a place of another")
        self.w.copies |= {live}

    def _send(self, rank: int, method: str, *arguments: Any) -> None:
        """Tell a sender's machine of an event, and do what it says."""
        machine = pickle.loads(self.w.ends[rank - 1].machine)
        done = getattr(machine, method)(*arguments)
        self._set(rank, machine=pickle.dumps(machine))
        for one in done[1] if method == "offer" else done:
            end = self.w.ends[rank - 1]
            if isinstance(one, Say):
                self._set(rank, outbox=(*end.outbox, one.message) if not self.w.dead else end.outbox)
            elif isinstance(one, Write):
                self._write(rank, end, one)

    def _write(self, rank: int, end: End, write: Write) -> None:
        ((slot, _),) = write.place.at
        require(not end.alone, f"rank {rank} writes to a receiver that is lost")
        require(write.number not in end.unproduced, "what is not computed yet is written")
        others = [number for each in self.w.ends for number, at in each.writing if at == slot]
        require(not others, f"rank {rank} writes to slot {slot}, which is being written")
        require(self.w.contents[slot] is None, f"rank {rank} writes to slot {slot}, which has not been read")
        live = any(live[:3] == (write.place.place, rank, slot) for live in self.w.live)
        require(live or self.w.dead, f"rank {rank} writes to a place that it does not have")
        require(write.specs[0][0][0] <= self.w.sizes[slot], f"rank {rank} writes past the end of slot {slot}")
        self._fill(slot, Content(rank, end.keys[write.number - 1], False))
        self._set(rank, writing=end.writing | {(write.number, slot)})

    def _check_unused(self, slot: int, what: str) -> None:
        owners = [live for live in self.w.live if live.slot == slot]
        require(not owners, f"slot {slot} {what}, which rank {owners[0].rank if owners else 0} may write to")

    def _note(self, rank: int, said: Ask | Written | Dropped, copied: bool) -> None:
        """What a sender has told of its places: what is too small, dropped or not wanted, is free."""
        ended = list(said.returned) if isinstance(said, Ask) else []
        if isinstance(said, Dropped):
            ended += [live.place for live in self.w.live if (live.rank, live.number) == (rank, said.number)]
        if isinstance(said, Written) and not copied and said.key.round <= self.w.round:
            ended += [live.place for live in self.w.live if live.place == said.place]
        for place in ended:
            self._end_place(place)

    def _end_place(self, place: int) -> None:
        """Nobody may write to a place any more, nor read from it."""
        for live in [live for live in self.w.live if live.place == place]:
            self.w.live -= {live}
            self._fill(live.slot, None)

    def _fill(self, slot: int, content: Content | None) -> None:
        contents = self.w.contents
        self.w.contents = (*contents[:slot], content, *contents[slot + 1 :])

    def _say(self, rank: int, message: Any) -> None:
        end = self.w.ends[rank - 1]
        if not end.dead:
            self._set(rank, inbox=(*end.inbox, message))

    def _set(self, rank: int, **changes: Any) -> None:
        ends = self.w.ends
        self.w.ends = (*ends[: rank - 1], replace(ends[rank - 1], **changes), *ends[rank:])
