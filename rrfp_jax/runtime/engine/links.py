"""What connects this process to the others: messages between stages, agreement within one, their driver."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from rrfp_jax.core.tasks import Placement
from rrfp_jax.printing import say
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.engine.settings import Execution
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.run.consensus import Agreement, Terms
from rrfp_jax.runtime.stages.leaves import Exchange
from rrfp_jax.runtime.transport.choice import NOTHING, Chosen, TransportName, between_processes
from rrfp_jax.runtime.transport.exchange import exchange
from rrfp_jax.runtime.transport.local import LocalTransport, RoutedTransport
from rrfp_jax.runtime.transport.nixl.slots import Foreseen
from rrfp_jax.runtime.transport.protocol import Specs, Transport


@dataclass(frozen=True)
class Links:
    """What connects this process's stages to all others.

    Attributes:
        driver: runs their steps.
        exchange: sends single arrays outside of steps.
        slot_bytes, prepare: see `Chosen`.
    """

    driver: Driver
    exchange: Exchange
    slot_bytes: Callable[[], Mapping[int, int]]
    prepare: Callable[[Mapping[int, Collection[Specs]]], None]


def connect(
    layout: Layout,
    placement: Placement,
    execution: Execution,
    foreseen: Foreseen,
    tied: Collection[tuple[int, int]],
) -> Links:
    """Connect this process to the others, all of them together; `foreseen` and `tied` as in `links_of`."""
    chosen = told_links_of(layout, placement, execution.transport, foreseen, tied)
    driver = driver_of(layout, chosen.transport, placement, execution)
    sending = exchange_of(layout, chosen.transport, execution.stall_seconds)
    return Links(driver, sending, chosen.slot_bytes, chosen.prepare)


def agreement_of(layout: Layout, terms: Terms) -> Agreement | None:
    """What the processes that share a stage agree by, made by all together; None if none share one."""
    shared = max(map(len, layout.groups)) > 1
    return Agreement(layout.world, layout.groups, terms) if shared else None


def links_of(
    layout: Layout,
    placement: Placement,
    name: TransportName = "socket",
    foreseen: Foreseen = NOTHING,
    tied: Collection[tuple[int, int]] = (),
) -> Chosen:
    """What carries outputs from virtual stage to virtual stage; all processes make it together.

    Args:
        layout: where the stages are.
        placement: of virtual stages.
        name: of what is used between processes.
        foreseen: of messages to each stage replica of this process.
        tied: stage replicas that exchange tied values, by twos.

    Raises:
        UsageError: NIXL is asked for, and cannot be used.
    """
    if layout.world.size == 1:
        return Chosen(LocalTransport())
    near = neighbours(layout, placement, tied)
    chosen = between_processes(name, layout.world, layout.receivers, layout.devices, near, foreseen)
    apart = len(layout.stage_meshes) == 1 and placement.chunks == 1  # nothing stays in this process
    if apart:
        return chosen
    return replace(chosen, transport=RoutedTransport(LocalTransport(), chosen.transport))


def told_links_of(
    layout: Layout,
    placement: Placement,
    name: TransportName,
    foreseen: Foreseen,
    tied: Collection[tuple[int, int]] = (),
) -> Chosen:
    """As `links_of`; rank 0 prints which way messages between processes take, unless it was asked for."""
    chosen = links_of(layout, placement, name, foreseen, tied)
    if chosen.said and layout.world.rank == 0:
        say(chosen.said)
    return chosen


def transport_of(layout: Layout, placement: Placement, name: TransportName = "socket") -> Transport:
    """The transport of `links_of`, of which nothing else is asked."""
    return links_of(layout, placement, name).transport


def neighbours(layout: Layout, placement: Placement, tied: Collection[tuple[int, int]] = ()) -> set[int]:
    """The ranks of the stages with which this process's exchange anything; `tied` as in `links_of`.

    These are the stages before and after, in its replicas, and those with which one shares a parameter.
    """
    found: set[int] = set()
    for stage_replica in layout.devices:
        replica, stage = layout.place(stage_replica)
        for chunk in range(placement.chunks):
            v = placement.virtual_stage(stage, chunk)
            for other in (v - 1, v + 1):
                if 0 <= other <= placement.last:
                    found |= {*layout.groups[replica * layout.stages + placement.place(other)[0]]}
    for one, other in tied:
        for mine, theirs in ((one, other), (other, one)):
            found |= {*layout.groups[theirs]} if mine in layout.devices else set()
    return found - {layout.world.rank}


def exchange_of(layout: Layout, transport: Transport, stall_seconds: float) -> Exchange:
    """What sends single arrays between stages outside a step's tasks; see `transport/exchange`."""
    return partial(
        exchange,
        world=layout.world,
        transport=transport,
        devices=layout.devices,
        name=layout.name,
        stall_seconds=stall_seconds,
    )


def driver_of(layout: Layout, transport: Transport, placement: Placement, execution: Execution) -> Driver:
    """The driver of this process's stages. Delays are injected into tasks' messages only."""
    return Driver(
        layout.devices,
        layout.world,
        execution.delays.transport(transport, placement, rank=layout.world.rank),
        execution.stall_seconds,
        execution.delays.queue(),
        agreement=agreement_of(layout, execution.terms),
    )
