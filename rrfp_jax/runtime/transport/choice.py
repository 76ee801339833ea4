"""What carries messages between processes: sockets, or NIXL where it works."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.transport.nixl.slots import Foreseen, room_for, slot_bytes
from rrfp_jax.runtime.transport.nixl.transport import NixlTransport
from rrfp_jax.runtime.transport.nixl.trial import Edge, Meeting, meet
from rrfp_jax.runtime.transport.protocol import Devices, Specs, Transport
from rrfp_jax.runtime.transport.socket import SocketTransport

TransportName: TypeAlias = Literal["auto", "nixl", "socket"]
"""What carries messages between processes; "auto": NIXL if it works between all neighbours, else sockets."""

MOST_TOLD = 8
"""Edges; of more, only the slowest is told."""


def check_transport(name: str) -> None:
    """Refuse what is no transport.

    Raises:
        UsageError: naming it.
    """
    if name not in get_args(TransportName):
        raise UsageError(f"transport={name!r}: choose 'auto', 'nixl' or 'socket'")


def foreseen_slot_bytes(name: TransportName, largest: int) -> int:
    """What a transport will keep of memory on each device of a stage; of "auto" it is not known which one.

    Args:
        name: what is asked for.
        largest: bytes of the largest message to the stage, on each device.
    """
    return 0 if name == "socket" else slot_bytes(room_for(largest))


NOTHING = Foreseen()


def _needs_nothing(messages: Mapping[int, Collection[Specs]]) -> None:
    """Prepares nothing."""


@dataclass(frozen=True)
class Chosen:
    """What carries messages from stage to stage.

    Attributes:
        prepare: is told, by stage, of messages that were not foreseen, before there are any.
        said: which way messages between processes take, and how fast it is; empty if there is nothing to say.
        slot_bytes: what it keeps of memory on each device of a stage of this process, by stage; a stage that
            shares that with one before it has none of its own.
    """

    transport: Transport
    said: str = ""
    slot_bytes: Callable[[], Mapping[int, int]] = dict
    prepare: Callable[[Mapping[int, Collection[Specs]]], None] = _needs_nothing


def between_processes(
    name: TransportName,
    world: World,
    receivers: Sequence[Sequence[int]],
    devices: Devices,
    neighbours: Collection[int],
    foreseen: Foreseen = NOTHING,
) -> Chosen:
    """Make what carries messages between processes; all of them together.

    Args:
        name: what is asked for.
        world: the run.
        receivers: see `SocketTransport`.
        devices: of this process's stages.
        neighbours: ranks with which it exchanges messages.
        foreseen: of messages to this process.

    Raises:
        UsageError: NIXL is asked for, and cannot be used.
    """
    if name == "socket":
        return Chosen(SocketTransport(world, receivers))
    met = meet(world, devices, neighbours)
    if isinstance(met, Meeting):
        made = NixlTransport(world, receivers, devices, met.agent, met.peers, foreseen)
        said = f"messages between processes: by NIXL ({_speeds(met.edges)})"
        return Chosen(made, said, made.slot_bytes, made.prepare)
    if name == "nixl":
        raise UsageError(f"transport='nixl': {met}; take 'auto' or 'socket', or see docs/transport.md")
    return Chosen(
        SocketTransport(world, receivers), f"messages between processes: by sockets, through hosts ({met})"
    )


def _speeds(edges: Sequence[Edge]) -> str:
    if len(edges) <= MOST_TOLD:
        return "; ".join(map(str, edges))
    slowest = min(edges, key=lambda edge: edge.rate)
    return f"{len(edges)} edges, the slowest {slowest}"
