"""The Trainer: a model, an optimizer and data on a mesh, stepped by a schedule that is only a hint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax

from rrfp_jax.checkpoint.checkpoint import OnError
from rrfp_jax.core.accumulation import SPARE_GRADIENTS, Accumulation
from rrfp_jax.core.group.group import GroupProtocol
from rrfp_jax.core.measure.cost_table import measured
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.data.contract import Data, InMemory, Microbatch, as_data, load_step, plan_step
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.driver.delays import Delays
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.group.agreement import CarrierName, Terms
from rrfp_jax.runtime.memory.budget import Setting, parse_setting
from rrfp_jax.runtime.memory.ledger import StageLedger
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.sim.ahead import Planned, base_of
from rrfp_jax.train.auto_split import auto_split
from rrfp_jax.train.checks import check_losses, check_model, check_order, check_types
from rrfp_jax.train.loss_scale import LossScale, loss_scale_of
from rrfp_jax.train.named import planned_or_schedule
from rrfp_jax.train.nonfinite import Standing
from rrfp_jax.train.reference import CheckReport, compare
from rrfp_jax.train.report import Evaluation, Report
from rrfp_jax.train.settings import OnNonfinite, Settings, checked_stall_seconds, folder_of_executables
from rrfp_jax.train.snapshot import Saves
from rrfp_jax.train.stepping import Stepper
from rrfp_jax.views.trace_file import write_trace


class Trainer:
    """Trains a pipeline, in one process or in several that all run the same program.

    Whatever can be refused is refused here, before anything is compiled; compiling and allocating wait for
    the first step (or `start`).

    Args:
        pipe: the model and its loss.
        optimizer: any optax transformation whose update of a leaf depends on its own stage only.
        data: an object with `plan(step)` and `load(microbatch, fields)`, or a function of the step that
            returns microbatches (dicts of arrays), or one list of them for every step. May be left out if
            microbatches are given to `step` and `value_and_grad`.
        mesh: number of stages and where they run.
        schedule: a hint, a fixed order, or `Planned`; its name, or "csv:FILE" for an order in a file.
        split: layers per stage, or per virtual stage in the model's order if stages have several chunks;
            None for an even split, "auto" for one by predicted costs (`docs/plan.md`).
        remat: what backwards compute again instead of keeping: "none", "full" (all but a layer's input), or a
            policy of `jax.checkpoint_policies` by name.
        max_in_flight: most microbatches held by a stage under a hint; None for twice the number of stages,
            or as many as fit if there is a budget in bytes.
        activation_budget: bytes of each device for microbatches in flight, a number or text ("2GiB"); "auto"
            for what is left (CPUs say nothing); None for none. Fixed orders that may hold more are refused.
        accumulation: "index" adds gradients in microbatch order, so results are equal to the bit whatever
            the order of tasks; "arrival" adds them as they come.
        spare_gradients: gradients per stage that may be parked until their turn, each as large as the stage's
            parameters; more of them help where messages overtake one another (`docs/simulated.md`).
        clip_norm: scale the gradient down to this norm, taken over all stages.
        on_nonfinite: what to do with a step whose loss or gradient is not finite: "stop" with a
            TrainingError, or "skip" its update, up to 20 times in a row.
        loss_scale: what the loss is multiplied by before it is differentiated, for models that compute in
            float16: a number, or "dynamic", which finds one by skipping steps; None for 1.
        agreement, protocol: by what and how the processes of a stage agree on what to run: "kv" or "socket",
            with a "leader" or "unanimous" (`docs/agreement.md`).
        seed: of initial values and random keys.
        init: `init(path, spec) -> array`, asked on each leaf's stage; or None, to keep the layer's own.
        on_step: called with every `Report`.
        stall_seconds: without any progress for so long, a step is given up, naming what it waited for.
        delays: to inject, for experiments.
        executables: a folder to keep compiled programs in, so that another start compiles nothing; None to
            compile at every start. Nobody else may be able to write to it: loading can run code from a file.

    Raises:
        UsageError: whatever cannot work, with value, cause and remedy.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: optax.GradientTransformation | None = None,
        *,
        data: Any = None,
        mesh: Mesh | None = None,
        schedule: Schedule | Planned | str = "bf",
        split: Sequence[int] | str | None = None,
        remat: str = "none",
        max_in_flight: int | None = None,
        activation_budget: Setting | str = "auto",
        accumulation: Accumulation = "index",
        spare_gradients: int = SPARE_GRADIENTS,
        clip_norm: float | None = None,
        on_nonfinite: OnNonfinite = "stop",
        loss_scale: float | str | LossScale | None = None,
        agreement: CarrierName = "kv",
        protocol: GroupProtocol = "leader",
        seed: int = 0,
        init: InitFunction | None = None,
        on_step: Callable[[Report], None] | None = None,
        stall_seconds: float = 300.0,
        delays: Delays | None = None,
        executables: str | Path | None = None,
    ) -> None:
        mesh = mesh or Mesh()
        check_types(pipe, mesh, split)
        settings = Settings(
            max_in_flight=max_in_flight,
            accumulation=accumulation,
            spare_gradients=spare_gradients,
            clip_norm=clip_norm,
            on_nonfinite=on_nonfinite,
            terms=Terms(carrier=agreement, protocol=protocol),
        )
        first, limit = planned_or_schedule(schedule), parse_setting(activation_budget)
        stall_seconds, folder = checked_stall_seconds(stall_seconds), folder_of_executables(executables)
        self._pipe, self._optimizer, self._on_step, self._seed = pipe, optimizer, on_step, seed
        self._data = None if data is None else as_data(data)
        self._layout = mesh.lay_out()
        self._world = self._layout.world
        self._world.stall_seconds = stall_seconds
        self._executables = Executables(folder)
        if isinstance(split, str):  # "auto"
            split = auto_split(
                pipe, optimizer, self._data, settings, mesh, base_of(first), remat, limit, self._layout
            )
        self._engine = Engine(
            pipe,
            self._layout,
            mesh.placement(base_of(first)),
            split=split,
            remat=remat,
            optimizer=optimizer,
            seed=seed,
            init=init,
            stall_seconds=stall_seconds,
            delays=delays or Delays(),
            budget=limit,
            executables=self._executables,
            terms=settings.terms,
        )
        self._settings = settings if self._engine.memory.limited else settings.limited(2 * mesh.pp)
        self._saves = Saves(self._engine, seed)
        standing = Standing(loss_scale=loss_scale_of(loss_scale))
        self._stepper = Stepper(self._engine, self._settings, self._saves, first, standing)
        self._checked, self._programs = False, (0, 0)
        if self._data is not None:
            self._check_model(self._data, plan_step(self._data, 0))

    @property
    def schedule(self) -> Schedule | Planned:
        """The schedule of the next step; may be set between steps, to an object or a name."""
        return self._stepper.schedule

    @schedule.setter
    def schedule(self, schedule: Schedule | Planned | str) -> None:
        self._stepper.schedule = planned_or_schedule(schedule)

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next step; may be set between steps."""
        return self._stepper.standing.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float | str | LossScale | None) -> None:
        self._stepper.standing = replace(self._stepper.standing, loss_scale=loss_scale_of(scale))

    @property
    def steps_done(self) -> int:
        """How many steps have been trained, those that were left out among them."""
        return self._stepper.steps_done

    # Training.

    def steps(self, count: int) -> Iterator[Report]:
        """Train `count` further steps on the trainer's data, giving each one's report.

        Raises:
            UsageError: no data or no optimizer.
            TrainingError: a loss or gradient is not finite (see `on_nonfinite`), a program failed, or nothing
                moves any more; parameters are those before the step.
        """
        data = self._own_data("steps")
        self._require_optimizer()
        self.start()
        for left in reversed(range(count)):
            yield self._train(data, more=left > 0)

    def step(self, microbatches: Sequence[Mapping[str, Any]]) -> Report:
        """One training step on these microbatches (dicts of arrays). Raises as `steps` does."""
        self._require_optimizer()
        data = InMemory(microbatches)
        self._start(data)
        return self._train(data)

    def value_and_grad(self, microbatches: Sequence[Mapping[str, Any]]) -> tuple[float, Params]:
        """Loss and gradient of these microbatches, without an update.

        Returns:
            The summed loss over the summed weight, and its gradient, {layer index as text: nested dict},
            each leaf on its stage's device; in a run of several processes, that of this one's stages. Frozen
            parameters are left out; tied ones have the sum over all of them, each.
        """
        data = InMemory(microbatches)
        self._start(data)
        sums = self._stepper.run("train", data, self.steps_done).sums
        check_losses(sums.totals, self.steps_done, "; the step is not applied")
        unit = sums.weight * self.loss_scale.value
        gradient = jax.tree.map(lambda g: g / unit, self._engine.gradients())
        return sums.total / sums.weight, gradient

    def evaluate(self, data: Any, steps: int | None = None) -> Evaluation:
        """Mean loss and metrics over `steps` steps of other data, forwards only.

        Args:
            data: as for the Trainer.
            steps: how many; None for `data.steps` if it has that, else 1.
        """
        data = as_data(data)
        count = getattr(data, "steps", 1) if steps is None else steps
        if count < 1:
            raise UsageError(f"evaluate(steps={count}): there must be at least one step")
        self._start(data)
        found = []
        for step in range(count):
            found.append(self._stepper.run("evaluate", data, step).sums)
            check_losses(found[-1].totals, step, "")
        return Evaluation.of(found)

    # What the model is and needs.

    def start(self, evaluate: Any = None) -> Sequence[StageLedger]:
        """Compile and allocate, unless that has been done; what each stage needs.

        Args:
            evaluate: data that will be evaluated between steps, for which to compile at once, too.
        """
        self._start(self._own_data("start"), None if evaluate is None else as_data(evaluate))
        return self._engine.memory.ledgers()

    def check(self) -> CheckReport:
        """Compare one step with plain, unpipelined JAX and print that with the bytes of every stage.

        In a run of several processes each compares its own stages, and makes the other initial parameters
        itself for that.

        Raises:
            UsageError: there is no data, or, with several processes, parameters are no longer initial.
        """
        data = self._own_data("check")
        if self._world.size > 1 and self.steps_done:
            raise UsageError(
                f"Trainer.check() after {self.steps_done} steps in {self._world.size} processes: no process "
                f"has all parameters then; call it before the first step"
            )
        table = self.start()
        self._stepper.loader.settle()
        microbatches = load_step(data, self.steps_done)
        loss, gradient = self.value_and_grad(microbatches)
        params = self._engine.all_initial_params() if self._world.size > 1 else self.params
        own = compare(self._pipe, params, microbatches, (self._seed, self.steps_done), loss, gradient, table)
        errors = self._world.gather("the check", dict(own.leaf_errors))
        report = replace(own, leaf_errors={k: v for part in errors for k, v in part.items()})
        if self._world.rank == 0:
            print(report)
        return report

    @property
    def programs(self) -> tuple[int, int]:
        """How many programs all processes compiled for the first step, and how many they loaded instead."""
        return self._programs

    @property
    def params(self) -> Params:
        """All parameters, {layer index as text: nested dict}, each leaf on its stage's device.

        In a run of several processes, those of this one's stages. The next step frees them: copy them.
        """
        if not self._engine.stages:
            raise UsageError("Trainer.params: there are none before the first step; call start() first")
        return {k: v for stage in self._engine.distinct for k, v in stage.params.items()}

    def write_trace(self, path: str | Path) -> None:
        """The latest steps as a trace that Perfetto opens."""
        write_trace(Path(path), {"run": self._stepper.traces})

    def write_costs(self, path: str | Path) -> None:
        """What tasks and transfers took in the latest steps, by bucket, for `schedules.Planned`; JSON.

        Nothing is written before the first step.
        """
        if (table := measured(self._stepper.measured_steps)) is not None:
            Path(path).write_text(json.dumps(table.as_json_object(), indent=1), encoding="utf-8")

    # Saving.

    def save(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        on_error: OnError = "stop",
        wait: bool = True,
        config: Any = None,
    ) -> None:
        """Write a checkpoint, `<folder>/<steps done>/`, which plain orbax reads too; all processes together.

        Args:
            folder: of the run's checkpoints, on a file system that all processes share.
            keep: how many of them to keep; older ones are removed once this one is complete.
            on_error: what to do if it cannot be written: "stop", or "continue" with a line about it.
            wait: False lets the next steps go on beside the writing; the last ones are waited for by
                `finish_saving`.
            config: plain data to keep with it.

        Raises:
            UsageError: there is nothing to save before the first step.
            TrainingError: it cannot be written, and `on_error` is "stop".
        """
        if not self._engine.stages:
            raise UsageError(
                "Trainer.save: there is nothing to save before the first step; call start() first"
            )
        self._saves.save(Path(folder), keep, on_error, self._stepper.state(self._seed, config))
        if wait:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written.

        Raises:
            TrainingError: see `save`.
        """
        self._saves.finish()

    def restore(self, folder: str | Path, step: int | None = None) -> bool:
        """Go on from the latest intact checkpoint of a folder; all processes together.

        The mesh, the number of processes, the schedule and the precision of messages may be others than
        when it was saved. One that is damaged is passed over, which is said.

        Args:
            folder: as for `save`.
            step: to take the checkpoint of another step than the latest.

        Returns:
            Whether there was one.

        Raises:
            UsageError: it is of another model, optimizer or seed, or there is none of that step.
            TrainingError: there are only damaged ones.
        """
        data = self._own_data("restore")
        self._start(data)
        found = self._saves.restore(Path(folder), step)
        if found is None:
            return False
        if not self._stepper.go_on_from(*found, data) and self._world.rank == 0:
            print(f"the data of step {self.steps_done - 1} is not what it was: it goes on with other data")
        return True

    # Inside.

    def _require_optimizer(self) -> None:
        if self._optimizer is None:
            raise UsageError("this Trainer has no optimizer: Trainer(pipe, optax.adamw(...), ...)")

    def _own_data(self, method: str) -> Data:
        if self._data is None:
            raise UsageError(f"Trainer.{method}() needs data: Trainer(..., data=...)")
        return self._data

    def _start(self, data: Data, evaluate: Data | None = None) -> None:
        if self._engine.stages:
            return
        plan = plan_step(data, 0)
        self._check_model(data, plan)
        self._programs = self._stepper.start(data, plan, evaluate, self._executables)

    def _check_model(self, data: Data, plan: Sequence[Microbatch]) -> None:
        if not self._checked:
            check_order(self._stepper.rules(len(plan), "train"))
            check_model(self._pipe, self._engine, self._optimizer, data, plan)
            self._checked = True

    def _train(self, data: Data, more: bool = False) -> Report:
        report = self._stepper.train(data, more)
        if self._on_step is not None:
            self._on_step(report)
        return report
