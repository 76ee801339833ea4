"""Between the devices of one process."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from rrfp_jax.runtime._jax import DeviceCopier
from rrfp_jax.runtime.run.waits import SHORTEST_PAUSE
from rrfp_jax.runtime.transport.protocol import NOBODY, Arrival, Devices, Key, Transport, Witness


class LocalTransport:
    """Between the devices of one process: a pull is a copy, or nothing at all on one device."""

    def __init__(self) -> None:
        self._devices: Devices = {}
        self._witness: Witness = NOBODY
        self._offered: set[Key] = set()
        self._waiting: dict[Key, Sequence[jax.Array]] = {}  # pulled; the producer is still running
        self._moving: dict[Key, Arrival] = {}  # the producer has ended
        self._here: list[Arrival] = []
        self._copiers: dict[Sequence[jax.Device], DeviceCopier] = {}

    def begin(self, round: int, devices: Devices, witness: Witness = NOBODY) -> None:
        """See `Transport.begin`."""
        self._devices, self._witness = devices, witness
        self._offered.clear()

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """See `Transport.offer`. On the producer's own device data is there once it is dispatched."""
        if key in self._offered:
            raise ValueError(f"{key} has been offered before")
        self._offered.add(key)
        devices = self._devices[key.stage]
        if all(a.device == devices[i % len(devices)] for i, a in enumerate(arrays)):
            self._here.append(Arrival(key, arrays, 0.0))
            self._witness.delivered(key)
            self._witness.coming(key)
            return
        if devices not in self._copiers:
            self._copiers[devices] = DeviceCopier(devices)
        self._waiting[key] = self._copiers[devices](arrays)
        self._witness.coming(key)

    def produced(self, key: Key, at: float) -> None:
        """See `Transport.produced`."""
        if key in self._waiting:
            self._moving[key] = Arrival(key, self._waiting.pop(key), at)

    def poll(self) -> list[Arrival]:
        """See `Transport.poll`."""
        arrived, self._here = self._here, []
        for key, arrival in list(self._moving.items()) if self._moving else ():
            if all(array.is_ready() for array in arrival.arrays):  # type: ignore[attr-defined]
                del self._moving[key]
                self._witness.delivered(key)
                arrived.append(arrival)
        return arrived

    def patience(self) -> float | None:
        """See `Transport.patience`."""
        return SHORTEST_PAUSE if self._moving or self._here else None

    def end(self) -> None:
        """See `Transport.end`."""
        self._witness = NOBODY

    def reset(self) -> None:
        """See `Transport.reset`."""
        self._witness = NOBODY
        for pending in (self._offered, self._waiting, self._moving, self._here):
            pending.clear()

    def close(self) -> None:
        """See `Transport.close`: there is nothing to end."""


class RoutedTransport:
    """Sends to this process's own stages by one transport, to all others by another."""

    def __init__(self, local: Transport, remote: Transport) -> None:
        self._local, self._remote = local, remote
        self._devices: Devices = {}

    def begin(self, round: int, devices: Devices, witness: Witness = NOBODY) -> None:
        """See `Transport.begin`."""
        self._devices = devices
        self._local.begin(round, devices, witness)
        self._remote.begin(round, devices, witness)

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """See `Transport.offer`."""
        self._route(key).offer(key, arrays)

    def produced(self, key: Key, at: float) -> None:
        """See `Transport.produced`."""
        self._route(key).produced(key, at)

    def poll(self) -> list[Arrival]:
        """See `Transport.poll`."""
        return self._local.poll() + self._remote.poll()

    def patience(self) -> float | None:
        """See `Transport.patience`."""
        known = [t for t in (self._local.patience(), self._remote.patience()) if t is not None]
        return min(known, default=None)

    def end(self) -> None:
        """See `Transport.end`."""
        self._local.end()
        self._remote.end()

    def reset(self) -> None:
        """See `Transport.reset`."""
        self._local.reset()
        self._remote.reset()

    def close(self) -> None:
        """See `Transport.close`."""
        self._local.close()
        self._remote.close()

    def _route(self, key: Key) -> Transport:
        return self._local if key.stage in self._devices else self._remote
