"""Compiled programs in serialised form, from which they are loaded on devices of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import serialize_executable

from rrfp_jax.runtime._jax import load_for


@dataclass(frozen=True)
class Serialized:
    """A program, to be loaded again. Loading runs code that is in it.

    Attributes:
        content: what JAX gives.
        made_for: ids of the devices that it was compiled for, in the order of its mesh.
    """

    content: Any
    made_for: tuple[int, ...]

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, devices: Sequence[jax.Device]) -> Serialized:
        """A program that was compiled for these devices, by this process and not from JAX's cache."""
        return cls(serialize_executable.serialize(compiled), ids_of(devices))

    def loaded(self, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
        """The program, ready to run on as many devices; they need not be those that it was compiled for.

        Raises:
            Exception: of any kind, if JAX cannot load it, or not for these devices.
        """
        if self.made_for == ids_of(devices):
            load = serialize_executable.deserialize_and_load
            return load(*self.content, execution_devices=devices)  # type: ignore[no-any-return, misc]
        found = load_for(self.content, self.made_for, devices)
        runs_on = found.runtime_executable().local_devices()  # type: ignore[union-attr]
        if list(runs_on) != list(devices):
            raise RuntimeError(f"it would run on {runs_on}, not on {list(devices)}")
        return found


def ids_of(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """What tells devices apart in all processes of a run."""
    return tuple(device.id for device in devices)
