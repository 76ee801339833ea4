"""The sender's end: it asks for places, and writes where it may. Theory of operation: `messages.py`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from rrfp_jax.nixl.memory import packed
from rrfp_jax.nixl.messages import Ask, Dropped, Granted, Refused, Say, Unwanted, Written
from rrfp_jax.runtime.transport.protocol import Key, Specs


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

    @property
    def idle(self) -> bool:
        """Whether every message has ended."""
        return not self._outgoing

    def offer(self, rank: int, key: Key, specs: Specs) -> tuple[int, list[Instruction]]:
        """Offer a message: take the smallest place ahead that holds it, or ask for one.

        Returns:
            The message's number, by which `produced` and all instructions name it, and instructions.
        """
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
        if number not in self._outgoing:
            return []
        outgoing = self._outgoing[number]
        outgoing.state, outgoing.ended = "produced", ended
        if not packed(outgoing.specs, 1).size:
            return self.complete(number)
        return self._write(number, outgoing)

    def granted(self, rank: int, granted: Granted) -> list[Instruction]:
        """A rank gives a place; `Refused` if nobody asked for it, or it does not hold what it is for."""
        if rank in self._lost:
            return []
        if not granted.at:
            raise Refused(rank, f"gives place {granted.place} nowhere")
        number, named = granted.number, f"place {granted.place}"
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
        outgoing = self._outgoing.pop(number, None)
        if outgoing is None:
            return []
        place = None if outgoing.place is None else outgoing.place.place
        said = Written(place, outgoing.key, outgoing.specs, outgoing.ended)
        return [Say(outgoing.rank, said), Release(number)]

    def reset(self, round: int) -> list[Instruction]:
        """A round is broken off: what is not being written will not be; earlier rounds go on."""
        waiting = [
            n for n, own in self._outgoing.items() if own.key.round >= round and own.state != "writing"
        ]
        return [done for number in waiting for done in self._drop(number)]

    def lost(self, rank: int) -> list[Instruction]:
        """A rank is gone: nothing is written to it any more."""
        self._lost.add(rank)
        gone = [number for number, own in self._outgoing.items() if own.rank == rank]
        for number in gone:
            del self._outgoing[number]
        for edge in [edge for edge in self._ahead if edge[0] == rank]:
            del self._ahead[edge]
        return [Release(number) for number in gone]

    def key(self) -> Hashable:
        """All that the sender remembers, to compare states."""
        return (
            (self._latest, tuple(sorted(self._lost))),
            tuple((number, *vars(own).values()) for number, own in sorted(self._outgoing.items())),
            tuple((edge, tuple(places)) for edge, places in sorted(self._ahead.items())),
        )

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
