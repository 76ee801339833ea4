"""What connects this process to the others: messages between stages, agreement within one, their driver."""

from __future__ import annotations

from collections.abc import Collection

from rrfp_jax.core.tasks import Placement
from rrfp_jax.printing import say
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.engine.settings import Settings
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.run.consensus import Agreement, Terms
from rrfp_jax.runtime.transport.choice import TransportName, between_processes
from rrfp_jax.runtime.transport.protocol import Endpoints, OneArrayCompiler, Transport


def driver_of(
    layout: Layout,
    placement: Placement,
    settings: Settings,
    tied: Collection[tuple[int, int]],
    compiler: OneArrayCompiler,
) -> Driver:
    """The driver of this process's stages; made by all processes together. See `remote_of` for the rest."""
    return Driver(
        layout.devices,
        layout.world,
        remote_of(layout, placement, settings.execution.transport, tied, compiler),
        settings.execution.stall_seconds,
        settings.delays.queue(),
        agreement=agreement_of(layout, settings.terms),
        delays=settings.delays.arrivals(placement, rank=layout.world.rank),
        name=layout.name,
    )


def remote_of(
    layout: Layout,
    placement: Placement,
    name: TransportName = "socket",
    tied: Collection[tuple[int, int]] = (),
    compiler: OneArrayCompiler | None = None,
) -> Transport | None:
    """What carries messages between processes, made by all of them together; None if there is only one.

    Rank 0 prints which way they take, unless there is nothing to say of a way that was asked for.

    Args:
        tied: stage replicas that exchange tied values, in pairs.
        compiler: compiles programs that copy messages; None for `jax.jit`.

    Raises:
        UsageError: a transport is asked for that cannot be used.
    """
    if layout.world.size == 1:
        return None
    ends = Endpoints(layout.world, layout.receivers, layout.devices, neighbours(layout, placement, tied))
    made = between_processes(name, ends if compiler is None else ends._replace(compiler=compiler))
    if made.details and layout.world.rank == 0:
        say(f"messages between processes: {made.way} ({made.details})")
    return made.transport


def agreement_of(layout: Layout, terms: Terms) -> Agreement | None:
    """What the processes that share a stage agree by, made by all together; None if none share one."""
    shared = max(map(len, layout.groups)) > 1
    return Agreement(layout.world, layout.groups, terms) if shared else None


def neighbours(layout: Layout, placement: Placement, tied: Collection[tuple[int, int]] = ()) -> set[int]:
    """The ranks of the stages with which this process's exchange anything; `tied` as in `remote_of`.

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
