"""What every transport does: it moves a task's output to the stage that waits for it.

The sender offers an output at dispatch, before it exists, so the transfer is set up early and starts when it
can. `poll` gives what has arrived, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from rrfp_jax.core.tasks import Input

Specs: TypeAlias = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype's name of each array of a message."""

Devices: TypeAlias = Mapping[int, Sequence[jax.Device]]
"""By stage of this process (its stage replica, see `Layout`), its devices here."""


class Key(NamedTuple):
    """Names one message: which input it is, of which stage, in which round.

    A round is one run of tasks, counted alike by all processes: a step's training, or its evaluation.
    """

    round: int
    stage: int
    input: Input

    def __str__(self) -> str:
        return f"input of {self.input} on stage {self.stage}"


def specs_of(arrays: Sequence[jax.Array]) -> Specs:
    """Of arrays that are to be sent."""
    return tuple((tuple(array.shape), _name(array.dtype)) for array in arrays)


@lru_cache(maxsize=128)
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy puts it together at every look


class Arrival(NamedTuple):
    """A transfer that is complete and without error.

    Attributes:
        produced: when the program that computed the arrays ended (s, on this process's `perf_counter`).
        late: how long it was held by delays that were injected (s).
    """

    key: Key
    arrays: Sequence[jax.Array]
    produced: float
    late: float = 0.0


class Witness(Protocol):
    """Who is told when messages take memory here, and when they no longer do."""

    def coming(self, key: Key) -> None:
        """The memory of an input of this process is taken: it is being pulled, or has been handed over."""

    def delivered(self, key: Key) -> None:
        """What was offered here is at its destination and no longer kept here."""


class Nobody:
    """A witness that does not care."""

    def coming(self, key: Key) -> None:
        """See `Witness.coming`."""

    def delivered(self, key: Key) -> None:
        """See `Witness.delivered`."""


NOBODY = Nobody()


class Transport(Protocol):
    """What the driver needs of a transport. Keys are used once."""

    def begin(self, round: int, devices: Devices, witness: Witness = NOBODY) -> None:
        """A round begins whose messages to this process go to the devices of its stages."""

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """Make arrays, possibly still being computed, available under a key.

        Each is on one device. They go to the devices of the receiving stage in turn.

        They must neither be donated nor deleted before they are delivered.

        Raises:
            ValueError: the key has been offered before in this round.
        """

    def produced(self, key: Key, at: float) -> None:
        """The program that computes the offered arrays ended at this time (s): the transfer may complete."""

    def poll(self) -> list[Arrival]:
        """The transfers to this process that have completed since the last call."""

    def patience(self) -> float | None:
        """How long one may sleep (s) before `poll` is worth calling; None: until something else happens."""

    def end(self) -> None:
        """The round has ended here: all has arrived. Its witness is told no more, and let go."""

    def reset(self) -> None:
        """Forget everything that was offered or pulled, after a round that was broken off."""

    def close(self) -> None:
        """No round follows; returns at once, and does nothing the second time."""
