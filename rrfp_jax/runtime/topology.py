"""The mesh a user asks for, and the devices that its stages get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime._jax import provide_cpu_devices


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many pipeline stages there are, and where they run.

    Attributes:
        pp: number of pipeline stages, one device each.
        share_devices: let several stages run on one device when there are fewer devices than stages; they
            then take turns, so this is for trying things out, not for speed.

    Raises:
        UsageError: fewer than one stage.
    """

    pp: int = 1
    share_devices: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pp, int) or self.pp < 1:
            raise UsageError(
                f"Mesh(pp={self.pp!r}): a pipeline needs a whole number of stages, at least one stage"
            )

    def stage_devices(self) -> list[jax.Device]:
        """One device per stage. Without accelerators, asks JAX for that many virtual CPU devices.

        Raises:
            UsageError: fewer devices than stages.
        """
        if not self.share_devices:
            provide_cpu_devices(self.pp)
        devices: Sequence[jax.Device] = jax.local_devices()
        if len(devices) < self.pp and not self.share_devices:
            cause = (
                "JAX was already in use when the mesh was made, so no virtual CPU devices could be added: "
                f"call jax.config.update('jax_num_cpu_devices', {self.pp}) first thing in the program "
                "(in a notebook: restart the kernel)"
                if devices[0].platform == "cpu"
                else "use fewer stages"
            )
            raise UsageError(
                f"Mesh(pp={self.pp}) needs {self.pp} devices and this process has {len(devices)} "
                f"({devices[0].platform}): {cause}, or let stages share a device: "
                f"Mesh(pp={self.pp}, share_devices=True)"
            )
        return [devices[stage % len(devices)] for stage in range(self.pp)]
