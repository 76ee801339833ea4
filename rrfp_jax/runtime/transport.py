"""Moving a task's output to the stage that waits for it.

The sender offers at dispatch, before the data exists; the receiver pulls what is offered, so that the
transfer is set up early and starts when it can. `poll` gives what has arrived, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax

from rrfp_jax.core.tasks import Task
from rrfp_jax.runtime._jax import DeviceCopier


class Key(NamedTuple):
    """Names one message: the task that it makes ready, on which stage, in which step."""

    step: int
    stage: int
    task: Task

    def __str__(self) -> str:
        return f"input of {self.task} on stage {self.stage} in step {self.step}"


class Transport(Protocol):
    """What the driver needs of a transport. Keys are used once."""

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """Make arrays, possibly still being computed, available under a key."""

    def pull(self, key: Key, device: jax.Device) -> None:
        """Begin to fetch what was offered to `device`; returns at once."""

    def produced(self, key: Key) -> None:
        """The program that computes the offered arrays has ended: the transfer may now complete."""

    def poll(self) -> list[tuple[Key, Sequence[jax.Array]]]:
        """The pulls that have completed since the last call."""

    def busy(self) -> bool:
        """Whether a transfer whose data exists is on its way, so that `poll` is worth calling soon."""

    def reset(self) -> None:
        """Forget everything that was offered or pulled, after a step that was broken off."""


class LocalTransport:
    """Between the devices of one process: a pull is a copy, or nothing at all on one device."""

    def __init__(self) -> None:
        self._offered: dict[Key, Sequence[jax.Array]] = {}
        self._waiting: dict[Key, Sequence[jax.Array]] = {}  # pulled; the producer is still running
        self._moving: dict[Key, Sequence[jax.Array]] = {}  # the producer has ended
        self._here: list[tuple[Key, Sequence[jax.Array]]] = []
        self._copiers: dict[jax.Device, DeviceCopier] = {}

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """See `Transport.offer`."""
        self._offered[key] = arrays

    def pull(self, key: Key, device: jax.Device) -> None:
        """See `Transport.pull`. On the producer's own device data is there once it is dispatched."""
        arrays = self._offered.pop(key)
        if all(array.device == device for array in arrays):
            self._here.append((key, arrays))
        else:
            if device not in self._copiers:
                self._copiers[device] = DeviceCopier(device)
            self._waiting[key] = self._copiers[device](arrays)

    def produced(self, key: Key) -> None:
        """See `Transport.produced`."""
        if key in self._waiting:
            self._moving[key] = self._waiting.pop(key)

    def poll(self) -> list[tuple[Key, Sequence[jax.Array]]]:
        """See `Transport.poll`."""
        arrived, self._here = self._here, []
        if not self._moving:
            return arrived
        for key, arrays in list(self._moving.items()):
            if all(array.is_ready() for array in arrays):  # type: ignore[attr-defined]
                del self._moving[key]
                arrived.append((key, arrays))
        return arrived

    def busy(self) -> bool:
        """See `Transport.busy`."""
        return bool(self._moving or self._here)

    def reset(self) -> None:
        """See `Transport.reset`."""
        for pending in (self._offered, self._waiting, self._moving, self._here):
            pending.clear()
