"""One-sided transfers: what the two ends say to each other, and why; the sender's end.

    sender                                                  receiver
    task dispatched: a place is there, or
                        -- Ask (its shapes) ------>     takes a slot, now or when one is free
                        <------ Granted (a place) ---
    program ended, place there: writes, no message
    write complete      -- Written (key, shapes) ----->     copies out by a program; that ended: slot free

Every device of a receiving stage has a *slab*: a few slots that are registered once. A *place* is the right
to write once into one slot of each of the stage's devices. It has a number that is used once, and belongs to
one sender. All memory is the receiver's, so it decides when an ask gets a place.

**Ahead.** A task may be shorter than the way of an ask and its answer. So a slot that becomes free goes back
to the sender and stage that used it, as a place for whatever comes next; then nothing is asked, and a message
costs one word: Written. At least one slot of a slab is never given ahead. What is written there is always
copied out, so whoever asks gets it in the end: no order of messages can deadlock. A place that is too small
goes back with the next ask. A free slot grows to what an ask needs.

**Rounds.** A sender may be a round ahead of the receiver. Its ask gets a place when that round begins, else
slots would be held by what nobody can take, while others need them. What it writes to a place that it has
waits for the round. A round that is broken off ends every ask: `Unwanted` says that the receiver gives no
place, or takes no more, `Dropped` that the sender will not write. Each ask is ended by its sender, with
Written or Dropped, once; only then is its slot free. So nobody writes into a slot that has been given to
another. What is written for a round that is over is not copied out.

**Whoever is lost.** A write of a lost process may still be under way. Its slots are given to nobody.

All this goes by the mailbox, whose peers have shown that they know the run's token. The agent's own
notifications are not used: nothing can sleep on them, and whoever reaches its port could send one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from rrfp_jax.nixl.memory import packed
from rrfp_jax.runtime.run.mailbox import Message
from rrfp_jax.runtime.transport.protocol import Key, Specs


class Ask(Message, frozen=True):
    """Arrays, not all of them empty, are being computed for an input and need a place."""

    number: int  # of the message; the sender counts up
    key: Key
    specs: Specs
    returned: tuple[int, ...]  # places given ahead that are too small, and are not used any more


class Granted(Message, frozen=True):
    """A place to write to, once."""

    place: int
    stage: int  # whose input may be written there (its stage replica, see `Layout`)
    number: int | None  # of the message that asked; None if it is given ahead
    room: int  # bytes that fit, on each device
    at: tuple[tuple[int, int], ...]  # on each of the stage's devices: an address, and the device's id there
    metadata: bytes = b""  # what the sender's agent must know of this memory, if that is new


class Unwanted(Message, frozen=True):
    """The receiver does not take the message of this number any more."""

    number: int


class Written(Message, frozen=True):
    """A message is complete."""

    place: int | None  # None if it has no bytes
    key: Key
    specs: Specs
    ended: float  # when its program ended (s, on rank 0's clock)


class Dropped(Message, frozen=True):
    """The message of this number, which asked for a place, will not be written."""

    number: int


class Refused(Exception):
    """A rank said something that it may not say. The machine is as it was before."""

    def __init__(self, rank: int, sentence: str) -> None:
        super().__init__(sentence)
        self.rank = rank


class Say(NamedTuple):
    """An instruction of a machine: send a message to a rank."""

    rank: int
    message: Ask | Written | Dropped | Unwanted


class Write(NamedTuple):
    """An instruction: write a message to its place, and tell `complete` when all of it is there."""

    number: int
    rank: int
    specs: Specs
    place: Granted


class Release(NamedTuple):
    """An instruction: a message is where it belongs, or will not be written; its arrays may go."""

    number: int


Instruction: TypeAlias = Say | Write | Release


@dataclass
class _Outgoing:
    rank: int
    key: Key
    specs: Specs
    asked: bool = False
    place: Granted | None = None
    state: Literal["offered", "produced", "writing"] = "offered"
    ended: float = 0.0


class Sender:
    """One process's end. Each event gives the instructions that follow from it, in order."""

    def __init__(self) -> None:
        self._latest = 0
        self._outgoing: dict[int, _Outgoing] = {}
        self._ahead: dict[tuple[int, int], list[Granted]] = {}  # by rank and stage
        self._lost: set[int] = set()

    def offer(self, rank: int, key: Key, specs: Specs) -> tuple[int, list[Instruction]]:
        """Take the smallest place ahead that holds a message, or ask for one; its number comes first."""
        self._latest += 1
        outgoing = self._outgoing[self._latest] = _Outgoing(rank, key, specs)
        if not packed(specs, 1).size:  # there is nothing to write
            return self._latest, []
        ahead = self._ahead.get((rank, key.stage), [])
        if fitting := [place for place in ahead if packed(specs, len(place.at)).size <= place.room]:
            outgoing.place = min(fitting, key=lambda place: (place.room, place.place))
            ahead.remove(outgoing.place)
            return self._latest, []
        outgoing.asked, returned = True, tuple(place.place for place in ahead)
        ahead.clear()
        return self._latest, [Say(rank, Ask(self._latest, key, specs, returned))]

    def produced(self, number: int, ended: float) -> list[Instruction]:
        """The arrays of a message are there; nothing if it has been dropped."""
        if (outgoing := self._outgoing.get(number)) is None:
            return []
        outgoing.state, outgoing.ended = "produced", ended
        return self._write(number, outgoing) if packed(outgoing.specs, 1).size else self.complete(number)

    def granted(self, rank: int, granted: Granted) -> list[Instruction]:
        """A rank gives a place; `Refused` if nobody asked for it, or it does not hold what it is for."""
        if rank in self._lost:
            return []
        number, named = granted.number, f"place {granted.place}"
        if not granted.at:
            raise Refused(rank, f"gives {named} nowhere")
        has = [out.place for out in self._outgoing.values() if out.place is not None and out.rank == rank]
        has += [place for (to, _), places in self._ahead.items() if to == rank for place in places]
        if any(place.place == granted.place for place in has):
            raise Refused(rank, f"gives {named} again")
        if number is None:
            self._ahead.setdefault((rank, granted.stage), []).append(granted)
            return []
        if (outgoing := self._mine(rank, number, f"gives {named} for")) is None:
            return []
        if not outgoing.asked or outgoing.place is not None or outgoing.key.stage != granted.stage:
            raise Refused(rank, f"gives {named} for the {outgoing.key}, which needs none there")
        if packed(outgoing.specs, len(granted.at)).size > granted.room:
            raise Refused(rank, f"gives {named} of {granted.room} bytes for the {outgoing.key}: too few")
        outgoing.place = granted
        return self._write(number, outgoing) if outgoing.state == "produced" else []

    def unwanted(self, rank: int, said: Unwanted) -> list[Instruction]:
        """A rank does not take a message; `Refused` if it was not asked for a place for it."""
        outgoing = self._mine(rank, said.number, "does not want")
        if outgoing is None or outgoing.state == "writing":  # it will hear how that ends
            return []
        if not outgoing.asked:
            raise Refused(rank, f"does not want the {outgoing.key}, for which it was not asked")
        return self._drop(said.number)

    def complete(self, number: int) -> list[Instruction]:
        """A write has ended: all is there."""
        if (outgoing := self._outgoing.pop(number, None)) is None:
            return []
        place = None if outgoing.place is None else outgoing.place.place
        said = Written(place, outgoing.key, outgoing.specs, outgoing.ended)
        return [Say(outgoing.rank, said), Release(number)]

    def reset(self, round: int) -> list[Instruction]:
        """A round is broken off: what is not being written will not be; earlier rounds go on."""
        own = self._outgoing.items()
        waiting = [number for number, out in own if out.key.round >= round and out.state != "writing"]
        return [done for number in waiting for done in self._drop(number)]

    def lost(self, rank: int) -> list[Instruction]:
        """A rank is gone: nothing is written to it any more."""
        self._lost.add(rank)
        self._ahead = {edge: places for edge, places in self._ahead.items() if edge[0] != rank}
        gone = [number for number, own in self._outgoing.items() if own.rank == rank]
        for number in gone:
            del self._outgoing[number]
        return [Release(number) for number in gone]

    def _mine(self, rank: int, number: int, what: str) -> _Outgoing | None:
        """The message of this number, None if it has ended; `Refused` if it was not offered to this rank."""
        outgoing = self._outgoing.get(number)
        if not 0 < number <= self._latest or (outgoing is not None and outgoing.rank != rank):
            raise Refused(rank, f"{what} message {number}, which was not offered to it")
        return outgoing

    def _write(self, number: int, outgoing: _Outgoing) -> list[Instruction]:
        if outgoing.place is None:
            return []
        outgoing.state = "writing"
        return [Write(number, outgoing.rank, outgoing.specs, outgoing.place)]

    def _drop(self, number: int) -> list[Instruction]:
        """Its receiver hears of it only if it was asked; a place that was there is kept for the next."""
        outgoing = self._outgoing.pop(number)
        if outgoing.asked:
            return [Say(outgoing.rank, Dropped(number)), Release(number)]
        if outgoing.place is not None:
            self._ahead.setdefault((outgoing.rank, outgoing.key.stage), []).append(outgoing.place)
        return [Release(number)]
