"""What a Trainer is made of, put together from its arguments; nothing is compiled or allocated yet."""

from __future__ import annotations

from collections.abc import Sequence

import optax

from rrfp_jax.core.schedules import Schedule
from rrfp_jax.data.contract import Data
from rrfp_jax.runtime.engine.engine import Engine, EngineSpec
from rrfp_jax.runtime.engine.settings import Settings, check_jax_settings
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.runtime.run.join import join
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import Planned, base_of
from rrfp_jax.train.auto_schedule import auto_schedule
from rrfp_jax.train.auto_split import auto_split
from rrfp_jax.train.hint_exchange import HintExchange
from rrfp_jax.train.rebalancing import rebalancing
from rrfp_jax.train.stepping import Stepper


def assemble(
    pipe: Pipeline,
    optimizer: optax.GradientTransformation | None,
    data: Data | None,
    mesh: Mesh,
    schedule: Schedule | Planned | Auto,
    split: Sequence[int] | str | None,
    init: InitFunction | None,
    settings: Settings,
) -> Stepper:
    """Join the other processes and lay the stages out on the mesh; the arguments are those of a Trainer.

    Raises:
        UsageError: see `check_jax_settings`, `join`, `Mesh.lay_out`, `auto_schedule`, `auto_split`, `Engine`,
            `rebalancing`.
    """
    check_jax_settings()
    layout = mesh.lay_out(join())
    layout.world.waits.stall_seconds = settings.execution.stall_seconds
    exchange = None
    if isinstance(schedule, Auto):
        exchange = HintExchange(schedule) if schedule.exchange and layout.replicas == 1 else None
        schedule, split = auto_schedule(schedule, pipe, optimizer, data, settings, mesh, split, layout)
    order = base_of(schedule)
    if isinstance(split, str):  # "auto"
        split = auto_split(pipe, optimizer, data, settings, mesh, order, layout)
    spec = EngineSpec(
        pipe=pipe,
        layout=layout,
        placement=mesh.placement(order),
        optimizer=optimizer,
        init=init,
        settings=settings,
    )
    engine = Engine(spec, split)
    if not engine.memory.limited:
        settings = settings.limited(mesh.pp)
    moves = rebalancing(settings.execution.rebalance, layout.widths)
    return Stepper(engine, settings, schedule, exchange, moves)
