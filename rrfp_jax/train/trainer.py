"""The Trainer: a model, an optimizer and data on a mesh, stepped by a schedule that is only a hint."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import jax
import optax

from rrfp_jax.checkpoint.folder import folder_of
from rrfp_jax.checkpoint.format import plain_dtype
from rrfp_jax.checkpoint.saving import OnError
from rrfp_jax.core.schedules import Schedule, name_of
from rrfp_jax.data.contract import Data, InMemory, Microbatch, as_data, load_step, plan_step, steps_of
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import output_of, says_its_arguments, shown
from rrfp_jax.forecast.forecast import RunSpec
from rrfp_jax.json_files import write_json
from rrfp_jax.loss_scale import LossScale, loss_scale_of
from rrfp_jax.printing import say
from rrfp_jax.progress import Doing, Progress, during, silent
from rrfp_jax.report.perfetto import write_trace
from rrfp_jax.report.progress_line import shown_progress
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.engine.settings import Settings
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.signals import interrupts_held
from rrfp_jax.runtime.stages.memory import StageLedger
from rrfp_jax.runtime.stages.step import Sums
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import Planned
from rrfp_jax.trace.costs import measured
from rrfp_jax.train.arguments import DEFAULT, Default, with_arguments
from rrfp_jax.train.base import FrozenBase
from rrfp_jax.train.checks import (
    ELSEWHERE,
    check_count,
    check_jax_settings,
    check_losses,
    check_model,
    check_types,
    warn_of_lost,
)
from rrfp_jax.train.exporting import flax_states, whole_params
from rrfp_jax.train.named import read_schedule
from rrfp_jax.train.reference import CheckReport, PlainStep, compare
from rrfp_jax.train.report import Evaluation, Report
from rrfp_jax.train.resume import (
    Found,
    given_hyperparameters,
    no_params,
    say_none,
    say_restored_hyperparameters,
)
from rrfp_jax.train.stepping import Stepper
from rrfp_jax.train.tuning import HintExchange, predicted

Method = TypeVar("Method", bound=Callable[..., Any])


def one_thread(name: str) -> Callable[[Method], Method]:
    """A decorator for a method of a Trainer, which messages call by this name."""

    def decorated(method: Method) -> Method:
        @functools.wraps(method)
        def alone(self: Trainer, /, *args: Any, **kwargs: Any) -> Any:
            with self._alone(name):
                return method(self, *args, **kwargs)

        return cast(Method, alone)

    return decorated


@says_its_arguments(ELSEWHERE)
class Trainer:
    """Trains a pipeline, in one process or in several that all run the same program.

    Invalid arguments are rejected here. Compilation and allocation happen in the first step (or `start`).

    Args:
        pipe: the model and its loss.
        optimizer: any optax transformation whose update of a leaf depends on its own stage only.
        data: an object with `plan(step)` and `load(microbatch, fields)`, or a function of the step that
            returns microbatches (dicts of arrays), or one list of them for every step. May be left out if
            microbatches are given to `step` and `value_and_grad`.
        mesh: number of stages and where they run.
        schedule: a hint, a fixed order, `Planned` or `Auto`; its name, or "csv:FILE" for an order in a file.
            "auto" takes the hint and placement that the simulator finds fastest (`docs/which-schedule.md`).
        split: layers per stage, or per virtual stage in the model's order if stages have several chunks;
            None for an even split, "auto" for one by predicted costs (`docs/plan.md`).
        init: `init(path, spec) -> array`, called on each leaf's stage; or None for the layer's own values.
        on_step: called with every `Report`.
        clip_norm, loss_scale, seed, remat, activation_budget, executables: see `Settings`.
        settings: all other settings; give each value only once.

    Raises:
        UsageError: an argument cannot work; the message has value, cause and remedy.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: optax.GradientTransformation | None = None,
        *,
        data: Any = None,
        mesh: Mesh | None = None,
        schedule: Schedule | Planned | Auto | str = "bf",
        split: Sequence[int] | str | None = None,
        init: InitFunction | None = None,
        on_step: Callable[[Report], None] | None = None,
        clip_norm: float | Default | None = DEFAULT,
        loss_scale: float | str | LossScale | Default | None = DEFAULT,
        seed: int | Default = DEFAULT,
        remat: str | Default = DEFAULT,
        activation_budget: str | int | Default | None = DEFAULT,
        executables: str | Path | Default | None = DEFAULT,
        settings: Settings | None = None,
    ) -> None:
        mesh, settings = Mesh() if mesh is None else mesh, Settings() if settings is None else settings
        check_types(pipe, optimizer, mesh, split, init, on_step, settings)
        given: dict[str, Any] = {"clip_norm": clip_norm, "loss_scale": loss_scale, "seed": seed}
        given |= {"remat": remat, "activation_budget": activation_budget, "executables": executables}
        settings = with_arguments(settings, given)
        wrapped = None if data is None else as_data(data)
        run = RunSpec(pipe, optimizer, wrapped, mesh, read_schedule(schedule), split, settings)
        self._stepper = _stepper(run, init)
        self._optimizer, self._data, self._on_step = optimizer, wrapped, on_step
        self._world = self._stepper.engine.world
        self._checked = self._warned = False
        self._programs = 0, 0  # compiled by all processes for the first step, and loaded instead
        self._lock, self._user = threading.RLock(), ""  # and who holds it
        if wrapped is not None:
            with jax.set_mesh(None):  # as in `_alone`
                self._check_model(wrapped, plan_step(wrapped, 0))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse `copy`, `pickle` and whatever uses them."""
        raise UsageError(
            "a Trainer cannot be copied or pickled, as its arrays and programs are on devices of this "
            "process: write it with trainer.save(folder), or copy trainer.params()"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            remedy = ELSEWHERE.get(name, "what it is to be is given when it is made")
            raise UsageError(f"trainer.{name}={shown(value)}: a Trainer has no {name} to set; {remedy}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        engine = self._engine
        layers = " + ".join(map(str, engine.split))
        replicas = f", {engine.layout.replicas} replicas" if engine.layout.replicas > 1 else ""
        name = "planned" if isinstance(self.schedule, Planned) else name_of(self.schedule)
        return (
            f"Trainer({len(engine.pipe)} layers as {layers} on {engine.layout.stages} stages{replicas}, "
            f"schedule {name}, {self.steps_done} steps done)"
        )

    # What it is, and how it stands.

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

    @property
    def is_main(self) -> bool:
        """Whether this process is the one of its run that prints and writes what is wanted once."""
        return self._world.rank == 0

    # Start, and parameters.

    def start(self, evaluate: Any = None, *, progress: Progress | bool | None = None) -> list[StageLedger]:
        """Compile and allocate, unless that has been done; returns what each stage needs.

        Args:
            evaluate: data that will be evaluated between steps; its programs are compiled now, too.
            progress: True to show the progress of compiling, evaluating, saving and restoring, as a live line
                on a terminal or in a notebook, else as plain lines; with several processes, one shows it. Or
                a listener to call instead, False for none, None for no change. A Trainer is quiet by default.
        """
        if isinstance(progress, bool):
            progress = shown_progress() if progress and self.is_main else silent
        if progress is not None:
            if not callable(progress):
                raise UsageError(f"Trainer.start(progress={shown(progress)}): give True, False or a listener")
            self._engine.library.progress = progress
        self._start(self._own_data("start"), None if evaluate is None else as_data(evaluate))
        return self._engine.memory.ledgers()[: self._engine.layout.stages]  # replicas are alike

    @one_thread("params")
    def params(self, *, modules: bool = False) -> list[Any]:
        """The trained model, layer by layer, whole in this process, for plain flax; see `rrfp.export`."""
        return flax_states(self._engine.pipe.layers, whole_params(self._started("params")), modules)

    @property
    def stage_params(self) -> Params:
        """The parameters of this process's stages, {layer index as text: nested dict}, on their devices.

        In a run of one process those are all. The next step frees them: copy them.
        """
        return {k: v for stage in self._started("stage_params").distinct for k, v in stage.params.items()}

    # Training and evaluation.

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
        if self._optimizer is None and not self._warned:  # with one that was done at the start
            warn_of_lost(self._engine)
            self._warned = True
        sums = self._stepper.run("train", data, self.steps_done).sums
        check_losses(sums.totals, f"step {self.steps_done}", "; the step is not applied")
        unit = sums.weight * self.loss_scale.value
        with jax.transfer_guard("allow"):
            gradient = jax.tree.map(lambda g: g / unit, self._engine.gradients())
        return sums.total / sums.weight, gradient

    def evaluate(self, data: Any, steps: int | None = None) -> Evaluation:
        """Mean loss and metrics over `steps` steps of other data, forwards only.

        Args:
            data: as for the Trainer.
            steps: how many; None for `data.steps` if it has that, else 1.
        """
        return Evaluation.of(list(self._evaluating(data, steps)))

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
        self._warned = True  # as the report says it
        with during(self._progress, "comparing with plain JAX"):
            loss, gradient = self.value_and_grad(microbatches)
            params = whole_params(self._engine) if self._world.size > 1 else self.stage_params
            ids = self._stepper.settings.seed, self.steps_done
            with jax.transfer_guard("allow"):
                plain = PlainStep(self._engine.pipe, params, microbatches, ids)
                report = compare(plain, loss, gradient, table)
        told = self._world.gather("the check", [report.leaf_errors, report.leaf_limits])
        errors, limits = ({k: v for own in each for k, v in own.items()} for each in zip(*told, strict=True))
        lost = self._engine.library.lost_gradients
        report = replace(report, leaf_errors=errors, leaf_limits=limits, lost=lost)
        if self._world.rank == 0:
            say(report.text)
        return report

    # Files.

    def write_trace(self, path: str | Path) -> None:
        """The latest steps: FILE.json for ui.perfetto.dev, FILE.msgpack for `rrfp report` and `rrfp sim`."""
        write_trace(output_of("path", path), {"run": self._stepper.recorded})

    def write_costs(self, path: str | Path) -> None:
        """What tasks and transfers took in the latest steps, by bucket, for `schedules.Planned`; JSON.

        Before the first step nothing is written, but the path is checked. Raises as `write_trace` does.
        """
        file = output_of("path", path)
        if (table := measured(self._stepper.recorded)) is not None:
            write_json(file, table.as_json_object(), indent=1)

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
            on_error: what to do if it cannot be written: "stop", or "continue" with a warning.
            wait: False to write beside the next steps; `finish_saving` waits, as does a single process's end.
            config: plain data to keep with it; dtypes by their names.

        Raises:
            UsageError: there is nothing to save before the first step.
            TrainingError: it cannot be written, and `on_error` is "stop".
        """
        check_count("save", "keep", keep, 1)
        try:
            config = json.loads(json.dumps(config, default=plain_dtype))
        except (TypeError, ValueError) as error:
            raise UsageError(f"Trainer.save(config={shown(config)}): {error}; give plain data") from None
        if not self._engine.stages:
            raise UsageError("Trainer.save: nothing to save before the first step; call start() first")
        path, state = folder_of("Trainer.save", folder), self._stepper.state(config)
        self._stepper.saves.save(path, keep, on_error, state)
        if wait:
            self.finish_saving()

    @one_thread("finish_saving")
    def finish_saving(self) -> bool:
        """Wait for a checkpoint that is being written; raises as `save` does.

        Returns:
            Whether the latest `save` has written its checkpoint; equal on all processes.
        """
        with during(self._progress, "saving"):
            return self._stepper.saves.finish()

    @one_thread("restore")
    def restore(self, folder: str | Path, step: int | None = None, *, params_only: bool = False) -> bool:
        """Resume from the latest valid checkpoint of a folder; all processes together.

        The mesh, the number of processes, the schedule, the loss scale and the precision of messages may
        differ from when it was saved. Damaged checkpoints are skipped with a warning.

        Args:
            folder: as for `save`.
            step: of the checkpoint to take; None for the latest.
            params_only: restore parameters only, to fine-tune or to evaluate. Steps, data, loss scale and
                optimizer start afresh; the optimizer, what is frozen or tied, and the seed may differ, and
                there may be no optimizer. What a checkpoint leaves out must be read by `init` here, too.

        Returns:
            Whether there was a checkpoint.

        Raises:
            UsageError: the checkpoint is of another model, optimizer or seed, there is none of that step, or
                the folder holds something else. With `params_only` also if there is none at all, or after a
                step.
            TrainingError: all checkpoints are damaged, or that of the step is.
        """
        path = folder_of("Trainer.restore", folder)
        if step is not None:
            check_count("restore", "step", step, 0)
        if params_only and self.steps_done:
            raise UsageError(
                f"Trainer.restore(params_only=True) after {self.steps_done} steps: training begins anew with "
                f"these parameters, so restore them before the first step"
            )
        found = self._check_resume(path, step)  # before it compiles
        if params_only:
            if found is None:
                raise no_params(path)
            self._start(self._own_data("restore"))
            with during(self._progress, "restoring", str(path)), interrupts_held():
                self._stepper.saves.restore_params(path, step)
            return True
        if found is not None and found.refusal:
            raise UsageError(found.refusal)
        if found is None and step is None:
            say_none(self._world, path, self.steps_done)
        return self._resume(path, step)

    # What `rrfp_jax.runs` uses as well.

    def _evaluating(self, data: Any, steps: int | None = None) -> Generator[Sums]:
        """The steps of an evaluation one by one, so that it may be left between two of them."""
        data = as_data(data)
        count = steps_of(data) if steps is None else steps
        check_count("evaluate", "steps", count, 1)
        if not self._engine.stages:
            plan_step(data, 0)  # which is refused before anything is compiled
        self._start(data if self._data is None else self._data)
        try:
            for step in range(count):
                self._progress(Doing("validating", step, count, f"{step / count:.0%}"))
                with self._alone("evaluate"):
                    sums = self._stepper.run("evaluate", data, step).sums
                if self._stepper.settings.on_nonfinite == "stop":
                    check_losses(sums.totals, f"step {step} of an evaluation", "")
                yield sums
        finally:
            self._progress(Doing("validating", count, count))

    @one_thread("hold")
    def _hold(self, folder: Path, config: Any = None) -> bool:
        """Write a checkpoint to a folder in the host's memory; see `CheckpointWriter.hold`."""
        return self._stepper.saves.hold(folder, self._stepper.state(config))

    @one_thread("restore")
    def _resume(self, path: Path, step: int | None = None) -> bool:
        """Restore what `_check_resume` did not refuse; False, without a word, if there is no checkpoint."""
        data = self._own_data("restore")
        self._start(data)
        asked = given_hyperparameters(self._engine)
        with during(self._progress, "restoring", str(path)), interrupts_held():  # all of it, or none
            if (restored := self._stepper.saves.restore(path, step)) is None:
                return False
            self._stepper.go_on_from(*restored)
        say_restored_hyperparameters(self._engine, asked)
        if not self._stepper.is_data_of_last_step(data) and self._world.rank == 0:
            say(f"the data of step {self.steps_done - 1} is not what it was: it continues with other data")
        return True

    @one_thread("restore")
    def _check_resume(self, path: Path, step: int | None = None) -> Found | None:
        """What `restore` would find there; see `CheckpointWriter.check_resume`."""
        self._own_data("restore")
        return self._stepper.saves.check_resume(path, step)

    @property
    def _progress(self) -> Progress:
        """What is told of whatever lasts, from now on: compiling, also for shapes that are met later, too."""
        return self._engine.library.progress

    # Inside.

    @contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        """Inside, other threads are refused; the same thread may come again, as from `on_step`."""
        me = f"Trainer.{method} in thread {threading.current_thread().name!r}"
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                f"{me} while {self._user} is running: a Trainer is used by one thread at a time; wait for "
                f"the other, or hold a lock around both"
            )
        before, self._user = self._user, me
        try:
            with jax.set_mesh(None):  # whatever mesh a user has set: stages have theirs
                yield
        finally:
            self._user = before
            self._lock.release()

    @property
    def _engine(self) -> Engine:
        return self._stepper.engine

    def _started(self, asked: str) -> Engine:
        if not self._engine.stages:
            raise UsageError(f"Trainer.{asked}: there are none before the first step; call start() first")
        return self._engine

    def _require_optimizer(self) -> None:
        if self._optimizer is None:
            raise UsageError("this Trainer has no optimizer: Trainer(pipe, optax.adamw(...), ...)")

    def _own_data(self, method: str) -> Data:
        if self._data is None:
            raise UsageError(
                f"Trainer.{method}() needs data: Trainer(..., data=...), at least a list of one step's "
                f"microbatches, data=[...]: it compiles for their shapes"
            )
        return self._data

    def _start(self, data: Data, evaluate: Data | None = None) -> None:
        if self._engine.stages:
            return
        with self._alone("start"):
            plan = plan_step(data, 0)
            self._check_model(data, plan)
            self._programs = self._stepper.start(data, plan, evaluate)

    def _check_model(self, data: Data, plan: Sequence[Microbatch]) -> None:
        if not self._checked:
            self._stepper.rules(len(plan), "train")  # which refuse an order that cannot end
            check_model(self._engine, data, plan)
            self._checked = True

    def _steps(self, data: Data, count: int) -> Iterator[Report]:
        self._start(data)
        for left in reversed(range(count)):
            yield self._train(data, left)

    @one_thread("step")
    def _train(self, data: Data, left: int | None = None) -> Report:
        report = self._stepper.train(data, left)
        if self._on_step is not None:
            self._on_step(report)
        return report


def _stepper(run: RunSpec, init: InitFunction | None) -> Stepper:
    """Join the other processes, lay the stages out on the mesh, and choose what is "auto"."""
    check_jax_settings()
    layout = run.mesh.lay_out(join())
    layout.world.waits.stall_seconds = run.settings.stall_seconds
    auto, exchange = run.schedule, None
    if isinstance(auto, Auto) and auto.exchange and layout.replicas == 1:
        exchange = HintExchange(auto)
    run = predicted(run, layout)
    engine = run.engine(layout, None if init is None else FrozenBase(init))
    settings = run.settings if engine.memory.limited else run.settings.limited(run.mesh.pp)
    assert not isinstance(run.schedule, Auto), "it has been chosen"
    return Stepper(engine, settings, run.schedule, exchange)
