"""The Trainer: a model, an optimizer and data on a mesh, stepped by a schedule that is only a hint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import optax

from rrfp_jax.core.accumulation import SPARE_GRADIENTS, Accumulation
from rrfp_jax.core.rules import StepRules
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.trace import StepTrace
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.runtime.delays import Delays
from rrfp_jax.runtime.engine import Engine, StageBytes
from rrfp_jax.runtime.initial import InitFunction
from rrfp_jax.runtime.interrupts import interrupts_held
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.library import Phase
from rrfp_jax.runtime.pipeline import Pipeline
from rrfp_jax.runtime.sums import Sums
from rrfp_jax.runtime.topology import Mesh
from rrfp_jax.runtime.world import START_SECONDS
from rrfp_jax.train.checkpoint import Checkpoints, OnError
from rrfp_jax.train.checks import (
    check_loss_is_a_sum,
    check_losses,
    check_optimizer,
    check_order,
    check_types,
)
from rrfp_jax.train.data import (
    Data,
    InMemory,
    Microbatch,
    as_data,
    buckets_of,
    load_checked,
    plan_hash,
    plan_step,
)
from rrfp_jax.train.lossscale import LossScale, loss_scale_of
from rrfp_jax.train.named import schedule_of
from rrfp_jax.train.nonfinite import Standing, is_finite, leave_out
from rrfp_jax.train.reference import CheckReport, compare
from rrfp_jax.train.report import Evaluation, Report
from rrfp_jax.train.settings import OnNonfinite, Settings
from rrfp_jax.train.snapshot import leaves_of, put_back, standing_of, state_of
from rrfp_jax.train.tracefile import TRACED_STEPS, write_trace


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
        schedule: a hint or a fixed order, its name, or "csv:FILE" for an order in a file.
        split: layers per stage, or per piece in the model's order if stages have several chunks; None for an
            even split.
        remat: what the backward of each layer computes again instead of keeping: "none", "full" (all but the
            layer's input), or the name of a policy of `jax.checkpoint_policies`.
        max_in_flight: most microbatches held by a stage under a hint; None for twice the number of stages.
        accumulation: "index" adds gradients in microbatch order, so results are equal to the bit whatever
            the order of tasks; "arrival" adds them as they come.
        spare_gradients: gradients per stage that may be parked until their turn, each as large as the stage's
            parameters; more of them help where messages overtake one another (`docs/simulated.md`).
        clip_norm: scale the gradient down to this norm, taken over all stages.
        on_nonfinite: what to do with a step whose loss or gradient is not finite: "stop" with a
            TrainingError, or "skip" its update, up to 20 times in a row.
        loss_scale: what the loss is multiplied by before it is differentiated, for models that compute in
            float16: a number, or "dynamic", which finds one by skipping steps; None for 1.
        seed: of initial values and random keys.
        init: `init(path, spec) -> array or None`, initial values from elsewhere, asked leaf by leaf on the
            stage that owns it; None keeps the layer's own.
        on_step: called with every `Report`.
        stall_seconds: without any progress for so long, a step is given up, naming what it waited for.
        delays: to inject, for experiments.

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
        schedule: Schedule | str = "bf",
        split: Sequence[int] | None = None,
        remat: str = "none",
        max_in_flight: int | None = None,
        accumulation: Accumulation = "index",
        spare_gradients: int = SPARE_GRADIENTS,
        clip_norm: float | None = None,
        on_nonfinite: OnNonfinite = "stop",
        loss_scale: float | str | LossScale | None = None,
        seed: int = 0,
        init: InitFunction | None = None,
        on_step: Callable[[Report], None] | None = None,
        stall_seconds: float = 300.0,
        delays: Delays | None = None,
    ) -> None:
        mesh = mesh or Mesh()
        check_types(pipe, mesh, split)
        self._settings = Settings(
            max_in_flight=2 * mesh.pp if max_in_flight is None else max_in_flight,
            accumulation=accumulation,
            spare_gradients=spare_gradients,
            clip_norm=clip_norm,
            on_nonfinite=on_nonfinite,
        )
        self._standing = Standing(loss_scale=loss_scale_of(loss_scale))
        self.schedule = schedule
        self._mesh = mesh
        self.steps_done = 0
        self._pipe, self._optimizer, self._on_step = pipe, optimizer, on_step
        self._seed = seed
        self._traces: deque[StepTrace] = deque(maxlen=TRACED_STEPS)
        self._data = None if data is None else as_data(data)
        self._delays = delays or Delays()
        self._layout = mesh.lay_out()
        self._world = self._layout.world
        self._world.stall_seconds = stall_seconds
        self._engine = Engine(
            pipe,
            self._layout,
            mesh.placement(self.schedule),
            split=split,
            remat=remat,
            optimizer=optimizer,
            seed=seed,
            init=init,
            stall_seconds=stall_seconds,
            delays=self._delays,
        )
        self._checked = False
        self._checkpoints: Checkpoints | None = None  # the one that was last written to
        self._last_plan = ""
        self._last_rules: StepRules | None = None
        if self._data is not None:
            self._check_model(self._data, plan_step(self._data, 0))

    @property
    def schedule(self) -> Schedule:
        """The schedule of the next step; may be set between steps, to an object or a name."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule | str) -> None:
        self._schedule = schedule_of(schedule)

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next step; may be set between steps."""
        return self._standing.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float | str | LossScale | None) -> None:
        self._standing = replace(self._standing, loss_scale=loss_scale_of(scale))

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
        for _ in range(count):
            yield self._train(data)

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
        _, sums = self._run("train", data, self.steps_done)
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
            found.append(self._run("evaluate", data, step)[1])
            check_losses(found[-1].totals, step, "")
        weight = sum(sums.weight for sums in found)
        if not weight > 0:
            raise UsageError(f"the summed loss weight of the evaluation is {weight}: nothing is counted")
        metrics = {name: sum(s.metrics[name] for s in found) / weight for name in found[0].metrics}
        return Evaluation(loss=sum(s.total for s in found) / weight, weight=weight, metrics=metrics)

    # What the model is and needs.

    def start(self) -> Sequence[StageBytes]:
        """Compile and allocate, unless that has been done; what each stage needs."""
        self._start(self._own_data("start"))
        rows = [vars(row) for row in self._engine.bytes()]
        return [
            StageBytes(**row) for rows in self._world.gather("the bytes of all stages", rows) for row in rows
        ]

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
        plan = plan_step(data, self.steps_done)
        microbatches = [
            dict(load_checked(data, self.steps_done, j, mb, frozenset(mb.fields)))
            for j, mb in enumerate(plan)
        ]
        loss, gradient = self.value_and_grad(microbatches)
        params = self._engine.all_initial_params() if self._world.size > 1 else self.params
        own = compare(self._pipe, params, microbatches, (self._seed, self.steps_done), loss, gradient, table)
        errors = self._world.gather("the check", dict(own.leaf_errors))
        report = replace(own, leaf_errors={k: v for part in errors for k, v in part.items()})
        if self._world.rank == 0:
            print(report)
        return report

    @property
    def params(self) -> Params:
        """All parameters, {layer index as text: nested dict}, each leaf on its stage's device.

        In a run of several processes, those of this one's stages.
        The next step replaces them and frees the old ones: copy what is to be kept.
        """
        if not self._engine.stages:
            raise UsageError("Trainer.params: there are none before the first step; call start() first")
        return {k: v for stage in self._engine.stages.values() for k, v in stage.params.items()}

    def write_trace(self, path: str | Path) -> None:
        """The latest steps as a trace that Perfetto opens."""
        write_trace(Path(path), {"run": self._traces})

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
        self.finish_saving()
        self._checkpoints = Checkpoints(Path(folder), self._world, keep=keep, on_error=on_error)
        run = state_of(self.steps_done, self._seed, self._standing, self._last_plan, config)
        self._checkpoints.save(run, leaves_of(self._engine.stages.values()))
        if wait:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written.

        Raises:
            TrainingError: see `save`.
        """
        if self._checkpoints is not None:
            self._checkpoints.advance(to_the_end=True)

    def restore(self, folder: str | Path, step: int | None = None) -> bool:
        """Go on from the latest intact checkpoint of a folder; all processes together.

        The number of stages, chunks and processes, the schedule and the precision of messages may be others
        than when it was saved. One that is damaged is passed over, which is said.

        Args:
            folder: as for `save`.
            step: to take the checkpoint of another step than the latest.

        Returns:
            Whether there was one.

        Raises:
            UsageError: it is of another model, optimizer or seed, or there is none of that step.
            TrainingError: there are only damaged ones.
        """
        self._start(self._own_data("restore"))
        stages = list(self._engine.stages.values())
        wanted = {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in leaves_of(stages)}
        found = Checkpoints(Path(folder), self._world).restore(wanted, step)
        if found is None:
            return False
        self._standing = standing_of(found.run, self._seed)
        put_back(stages, found.leaves)
        self.steps_done, self._last_plan = found.run.step, found.run.plan_hash
        return True

    # Inside.

    def _require_optimizer(self) -> None:
        if self._optimizer is None:
            raise UsageError("this Trainer has no optimizer: Trainer(pipe, optax.adamw(...), ...)")

    def _own_data(self, method: str) -> Data:
        if self._data is None:
            raise UsageError(f"Trainer.{method}() needs data: Trainer(..., data=...)")
        return self._data

    def _start(self, data: Data) -> None:
        if self._engine.stages:
            return
        plan = plan_step(data, 0)
        self._check_model(data, plan)
        self._world.agree("what is to be run", self._fingerprint(plan))
        self._engine.start(list(dict.fromkeys(buckets_of(plan))), self._rules(len(plan), "train"))
        # So that the first step waits for nobody's start.
        self._world.gather("everybody to be ready", None, START_SECONDS)

    def _fingerprint(self, plan: Sequence[Microbatch]) -> Mapping[str, str]:
        """Whatever must be equal on all processes of the run, by name."""
        split = [[len(layers) for layers in chunks] for chunks in self._engine.chunks]
        found = {"rules": self._rules(len(plan), "train"), "split": split, "seed": self._seed}
        found |= {"frozen": self._pipe.frozen, "tied": self._pipe.tied, "loss_scale": self.loss_scale}
        found |= {**self._settings.as_text(), "remat": self._engine.remat}
        found |= {"delays": self._delays, "jax": jax.__version__}
        return {name: str(value) for name, value in found.items()}

    def _check_model(self, data: Data, plan: Sequence[Microbatch]) -> None:
        if self._checked:
            return
        buckets = buckets_of(plan)
        for bucket in dict.fromkeys(buckets):
            self._engine.library.examine(bucket)
        check_order(self._rules(len(plan), "train"))
        updated = self._engine.library.updated
        if self._optimizer is not None:
            check_optimizer(self._optimizer, updated, self._engine.chunks)
        last = len(plan) - 1  # the one most likely to differ from the rest
        fields = load_checked(data, 0, last, plan[last], frozenset(plan[last].fields))
        check_loss_is_a_sum(
            self._pipe, self._engine.library.examine(buckets[last])[-1].carry_out, dict(fields)
        )
        self._checked = True

    def _train(self, data: Data) -> Report:
        began, step, scale = perf_counter(), self.steps_done, self.loss_scale.value
        if self._checkpoints is not None:
            self._checkpoints.advance()
        plan, sums = self._run("train", data, step)
        unit = sums.weight * scale  # the gradient sums over this are the gradient
        norm, applied = math.sqrt(sums.squared_norm) / unit, is_finite(sums)
        if applied:
            clip = self._settings.clip_norm
            shrink = 1.0 if clip is None else min(1.0, clip / max(norm, 1e-30))
            if self._checkpoints is not None:
                self._checkpoints.copied()  # the update donates what is being saved
            with interrupts_held():  # all stages, or none
                self._engine.update(shrink / unit)
                self._standing = self._standing.after(finite=True)
                self.steps_done += 1
        else:
            policy = self._settings.on_nonfinite
            self._standing = leave_out(self._standing, policy, step, sums, self._engine.not_finite)
            self.steps_done += 1
        self._traces.append(sums.trace)
        self._last_plan = plan_hash(plan)
        report = Report.of(
            sums,
            wall_seconds=perf_counter() - began,
            gradient_norm=norm,
            loss_scale=scale,
            applied=applied,
            skipped=self._standing.skipped,
            plan=self._last_plan,
        )
        if self._on_step is not None:
            self._on_step(report)
        return report

    def _run(self, phase: Phase, data: Data, step: int) -> tuple[Sequence[Microbatch], Sums]:
        self._world.box.phase(f"{'step' if phase == 'train' else 'validation'} {step}")
        plan = plan_step(data, step)
        self._world.agree(f"the plan of {phase} step {step}", plan_hash(plan))
        buckets = buckets_of(plan)
        rules = self._rules(len(plan), phase)
        if rules != self._last_rules:  # the schedule may be set between steps
            check_order(rules)
            self._last_rules = rules

        def load(j: int, fields: frozenset[str]) -> Mapping[str, Any]:
            return load_checked(data, step, j, plan[j], fields)

        sums = self._engine.run(step, rules, buckets, load, self.loss_scale.value)
        if phase == "train" and sums.weight <= 0:
            raise TrainingError(
                f"step {step}: the summed loss weight is {sums.weight}, so there is nothing to divide by; "
                f"is every token masked, or does the loss function leave out Loss(..., weight=...)?"
            )
        return plan, sums

    def _rules(self, microbatches: int, phase: Phase) -> StepRules:
        placement, forward_only = self._engine.placement, phase == "evaluate"
        return self._settings.rules(placement, microbatches, self.schedule, forward_only)
