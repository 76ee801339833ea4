"""What a Trainer does: steps, evaluation, a check against plain JAX, checkpoints, pictures."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from rrfp_jax.checkpoint.checkpoint import OnError
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.data.contract import Data, InMemory, as_data, load_step
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import output_of
from rrfp_jax.json_files import write_json
from rrfp_jax.printing import say
from rrfp_jax.progress import Doing, during
from rrfp_jax.runtime.engine.settings import LossScale, loss_scale_of
from rrfp_jax.runtime.mesh.stage_mesh import transfers_meant
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.stages.step import Sums
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import Planned
from rrfp_jax.trace.costs import measured
from rrfp_jax.train.checks import check_count, check_losses, folder_of
from rrfp_jax.train.gathering import whole_params
from rrfp_jax.train.going_on import Found, look_at, say_none
from rrfp_jax.train.kept_numbers import kept_numbers, say_which_count
from rrfp_jax.train.named import read_schedule
from rrfp_jax.train.one_thread import one_thread
from rrfp_jax.train.reference import CheckReport, compare
from rrfp_jax.train.report import Evaluation, Report
from rrfp_jax.train.startup import Startup
from rrfp_jax.views.trace_file import write_trace


class Session(Startup):
    """A pipeline that is trained. `Trainer` makes one from what users type."""

    @property
    def schedule(self) -> Schedule | Planned:
        """The schedule of the next step; may be set between steps, to an object or name (`Stepper.take`)."""
        return self._stepper.schedule

    @schedule.setter
    @one_thread("schedule")
    def schedule(self, schedule: Schedule | Planned | Auto | str) -> None:
        self._stepper.take(read_schedule(schedule))

    @property
    def split(self) -> list[int]:
        """Layers per virtual stage; may be set between steps, which moves layers (`Stepper.recut`)."""
        return self._engine.split

    @split.setter
    @one_thread("split")
    def split(self, split: Sequence[int]) -> None:
        if isinstance(split, str) or not isinstance(split, Sequence):
            raise UsageError(f"split={split!r}: give a list of numbers of layers, one per stage")
        self._stepper.recut(split)

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
            UsageError: no data or no optimizer; at once.
            TrainingError: a loss or gradient is not finite (see `on_nonfinite`), a program failed, or nothing
                moves any more; parameters are those before the step.
        """
        check_count("steps", "count", count, 0)
        self._require_optimizer()
        return self._steps(self._own_data("steps"), count)

    def _steps(self, data: Data, count: int) -> Iterator[Report]:
        self._start(data)
        for left in reversed(range(count)):
            yield self._train(data, left)

    @one_thread("step")
    def step(self, microbatches: Sequence[Mapping[str, Any]]) -> Report:
        """One training step on these microbatches (dicts of arrays). Raises as `steps` does."""
        self._require_optimizer()
        data = InMemory(microbatches)
        self._start(data)
        return self._train(data)

    @one_thread("value_and_grad")
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
        with transfers_meant():
            gradient = jax.tree.map(lambda g: g / unit, self._engine.gradients())
        return sums.total / sums.weight, gradient

    def evaluate(self, data: Any, steps: int | None = None) -> Evaluation:
        """Mean loss and metrics over `steps` steps of other data, forwards only.

        Args:
            data: as for the Trainer.
            steps: how many; None for `data.steps` if it has that, else 1.
        """
        return Evaluation.of(list(self.evaluating(data, steps)))

    def evaluating(self, data: Any, steps: int | None = None) -> Generator[Sums]:
        """The steps of an evaluation one by one, so that it may be left between two of them."""
        data = as_data(data)
        count = getattr(data, "steps", 1) if steps is None else steps
        check_count("evaluate", "steps", count, 1)
        self._start(data)
        try:
            for step in range(count):
                self.progress(Doing("validating", step, count, f"{step / count:.0%}"))
                with self._one_thread.uses("evaluate"):
                    sums = self._stepper.run("evaluate", data, step).sums
                check_losses(sums.totals, step, "")
                yield sums
        finally:
            self.progress(Doing("validating", count, count))

    # What the model is and needs.

    @one_thread("check")
    def check(self) -> CheckReport:
        """Compare one step with plain, unpipelined JAX and print that with the bytes of every stage.

        In a run of several processes each compares its own stages, and gets the other parameters for that.

        Raises:
            UsageError: there is no data.
        """
        data = self._own_data("check")
        table = self.start()
        self._stepper.loader.settle()
        microbatches = load_step(data, self.steps_done)
        with during(self.progress, "comparing with plain JAX"):
            loss, gradient = self.value_and_grad(microbatches)
            params = whole_params(self._engine) if self._world.size > 1 else self.stage_params
            ids = self._stepper.seed, self.steps_done
            with transfers_meant():
                report = compare(self._engine.pipe, params, microbatches, ids, loss, gradient, table)
        report = report.of_all(self._world.gather("the check", report.leaves))
        if self._world.rank == 0:
            say(str(report))
        return report

    def write_trace(self, path: str | Path) -> None:
        """The latest steps as a trace that Perfetto opens; `UsageError` if they cannot be written."""
        write_trace(output_of("path", path), {"run": self._stepper.recorded})

    def write_costs(self, path: str | Path) -> None:
        """What tasks and transfers took in the latest steps, by bucket, for `schedules.Planned`; JSON.

        Before the first step nothing is written, but the path is checked. Raises as `write_trace` does.
        """
        file = output_of("path", path)
        if (table := measured(self._stepper.recorded)) is not None:
            write_json(file, table.as_json_object(), indent=1)

    # Saving.

    @one_thread("save")
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
            raise UsageError("Trainer.save: nothing to save before the first step; call start() first")
        check_count("save", "keep", keep, 1)
        self._stepper.saves.save(folder_of("save", folder), keep, on_error, self._stepper.state(config))
        if wait:
            self.finish_saving()

    @one_thread("hold")
    def hold(self, folder: Path, config: Any = None) -> bool:
        """Write a checkpoint to a folder in the host's memory, as `save` does; see `Saves.hold`."""
        return self._stepper.saves.hold(folder, self._stepper.state(config))

    @one_thread("finish_saving")
    def finish_saving(self) -> bool:
        """Wait for a checkpoint that is being written; raises as `save` does.

        Returns:
            Whether the latest `save` has written its checkpoint; equal on all processes.
        """
        with during(self.progress, "saving"):
            return self._stepper.saves.finish()

    @one_thread("restore")
    def restore(self, folder: str | Path, step: int | None = None, *, params_only: bool = False) -> bool:
        """Go on from the latest intact checkpoint of a folder; all processes together.

        The mesh, the number of processes, the schedule and the precision of messages may be others than
        when it was saved. One that is damaged is passed over; that is said, and that there is none.

        Args:
            folder: as for `save`.
            step: to take the checkpoint of another step than the latest.
            params_only: take the parameters and nothing else, to fine-tune or to evaluate. Steps, data, loss
                scale and optimizer begin anew; the optimizer, what is frozen or tied, and the seed may be
                others, and there may be no optimizer.

        Returns:
            Whether there was one.

        Raises:
            UsageError: it is of another model, optimizer or seed, there is none of that step, or the folder
                has other things than checkpoints. With
                `params_only` also if there is none at all, or after a step.
            TrainingError: there are only damaged ones.
        """
        data = self._own_data("restore")
        path = folder_of("restore", folder)
        if step is not None:
            check_count("restore", "step", step, 0)
        if params_only and self.steps_done:
            raise UsageError(
                f"Trainer.restore(params_only=True) after {self.steps_done} steps: training begins anew with "
                f"these parameters, so restore them before the first step"
            )
        if params_only:
            self._start(data)
            with during(self.progress, "restoring", str(path)):
                self._stepper.saves.restore_params(path, step)
            return True
        found = self.look_at(path, step)  # before it compiles
        if found is not None and found.refusal:
            raise UsageError(found.refusal)
        if found is None and step is None:
            say_none(self._world, path, self.steps_done)
        return self.go_on(path, step)

    @one_thread("restore")
    def go_on(self, folder: str | Path, step: int | None = None) -> bool:
        """What `restore` does once `look_at` refuses nothing; if there is no checkpoint, without a word."""
        data, path = self._own_data("restore"), folder_of("restore", folder)
        self._start(data)
        asked = kept_numbers(self._engine)
        with during(self.progress, "restoring", str(path)):
            restored = self._stepper.saves.restore(path, step)
        if restored is None:
            return False
        say_which_count(self._engine, asked)
        if not self._stepper.go_on_from(*restored, data) and self._world.rank == 0:
            say(f"the data of step {self.steps_done - 1} is not what it was: it goes on with other data")
        return True

    @one_thread("restore")
    def look_at(self, folder: str | Path, step: int | None = None) -> Found | None:
        """What `restore` would find there: the config kept with it, and why this Trainer could not go on.

        Nothing is compiled. All processes together.
        """
        self._own_data("restore")
        return look_at(self._engine, self._stepper.seed, folder_of("restore", folder), step)

    @one_thread("step")
    def _train(self, data: Data, left: int | None = None) -> Report:
        report = self._stepper.train(data, left)
        if self._on_step is not None:
            self._on_step(report)
        return report
