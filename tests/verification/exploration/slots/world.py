"""A receiver, its senders, what is under way between them, and what lies in the slots.

Theory of operation. The real machines of `rrfp_jax/nixl` are driven (`moves.py`). Around them is
all that a transport adds: channels in order, writes and copies that take their time, programs that end when
they like, rounds, resets, deaths. What is written is followed by rules of its own: a slot that is being
written belongs to that write alone; what is copied must be whole, and stays until the copy has ended. A
sender that is dead may still write.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, NamedTuple

from rrfp_jax.core.tasks import Direction, Input
from rrfp_jax.nixl.memory import ALIGNMENT
from rrfp_jax.nixl.receiver import Receiver, Slab
from rrfp_jax.nixl.sender import Sender
from rrfp_jax.runtime.transport.protocol import Key, Rounds

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
