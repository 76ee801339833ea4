"""The Trainer: a model, an optimizer and data on a mesh, stepped by a schedule that is only a hint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optax

from rrfp_jax.core.admission import SPARE_GRADIENTS, Accumulation
from rrfp_jax.core.group import GroupProtocol
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.data.contract import as_data
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.engine.settings import (
    LossScale,
    OnNonfinite,
    Rebalance,
    Settings,
)
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.runtime.run.consensus import CarrierName
from rrfp_jax.runtime.transport.choice import TransportName
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import Planned
from rrfp_jax.train.assembly import assemble
from rrfp_jax.train.checks import check_types
from rrfp_jax.train.named import read_schedule
from rrfp_jax.train.report import Report
from rrfp_jax.train.session import Session


class Trainer(Session):
    """Trains a pipeline, in one process or in several that all run the same program.

    What can be refused is refused here, before anything is compiled. Compiling and allocating wait for the
    first step (or `start`).

    Args:
        pipe: the model and its loss.
        optimizer: any optax transformation whose update of a leaf depends on its own stage only.
        data: an object with `plan(step)` and `load(microbatch, fields)`, or a function of the step that
            returns microbatches (dicts of arrays), or one list of them for every step. May be left out if
            microbatches are given to `step` and `value_and_grad`.
        mesh: number of stages and where they run.
        schedule: a hint, a fixed order, `Planned` or `Auto`; its name, or "csv:FILE" for an order in a file.
            "auto" takes the hint and placement that the simulator finds fastest (`docs/concepts.md`).
        split: layers per stage, or per virtual stage in the model's order if stages have several chunks;
            None for an even split, "auto" for one by predicted costs (`docs/plan.md`).
        rebalance: "suggest" says when another split would be faster by what was measured, and "auto" goes on
            with it, between two steps (`docs/rebalance.md`); "off" does neither.
        init: `init(path, spec) -> array`, asked on each leaf's stage; or None, to keep the layer's own.
        on_step: called with every `Report`.
        accumulation, equal_schedules, clip_norm, on_nonfinite, loss_scale, seed: what is computed; see
            `Numerics`.
        remat, max_in_flight, activation_budget, spare_gradients: what is held; see `MemoryPolicy`.
        stall_seconds, transport, executables, delays: see `Execution`.
        agreement, protocol: how the processes of a stage agree on each task. Messages go by "kv" or "socket";
            a "leader" decides, or all are "unanimous" (`docs/agreement.md`).

    Raises:
        UsageError: something cannot work; with value, cause and remedy.
    """

    # So many arguments because they are the names that users type; they go on in groups, as `Settings`.
    def __init__(
        self,
        pipe: Pipeline,
        optimizer: optax.GradientTransformation | None = None,
        *,
        data: Any = None,
        mesh: Mesh | None = None,
        schedule: Schedule | Planned | Auto | str = "bf",
        split: Sequence[int] | str | None = None,
        rebalance: Rebalance = "off",
        init: InitFunction | None = None,
        on_step: Callable[[Report], None] | None = None,
        accumulation: Accumulation = "index",
        equal_schedules: bool = False,
        clip_norm: float | None = None,
        on_nonfinite: OnNonfinite = "stop",
        loss_scale: float | str | LossScale | None = None,
        seed: int = 0,
        remat: str = "none",
        max_in_flight: int | None = None,
        activation_budget: str | int | None = "auto",
        spare_gradients: int = SPARE_GRADIENTS,
        stall_seconds: float = 300.0,
        transport: TransportName = "auto",
        executables: str | Path | None = None,
        delays: Delays | None = None,
        agreement: CarrierName = "kv",
        protocol: GroupProtocol = "leader",
    ) -> None:
        mesh, delays = Mesh() if mesh is None else mesh, Delays() if delays is None else delays
        check_types(pipe, optimizer, mesh, split, init, on_step, delays)
        settings = Settings.flat(locals())  # whose names are those of the fields
        first = read_schedule(schedule)
        wrapped = None if data is None else as_data(data)
        stepper = assemble(pipe, optimizer, wrapped, mesh, first, split, init, settings)
        super().__init__(stepper, optimizer, wrapped, on_step)
