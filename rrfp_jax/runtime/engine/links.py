"""What connects this process to the others: messages between stages, agreement within one, their driver."""

from __future__ import annotations

from functools import partial

from rrfp_jax.core.tasks import Placement
from rrfp_jax.runtime.driver.driver import Driver
from rrfp_jax.runtime.group.agreement import Agreement, Terms
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.settings import Execution
from rrfp_jax.runtime.stages.ties import Exchange
from rrfp_jax.runtime.transport.exchange import exchange
from rrfp_jax.runtime.transport.local import LocalTransport
from rrfp_jax.runtime.transport.protocol import Transport
from rrfp_jax.runtime.transport.routed import RoutedTransport
from rrfp_jax.runtime.transport.socket import SocketTransport


def agreement_of(layout: Layout, terms: Terms) -> Agreement | None:
    """What the processes that share a stage agree by, made by all together; None if none share one."""
    shared = max(map(len, layout.groups)) > 1
    return Agreement(layout.world, layout.groups, terms) if shared else None


def transport_of(layout: Layout, placement: Placement) -> Transport:
    """What carries outputs from virtual stage to virtual stage; all processes make it together."""
    if layout.world.size == 1:
        return LocalTransport()
    remote = SocketTransport(layout.world, layout.receivers)
    apart = len(layout.stage_meshes) == 1 and placement.chunks == 1  # nothing stays in this process
    return remote if apart else RoutedTransport(LocalTransport(), remote)


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
