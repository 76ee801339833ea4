"""Between processes: offers and their completion by the mailbox, data by JAX's transfer server.

An offer names arrays in the sender's transfer server. The server keeps them alive until they are pulled, so
the sender drops its own reference at once. The receiver pulls as soon as it hears of the offer, usually
before the data exists. It looks for the arrival only once the sender has said that the data exists.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run.mailbox import Message
from rrfp_jax.runtime.run.place import own_address
from rrfp_jax.runtime.run.waits import pause
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.transport.protocol import (
    UNOBSERVED,
    Arrival,
    BetweenProcesses,
    Connected,
    Endpoints,
    Key,
    Offers,
    Rounds,
    Specs,
    TransferObserver,
    specs_of,
)


class Offer(Message, frozen=True):
    """An input can be pulled under this number; its arrays have these shapes and dtypes."""

    uuid: int
    key: Key
    specs: Specs


class Done(Message, frozen=True):
    """The program that computes an input ended at this time (s, on rank 0's clock)."""

    key: Key
    ended: float


class Delivered(Message, frozen=True):
    """What was offered under this number has been pulled."""

    uuid: int


class _Pull(NamedTuple):
    rank: int
    uuid: int
    arrays: Sequence[jax.Array]


class SocketTransport(BetweenProcesses):
    """Offers to and pulls from the other processes of a run. Made by all of them together.

    Raises:
        TrainingError: the transfer server cannot be started.
    """

    def __init__(self, ends: Endpoints) -> None:
        world = ends.world
        assert world.mailbox is not None
        self._world, self._mailbox, self._receivers = world, world.mailbox, ends.receivers
        self._devices = {stage: (*own,) for stage, own in ends.devices.items()}
        self._offers, self._rounds = Offers(), Rounds()
        self._held: dict[int, Key] = {}  # by uuid what has not been delivered
        self._pulls: dict[Key, _Pull] = {}  # the producer is still running
        self._moving: dict[Key, tuple[_Pull, float, float]] = {}  # pull; ended, heard of that (s)
        # Other transports of this run have other numbers; a process that is ahead may soon send to this one.
        self._number = world.next_round()
        self._mailbox.on(Offer, self._on_offer, self._number)
        self._mailbox.on(Done, self._on_done, self._number)
        self._mailbox.on(Delivered, self._on_delivered, self._number)
        self._server = _transfer_server(own_address())
        addresses = world.gather("addresses of the transfer servers", self._server.address(), START_SECONDS)
        self._connections = {r: self._server.connect(addresses[r]) for r in self._mailbox.ranks}

    @classmethod
    def connect(cls, ends: Endpoints) -> Connected:
        return Connected(cls(ends), "by sockets, through hosts")

    def begin(self, round: int, observer: TransferObserver = UNOBSERVED) -> None:
        self._offers.begin(round, observer)
        for handler, rank, message in self._rounds.begin(round):
            handler(rank, message)

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        receivers = self._receivers[key.stage]
        self._offers.add(key, len(receivers))
        specs = specs_of(arrays)
        full = [array for array in arrays if array.size]
        for rank in receivers:
            uuid = secrets.randbits(63)  # whoever could guess it could pull the arrays
            self._held[uuid] = key
            if full:
                self._server.await_pull(uuid, full)
            self._mailbox.post(rank, Offer(uuid, key, specs), self._number)

    def produced(self, key: Key, at: float) -> None:
        for rank in self._receivers[key.stage]:
            self._mailbox.post(rank, Done(key, at + self._world.clock[0]), self._number)

    def poll(self) -> list[Arrival]:
        """See `Transport.poll`.

        Raises:
            PeerLost: a process of the run is gone.
            TrainingError: a transfer failed.
        """
        self._mailbox.pump()
        self._mailbox.membership.require_all()
        arrived = []
        for key, (pull, ended, _) in [*self._moving.items()]:
            if all(array.is_ready() for array in pull.arrays):  # type: ignore[attr-defined]
                self._verify(key, pull)
                del self._moving[key]
                self._mailbox.post(pull.rank, Delivered(pull.uuid), self._number)
                arrived.append(Arrival(key, pull.arrays, ended))
        return arrived

    def seconds_until_poll(self) -> float | None:
        if not self._moving:
            return None
        return pause(perf_counter() - max(heard for _, _, heard in self._moving.values()))

    def finish(self, *, broken: bool = False) -> None:
        """What other processes were offered stays with the server until they pull."""
        self._offers.finish()
        if broken:
            self._rounds.over = True
            self._pulls.clear()
            self._moving.clear()

    def close(self) -> None:
        """What still comes, as of a process that is a little behind, is dropped."""
        self._mailbox.off(self._number)

    def _on_offer(self, rank: int, offer: Offer) -> None:
        key = offer.key
        if not self._rounds.takes(key, (self._on_offer, rank, offer)):
            return
        if key in self._pulls or key in self._moving:
            raise TrainingError(f"the input of {key.input} was offered twice by {self._world.describe(rank)}")
        self._pulls[key] = _Pull(rank, offer.uuid, self._pull(rank, offer))
        self._offers.observer.coming(key)

    def _pull(self, rank: int, offer: Offer) -> Sequence[jax.Array]:
        """Begin a transfer. Arrays without elements are made here: a pull of such would never end."""
        shapes = _shapes(offer.specs, self._devices[offer.key.stage])
        full = [shape for shape in shapes if shape.size]
        pulled = iter(self._connections[rank].pull(offer.uuid, full) if full else [])
        return [
            next(pulled) if shape.size else jax.device_put(np.empty(shape.shape, shape.dtype), shape.sharding)
            for shape in shapes
        ]

    def _on_done(self, rank: int, done: Done) -> None:
        key = done.key
        if self._rounds.takes(key, (self._on_done, rank, done)):
            self._moving[key] = self._pulls.pop(key), done.ended - self._world.clock[0], perf_counter()

    def _on_delivered(self, rank: int, delivered: Delivered) -> None:
        self._offers.delivered(self._held.pop(delivered.uuid))

    def _verify(self, key: Key, pull: _Pull) -> None:
        """A transfer that failed is ready, too, and raises only when read."""
        try:
            for array in pull.arrays:
                array.block_until_ready()
        except Exception as error:
            self._mailbox.hear_of_losses()
            of = f"the input of {key.input} from {self._world.describe(pull.rank)}"
            raise TrainingError(f"the transfer of {of} failed: {error}") from None


@lru_cache(maxsize=128)
def _shapes(specs: Specs, devices: Sequence[jax.Device]) -> list[jax.ShapeDtypeStruct]:
    """Where the arrays of a message go, on these devices in turn; made once, as that takes long."""
    placed = zip(specs, itertools.cycle(map(SingleDeviceSharding, devices)), strict=False)
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=to) for (shape, dtype), to in placed]


def _transfer_server(host: str) -> Any:
    """JAX's, listening on an IP address of this machine, and no wider.

    If it cannot read an address, such as one with a scope (fe80::1%eth0), it listens on all there are.
    """
    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    try:
        server = transfer.start_transfer_server(jax.local_devices()[0].client, address, [address])
    except RuntimeError as error:
        raise TrainingError(
            f"the transfer server cannot listen on {address}: {error}; RRFP_BIND names another address"
        ) from None
    found = server.address().rpartition(":")[0].strip("[]")
    if ip_address(found) != ip_address(host):
        raise TrainingError(
            f"the transfer server listens on {found} instead of {host}: let RRFP_BIND name an IP address of "
            f"this machine without a scope"
        )
    return server
