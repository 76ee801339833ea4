"""All checks of `rrfp-doctor`, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rrfp_jax.commands.preflight import devices, machine, network, placement
from rrfp_jax.commands.preflight.findings import Finding
from rrfp_jax.commands.preflight.surroundings import Surroundings

CHECKS: Sequence[Callable[[Surroundings], Finding | None]] = (
    placement.check_place,
    placement.check_other_launchers,
    devices.check_versions,
    devices.check_gpus,
    devices.check_shares,
    devices.check_binding,
    network.check_address,
    network.check_port,
    network.check_exposure,
    network.check_proxy,
    network.check_peers,
    network.check_clock,
    placement.check_groups,
    machine.check_open_files,
    machine.check_shm,
    machine.check_nixl,
    machine.check_folder,
)
"""Each answers, or None where there is nothing to check."""


def examine(found: Surroundings) -> list[Finding]:
    """What all checks that apply say."""
    answers = (check(found) for check in CHECKS)
    return [answer for answer in answers if answer is not None]
