"""What every transport does: it moves a task's output to the stage that waits for it.

The sender offers an output at dispatch, before the output exists, so the transfer is set up early and starts
as soon as it can. `poll` gives what has arrived, in any order.

`Transport` is what a step needs of a transport, `BetweenProcesses` what the start of a run needs besides.
`Offers` and `Rounds` keep what every transport must remember: each message is offered once, it is delivered
when its last receiver has it, and a message for a later round waits until that round begins. `LocalTransport`
is the simplest one, between the devices of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax

from rrfp_jax.core.step_rules import dtype_name
from rrfp_jax.core.tasks import Input
from rrfp_jax.runtime._jax import DeviceCopier
from rrfp_jax.runtime.run.waits import LONGEST_SLEEP_SECONDS, SHORTEST_PAUSE, pause
from rrfp_jax.runtime.run.world import World

Specs: TypeAlias = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype's name of each array of a message."""

Messages: TypeAlias = Mapping[int, Collection[Specs]]
"""The kinds of messages that stages of this process get, by stage replica (see `Layout`)."""

Shards: TypeAlias = Sequence[jax.Array]
"""What this process's devices have of an array; see `StageMesh.shards`."""

Place: TypeAlias = tuple[int, int]
"""A receiving stage replica, and a number that tells the arrays sent to it apart."""

Devices: TypeAlias = Mapping[int, Sequence[jax.Device]]
"""This process's devices of each of its stages, by stage replica."""

Kept: TypeAlias = Mapping[int, int]
"""Bytes of each device that a transport keeps for messages, by stage replica."""

Program: TypeAlias = Callable[[jax.Array], Any]

OneArrayCompiler: TypeAlias = Callable[[jax.Device, Callable[..., Any], jax.ShapeDtypeStruct], Program]
"""Compiles a function of one array of this shape and dtype for a device."""


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
    """Shapes and dtypes of arrays to be sent."""
    return tuple((tuple(array.shape), dtype_name(array.dtype)) for array in arrays)


class Arrival(NamedTuple):
    """A transfer that is complete and without error.

    Attributes:
        produced: when the program that computed the arrays ended (s, on this process's `perf_counter`).
        late: how long the arrival was held by injected delays (s).
    """

    key: Key
    arrays: Sequence[jax.Array]
    produced: float
    late: float = 0.0


class TransferObserver:
    """Is told when messages take memory in this process, and when they no longer do; this one ignores it."""

    def coming(self, key: Key) -> None:
        """The memory of an input of this process is taken: it is being pulled, or has been handed over."""

    def delivered(self, key: Key) -> None:
        """A message offered here is at its destination and no longer kept here."""


UNOBSERVED = TransferObserver()


class Transport(Protocol):
    """What the driver needs of a transport. Keys are used once."""

    def reserve(self, messages: Messages) -> Kept:
        """Prepare for such messages to stages of this process; may be called again, for further ones.

        Returns:
            Bytes of each device that the transport keeps for messages by now, by stage; stages that share
            memory count it once.
        """
        return {}

    def begin(self, round: int, observer: TransferObserver = UNOBSERVED) -> None:
        """Begin a round."""

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """Make arrays, possibly still being computed, available under a key.

        Each is on one device. They go to the devices of the receiving stage in turn, and must neither be
        donated nor deleted before they are delivered.

        Raises:
            ValueError: the key has been offered before in this round.
        """

    def produced(self, key: Key, at: float) -> None:
        """The program that computes the offered arrays ended at this time (s): the transfer may complete."""

    def poll(self) -> list[Arrival]:
        """The transfers to this process that have completed since the last call."""

    def seconds_until_poll(self) -> float | None:
        """How long one may sleep before `poll` is worth calling; None: until something else happens."""

    def finish(self, *, broken: bool = False) -> None:
        """End the round and let its observer go; of a broken round, forget all that is still on its way."""

    def close(self) -> None:
        """No round follows; returns at once, and does nothing the second time."""


def soonest_poll(transports: Iterable[Transport]) -> float:
    """How long one may sleep (s) before `poll` of any is worth calling, at most `LONGEST_SLEEP_SECONDS`."""
    soonest = LONGEST_SLEEP_SECONDS
    for transport in transports:
        if (seconds := transport.seconds_until_poll()) is not None:
            soonest = min(soonest, seconds)
    return soonest


@contextmanager
def copies_allowed() -> Iterator[None]:
    """Inside, a user's guards let through what is meant: copies between stages, and to the host."""
    with jax.transfer_guard_device_to_device("allow"), jax.transfer_guard_device_to_host("allow"):
        yield


def by_jit(device: jax.Device, function: Callable[..., Any], spec: jax.ShapeDtypeStruct) -> Program:
    """Compiles when the program is called first, and keeps nothing."""
    return jax.jit(function)


class Endpoints(NamedTuple):
    """What a transport between processes is made for."""

    world: World
    receivers: Sequence[Sequence[int]]  # by stage replica the ranks to which this process sends a copy each
    devices: Devices
    neighbours: Collection[int]  # ranks with which this process exchanges messages
    compiler: OneArrayCompiler = by_jit  # of programs that copy messages, where any are needed


class Unusable(Exception):
    """A transport cannot be used here; says why, in the same words on all ranks."""


class Connected(NamedTuple):
    """A transport between processes; how messages go by it, and what was measured, for the user."""

    transport: Transport
    way: str
    details: str = ""


class BetweenProcesses(Transport, Protocol):
    """A transport between processes, which `choice` can make."""

    @classmethod
    def connect(cls, ends: Endpoints) -> Connected:
        """Make it; called by all processes together.

        Raises:
            Unusable: it does not work between these processes.
        """
        raise NotImplementedError

    @staticmethod
    def reserved_bytes(largest: int) -> int:
        """Bytes that `reserve` will keep of each device of a stage whose largest message has so many."""
        return 0

    @staticmethod
    def compile_ahead(devices: Devices, compiler: OneArrayCompiler, first: Messages, later: Messages) -> Kept:
        """Compile what `reserve` would, for messages foreseen at the start and later ones.

        Args:
            devices: by stage, those of one process; they may be absent.

        Returns:
            Bytes of each device that `reserve` would keep, by stage.
        """
        return {}


class Offers:
    """What a process has offered in a round, and which receivers do not have it yet."""

    def __init__(self) -> None:
        self.observer = UNOBSERVED  # between rounds
        self._round = 0
        self._offered: set[Key] = set()
        self._receivers: dict[Key, int] = {}  # which do not have it yet, where that is not one

    def begin(self, round: int, observer: TransferObserver) -> None:
        """Begin a round."""
        self._round, self.observer = round, observer
        self._offered.clear()

    def add(self, key: Key, receivers: int = 1) -> None:
        """Note an offer to so many receivers; to none, it is delivered at once.

        Raises:
            ValueError: the key has been offered before in this round.
        """
        if key in self._offered:
            raise ValueError(f"{key} has been offered before")
        self._offered.add(key)
        if receivers > 1:
            self._receivers[key] = receivers
        elif not receivers:  # its stage gets it from other ranks
            self.observer.delivered(key)

    def delivered(self, key: Key) -> None:
        """One receiver has a message, or will never take it."""
        if left := self._receivers.pop(key, 1) - 1:
            self._receivers[key] = left
        elif key.round == self._round:
            self.observer.delivered(key)

    def finish(self) -> None:
        """End the round."""
        self.observer = UNOBSERVED


class Rounds:
    """Which messages a process takes: those of its round. A later round's wait, by a sender who is ahead."""

    def __init__(self) -> None:
        self.number, self.over = 0, True  # broken off, or not begun
        self.early: list[Any] = []  # messages for later rounds

    def begin(self, number: int) -> list[Any]:
        """Begin a round; gives what came early, to be looked at again."""
        self.number, self.over = number, False
        early, self.early = self.early, []
        return early

    def is_over(self, key: Key) -> bool:
        """Whether the round of a message is over, so that nobody takes it any more."""
        return key.round < self.number or (self.over and key.round == self.number)

    def takes(self, key: Key, message: Any) -> bool:
        """Whether a message is of this round; one for a later round is kept."""
        if key.round > self.number:
            self.early.append(message)
            return False
        return not self.is_over(key)


class LocalTransport(Transport):
    """Between the devices of one process: a transfer is a copy, or nothing at all on one device.

    With `waits`, data arrives on one device, too, no sooner than it is produced.
    """

    def __init__(self, devices: Devices, waits: bool = False) -> None:
        self._devices, self._waits, self._offers = devices, waits, Offers()
        self._waiting: dict[Key, Sequence[jax.Array]] = {}  # the producer is still running
        self._moving: dict[Key, Arrival] = {}  # the producer has ended
        self._here: list[Arrival] = []
        self._copier = cache(DeviceCopier)

    def begin(self, round: int, observer: TransferObserver = UNOBSERVED) -> None:
        self._offers.begin(round, observer)

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """On the producer's own device data is there once it is dispatched."""
        self._offers.add(key)
        devices = self._devices[key.stage]
        # The sender's arrays lie on its devices in turn, or all on its first one: the first few tell for all.
        here = all(array.devices() == {device} for array, device in zip(arrays, devices, strict=False))
        if here and not self._waits:
            self._here.append(Arrival(key, arrays, 0.0))
            self._offers.delivered(key)
        else:
            self._waiting[key] = arrays if here else self._copier(devices)(arrays)
        self._offers.observer.coming(key)

    def coming(self, key: Key) -> Sequence[jax.Array] | None:
        """The arrays of an offer, which are yet to be computed; None if it has arrived."""
        return self._waiting.get(key)

    def produced(self, key: Key, at: float) -> None:
        if key in self._waiting:
            self._moving[key] = Arrival(key, self._waiting.pop(key), at)

    def poll(self) -> list[Arrival]:
        arrived, self._here = self._here, []
        for key, arrival in [*self._moving.items()]:
            # An array that was foreseen may have been given to the program that needs it.
            if all(a.is_deleted() or a.is_ready() for a in arrival.arrays):  # type: ignore[attr-defined]
                del self._moving[key]
                self._offers.delivered(key)
                arrived.append(arrival)
        return arrived

    def seconds_until_poll(self) -> float | None:
        if self._here or not self._moving:
            return SHORTEST_PAUSE if self._here else None
        return pause(perf_counter() - max(arrival.produced for arrival in self._moving.values()))

    def finish(self, *, broken: bool = False) -> None:
        self._offers.finish()
        if broken:
            for pending in (self._waiting, self._moving, self._here):
                pending.clear()

    def close(self) -> None:
        """Nothing is to be ended."""
