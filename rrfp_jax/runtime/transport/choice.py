"""What carries messages between processes: the first transport of a table that works."""

from __future__ import annotations

from importlib import import_module
from typing import Literal, TypeAlias, cast

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.transport.protocol import (
    BetweenProcesses,
    Connected,
    Devices,
    Endpoints,
    Messages,
    OneArrayCompiler,
    Unusable,
)

TransportName: TypeAlias = Literal["auto", "nixl", "socket"]
"""What carries messages between processes; "auto": NIXL if it works between all neighbours, else sockets."""

TRANSPORTS = {
    "nixl": "rrfp_jax.nixl.transport:NixlTransport",
    "socket": "rrfp_jax.runtime.transport.socket:SocketTransport",
}
"""Module and class of each, the best first; a module is loaded only where its transport may be used."""


def between_processes(name: TransportName, ends: Endpoints) -> Connected:
    """Make what carries messages between processes; called by all of them together.

    Raises:
        UsageError: a transport is asked for that cannot be used.
    """
    reasons: list[str] = []
    for one in _candidates(name):
        try:
            made = one.connect(ends)
        except Unusable as unusable:
            reasons.append(str(unusable))
        else:
            return made._replace(details="; ".join(filter(None, [made.details, *reasons])))
    raise UsageError(f"transport={name!r}: {reasons[0]}; take 'auto' or 'socket', or see docs/transport.md")


def reserved_bytes(name: TransportName, largest: int) -> int:
    """Bytes of each device of a stage that a transport will keep at most for messages of so many bytes."""
    return max(one.reserved_bytes(largest) for one in _candidates(name))


def compile_ahead(
    name: TransportName, devices: Devices, compiler: OneArrayCompiler, first: Messages, later: Messages
) -> dict[int, int]:
    """See `BetweenProcesses.compile_ahead`; the most of what may be chosen."""
    found: dict[int, int] = {}
    for one in _candidates(name):
        for stage, kept in one.compile_ahead(devices, compiler, first, later).items():
            found[stage] = max(kept, found.get(stage, 0))
    return found


def _candidates(name: TransportName) -> list[type[BetweenProcesses]]:
    names = list(TRANSPORTS) if name == "auto" else [name]
    places = [TRANSPORTS[one].split(":") for one in names]
    return [cast(type[BetweenProcesses], getattr(import_module(module), of)) for module, of in places]
