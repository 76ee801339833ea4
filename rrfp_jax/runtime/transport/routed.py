"""For a process with several stages: some neighbours are in this process, some in others."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from rrfp_jax.runtime.transport.protocol import NOBODY, Arrival, Devices, Key, Transport, Witness


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
