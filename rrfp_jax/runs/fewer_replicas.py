"""With how many replicas a run can go on, and in how many processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.mesh.topology import Mesh


def ranks_of_replicas(mesh: Mesh, processes: int) -> Mapping[int, int]:
    """By number of replicas, of how many processes, each with as many devices as one of the whole run has.

    The numbers divide the mesh's: then replicas can share a step's microbatches whenever all of them can.

    Args:
        mesh: of the whole run.
        processes: of the whole run.
    """
    share, found = mesh.devices // processes, {}
    for replicas in (number for number in range(1, mesh.dp + 1) if mesh.dp % number == 0):
        fewer = replace(mesh, dp=replicas)
        if fewer.devices % share == 0 and _fits(fewer, ranks := fewer.devices // share):
            found[replicas] = ranks
    return found


def _fits(mesh: Mesh, processes: int) -> bool:
    try:
        mesh.groups(processes)
    except UsageError:
        return False
    return True
