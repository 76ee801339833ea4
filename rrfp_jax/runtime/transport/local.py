"""Between the devices of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax

from rrfp_jax.runtime._jax import DeviceCopier
from rrfp_jax.runtime.run.waits import SHORTEST_PAUSE
from rrfp_jax.runtime.transport.protocol import (
    UNOBSERVED,
    Arrival,
    Devices,
    Key,
    Offers,
    TransferObserver,
    Transport,
)


class LocalTransport(Transport):
    """Between the devices of one process: a transfer is a copy, or nothing at all on one device."""

    def __init__(self, devices: Devices) -> None:
        self._devices, self._offers = devices, Offers()
        self._waiting: dict[Key, Sequence[jax.Array]] = {}  # copied; the producer is still running
        self._moving: dict[Key, Arrival] = {}  # the producer has ended
        self._here: list[Arrival] = []
        self._copier = cache(DeviceCopier)

    def begin(self, round: int, observer: TransferObserver = UNOBSERVED) -> None:
        self._offers.begin(round, observer)

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """On the producer's own device data is there once it is dispatched."""
        self._offers.add(key)
        devices = self._devices[key.stage]
        if all(a.device == devices[i % len(devices)] for i, a in enumerate(arrays)):
            self._here.append(Arrival(key, arrays, 0.0))
            self._offers.delivered(key)
        else:
            self._waiting[key] = self._copier(devices)(arrays)
        self._offers.observer.coming(key)

    def produced(self, key: Key, at: float) -> None:
        if key in self._waiting:
            self._moving[key] = Arrival(key, self._waiting.pop(key), at)

    def poll(self) -> list[Arrival]:
        arrived, self._here = self._here, []
        for key, arrival in [*self._moving.items()]:
            if all(array.is_ready() for array in arrival.arrays):  # type: ignore[attr-defined]
                del self._moving[key]
                self._offers.delivered(key)
                arrived.append(arrival)
        return arrived

    def seconds_until_poll(self) -> float | None:
        return SHORTEST_PAUSE if self._moving or self._here else None

    def finish(self, *, broken: bool = False) -> None:
        self._offers.finish()
        if broken:
            for pending in (self._waiting, self._moving, self._here):
                pending.clear()

    def close(self) -> None:
        """Nothing is to be ended."""
