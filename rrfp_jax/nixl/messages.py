"""What the two ends of a one-sided transfer say, and why.

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

from typing import NamedTuple

from rrfp_jax.runtime.run.frames import Message
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


class Say(NamedTuple):
    """An instruction of a machine: send a message to a rank."""

    rank: int
    message: Ask | Written | Dropped | Unwanted


class Refused(Exception):
    """A rank said something that it may not say. The machine is as it was before."""

    def __init__(self, rank: int, sentence: str) -> None:
        super().__init__(sentence)
        self.rank = rank
