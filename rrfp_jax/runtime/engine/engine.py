"""A pipeline on this process's devices: made, started, and run step by step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import jax
import numpy as np
import optax

from rrfp_jax.core.step_rules import Bucket, StepRules, bucket_name
from rrfp_jax.core.tasks import Placement
from rrfp_jax.runtime.engine.device import LEAD_SECONDS
from rrfp_jax.runtime.engine.links import driver_of
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.engine.settings import Settings
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.metrics import Name
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.model.roles import layers_of_chunks
from rrfp_jax.runtime.programs.compiler import Compiler, compile_pool, compiled_for
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.runtime.programs.gradients import Reduction
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.runtime.programs.library import Library, Phase, RankPrograms, phase_of
from rrfp_jax.runtime.run.recorder import COMPILING
from rrfp_jax.runtime.stages import leaves as ties
from rrfp_jax.runtime.stages.leaves import Held
from rrfp_jax.runtime.stages.memory import Memory, StepMemory
from rrfp_jax.runtime.stages.optimizer import Optimizer
from rrfp_jax.runtime.stages.stage import Stage
from rrfp_jax.runtime.stages.staging import BuiltStages, Staging
from rrfp_jax.runtime.stages.step import Inputs, Load, ModelStep, Sums, add_up, not_finite
from rrfp_jax.trace.records import Part, RecordedStep, StepTrace, TaskRecord, busy_of


def as_text(engine: Engine) -> dict[str, str]:
    """What an engine is made of, as far as another process can have it otherwise; by name."""
    pipe, layout = engine.pipe, engine.layout
    found = {
        "split": engine.split,
        "frozen": pipe.frozen,
        "tied": pipe.tied,
        "sharding": [*pipe.sharding.items()],  # the first that matches counts
        "carry": pipe.carry,
        "mesh": (layout.widths, layout.replicas, layout.shard_optimizer),
        "jax": jax.__version__,
    }
    return {name: str(value) for name, value in found.items()}


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What an engine is made of."""

    pipe: Pipeline
    layout: Layout
    placement: Placement
    optimizer: optax.GradientTransformation | None
    init: InitFunction | None
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """A step that has begun: which programs run on what here, by stage replica or microbatch.

    Attributes:
        inputs: held until the step has ended, which is what ledgers count.
    """

    step: int
    rules: StepRules
    phase: Phase
    parts: Mapping[int, ModelStep]
    buckets: Sequence[str]
    programs: Sequence[RankPrograms]
    memory: StepMemory
    load_seconds: float
    inputs: Mapping[int, Any]

    def results(
        self,
        stages: Mapping[int, Stage],
        optimizers: Sequence[Optimizer],
        layout: Layout,
        records: Sequence[TaskRecord],
    ) -> dict[str, Any]:
        """What this process has found, as plain data that `sums.add_up` takes."""
        vectors = {stage_replica: part.statistics for stage_replica, part in self.parts.items()}
        first = {s: stage for s, stage in stages.items() if s < layout.stages}  # replicas are alike
        training = self.phase == "train"
        norms = {s: stage.norms() for s, stage in first.items()} if training else {}
        told = [(own.hyperparams, own.state) for own in optimizers if training and own.hyperparams]
        values = [hyperparams(state) for hyperparams, state in told]
        numbers = vectors, norms, values
        layout.world.await_ready(f"the results of step {self.step}", jax.tree.leaves(numbers))
        vectors, norms, values = on_host(numbers)
        found = [
            dict(zip(of.names, own.tolist(), strict=True)) for (of, _), own in zip(told, values, strict=True)
        ]
        return {
            "hyperparams": found[0] if found else {},  # replicas are alike
            "norms": [(stage, found.tolist()) for stage, found in norms.items()],
            "peaks": [(stage_replica, part.meter.peak) for stage_replica, part in self.parts.items()],
            "virtual_stages": self._statistics(vectors, layout),
            "parts": _by_replica(records, layout),
            "load_seconds": self.load_seconds,
        }

    def _statistics(
        self, vectors: Mapping[int, Mapping[tuple[int, int], Any]], layout: Layout
    ) -> list[tuple[int, int, Sequence[Name] | None, list[float]]]:
        """Virtual stage, microbatch, metrics and numbers of the statistics that each forward gave."""
        found = []
        for stage_replica, own in vectors.items():
            replica, stage = layout.place(stage_replica)
            for (chunk, i), vector in own.items():
                microbatch = i * layout.replicas + replica
                names = self.programs[microbatch][stage_replica][chunk].statistics
                virtual_stage = self.rules.placement.virtual_stage(stage, chunk)
                found.append((virtual_stage, microbatch, names, vector.tolist()))
        return found

    def recorded(self, results: Sequence[Mapping[str, Any]], layout: Layout) -> RecordedStep:
        """The step of the replica that ended last, and how busy all were, from all processes' results."""
        parts = [(replica, Part(*plain)) for result in results for replica, plain in result["parts"]]
        last, _ = max(parts, key=lambda pair: pair[1].end)
        own = [part for replica, part in parts if replica == last]
        first = last * layout.stages  # of its stage replicas
        return RecordedStep(
            trace=StepTrace(self.step, self.rules.placement, own, last, _busy(parts, layout)),
            rules=self.rules,
            budgets=self.memory.budgets[first : first + layout.stages] or None,
            buckets=layout.share(first, self.buckets),
            grouped=layout.grouped,
            lead=LEAD_SECONDS,
        )


def on_host(tree: Any) -> Any:
    """`jax.device_get` of arrays, at a fifth of its cost on the host; likewise no guard is against it."""
    with jax.transfer_guard_device_to_host("allow"):
        for leaf in jax.tree.leaves(tree):
            leaf.copy_to_host_async()
        return jax.tree.map(np.asarray, tree)


def _busy(parts: Sequence[tuple[int, Part]], layout: Layout) -> list[list[float]]:
    """The busy seconds of the replicas' stages, of parts with their replicas; empty for one replica."""
    replicas = range(layout.replicas) if layout.replicas > 1 else ()
    own = [[part for of, part in parts if of == replica] for replica in replicas]
    return [[busy_of(found, stage) for stage in range(layout.stages)] for found in own]


def _by_replica(records: Sequence[TaskRecord], layout: Layout) -> list[Any]:
    """This process's records by replica, as plain data."""
    clock = layout.world.clock
    if layout.replicas == 1:
        return [(0, Part.of(records, *clock).plain())]
    own: dict[int, list[TaskRecord]] = {}
    for record in records:
        replica, stage = layout.place(record.stage)
        own.setdefault(replica, []).append(record._replace(stage=stage))
    return [(replica, Part.of(found, *clock).plain()) for replica, found in own.items()]


class Engine:
    """Everything that a step runs on in this process. Nothing is allocated or compiled before `start`.

    Attributes:
        spec, executables: as given.
        chunks: by stage, of all processes, the layers of each of its chunks.
        compilers: by stage replica of this process; see `Layout`.
        library: the compiled programs.
        staging: makes its stages.
        given_up: whether another engine goes on, or should have.
        memory: what all stages need, and may hold.

    Raises:
        UsageError: more virtual stages than layers, a split that does not add up.
    """

    def __init__(
        self, spec: EngineSpec, split: Sequence[int] | None, executables: Executables | None = None
    ) -> None:
        self.spec, settings = spec, spec.settings
        self.pipe, self.layout, self.placement = spec.pipe, spec.layout, spec.placement
        self.world = spec.layout.world
        self.chunks = layers_of_chunks(len(self.pipe), self.placement, split)
        self.executables = executables or Executables(settings.execution.executables)
        self.compilers = {
            stage_replica: Compiler(stage_mesh, self.executables)
            for stage_replica, stage_mesh in self.layout.stage_meshes.items()
        }
        own = self.layout.virtual_stages(self.placement, self.chunks)
        remat, halves = settings.memory.remat, settings.numerics.equal_schedules
        self.library = Library(self.pipe, own, self.compilers, remat, halves)
        self.memory = Memory(settings.memory.budget, self.layout, self.library)
        self._inputs = Inputs(self.layout, settings.numerics.seed)
        self.staging = Staging(
            *(self.pipe, self.layout, self.chunks, self.library, self.executables),
            *(spec.optimizer, settings.numerics.seed, spec.init),
        )
        self.stages: Mapping[int, Stage] = {}  # by stage replica
        self.optimizers: Sequence[Optimizer] = ()
        self._reductions: Mapping[int, Reduction] = {}
        self._has_gradients = False  # whether the stages' sums may be other than zero
        self._numbers: dict[Bucket, int] = {}  # of every bucket that a step has had
        self._ties: Sequence[ties.LeafTransfer] = ()
        self._driver: Driver | None = None
        self._closing: weakref.finalize[..., Any]  # of `run_on`
        self.given_up = False

    @property
    def driver(self) -> Driver:
        """The driver, once started."""
        if self._driver is None:
            raise RuntimeError("the engine has not been started")
        return self._driver

    @property
    def split(self) -> list[int]:
        """Layers per virtual stage, in the model's order."""
        places = map(self.placement.place, range(self.placement.last + 1))
        return [len(self.chunks[stage][chunk]) for stage, chunk in places]

    @property
    def alone(self) -> Compiler:
        """For programs of this process alone, on its first device."""
        stage_mesh = next(iter(self.layout.stage_meshes.values()))
        return self.staging.compiler(StageMesh((stage_mesh.device,)))

    @property
    def distinct(self) -> list[Stage]:
        """This process's stages, of one replica where it has several."""
        found: dict[int, Stage] = {}
        for stage_replica, stage in self.stages.items():
            found.setdefault(self.layout.place(stage_replica)[1], stage)
        return list(found.values())

    def start(self, buckets: Sequence[Bucket], rules: StepRules) -> None:
        """Compile for a first step and allocate parameters and optimizer state, once."""
        self.world.recorder.phase(COMPILING)
        for bucket in buckets:
            self.library.examine(bucket)
        with compile_pool() as pool:
            finish = self.staging.begin(pool)
            self.library.prepare(buckets, rules)
            made = finish()
        tied = ties.locate(self.library, self.chunks, self.layout)
        compiler = partial(compiled_for, self.executables)
        settings, apart = self.spec.settings, ties.distant_pairs(tied)
        driver = driver_of(self.layout, self.placement, settings, apart, compiler)
        driver.reserve(self.library.arrivals(phase_of(rules)))
        self.run_on(driver, made, tied, [rules])
        self.staging.connect()
        self.stages = made.stages  # last: says that everything has been started

    def run_on(
        self, driver: Driver, made: BuiltStages, tied: Sequence[ties.LeafTransfer], rules: Sequence[StepRules]
    ) -> None:
        """Take what a start or a move has made; `rules` are of steps that there may be, first of training."""
        self._driver, self._ties = driver, tied
        self.optimizers, self._reductions = made.optimizers, made.reductions
        self._closing = weakref.finalize(self, driver.close)
        self._closing.atexit = False  # the mailbox knows its parts until then
        driver.reserve(ties.arrivals(tied, made.stages))
        for own in rules:
            driver.reserve(self.library.arrivals(phase_of(own)))
        self.memory.start(list(made.stages.values()), made.optimizers, rules[0], lambda: driver.reserve({}))

    def give_up(self) -> tuple[Driver, Held]:
        """What another engine goes on with: this one has nothing any more, and must not be used."""
        driver, held = self.driver, self.staging.held(self.stages, self.optimizers)
        self._closing.detach()
        self.stages, self.optimizers, self.given_up = {}, (), True
        self.memory.forget()
        return driver, held

    def prepare(self, buckets: Sequence[Bucket], rules: StepRules) -> None:
        """Compile what a step with these buckets needs and is not there yet; see `Library.prepare`."""
        if self.library.prepare(buckets, rules):
            self.driver.reserve(self.library.arrivals(phase_of(rules)))

    def run(
        self,
        step: int,
        rules: StepRules,
        buckets: Sequence[Bucket],
        load: Load,
        loss_scale: float = 1.0,
        waited_seconds: float = 0.0,
    ) -> Sums:
        """Run one step; the gradients are then in the stages' sums, unless it has forwards only.

        All processes do so together, and all get the same sums.

        Args:
            step: number of the step, which random keys depend on.
            rules: of the step.
            buckets: of each microbatch; compiled first if they have not been.
            load: gives the arrays of all microbatches; asked once, and only for what a stage here reads.
            loss_scale: by which gradients are multiplied.
            waited_seconds: that its data has been waited for already.

        Raises:
            TrainingError: see `Driver.run`.
        """
        for stage in self.stages.values():
            stage.scale_loss(loss_scale)
        run = self._begin(step, rules, buckets, load, waited_seconds)
        records = self.driver.run(rules, step, run.parts, run.memory.budgets)
        return self._settle(run, records)

    def _begin(
        self, step: int, rules: StepRules, buckets: Sequence[Bucket], load: Load, waited_seconds: float
    ) -> StepRun:
        """Everything that is there before the first task: programs, data, zeroed sums; see `run`."""
        phase = phase_of(rules)
        self.prepare(buckets, rules)
        memory = self.memory.of_step(rules, buckets)
        distinct = list(dict.fromkeys(buckets))
        numbers = [distinct.index(bucket) for bucket in buckets]
        lasting = [self._numbers.setdefault(bucket, len(self._numbers)) for bucket in buckets]
        of_bucket = [self.library.programs(bucket, phase) for bucket in distinct]
        programs = [of_bucket[number] for number in numbers]
        began = perf_counter()
        inputs = self._inputs.load(step, buckets, programs, load)
        load_seconds = waited_seconds + perf_counter() - began
        parts = {}
        for stage_replica, stage in self.stages.items():
            own = [of[stage_replica] for of in of_bucket]
            share = self.layout.share(stage_replica, numbers)
            shapes = self.layout.share(stage_replica, lasting)
            parts[stage_replica] = ModelStep(stage, phase, own, share, inputs[stage_replica], shapes)
        params = jax.tree.leaves([stage.leaves for stage in self.stages.values()])
        self.world.await_ready("the last update", params)  # which is neither idle time nor compute
        if phase == "train":
            if self._has_gradients:  # of a step that was broken off, or not applied
                self.reset_gradients()
            self._has_gradients = True
        return StepRun(
            step=step,
            rules=rules,
            phase=phase,
            parts=parts,
            buckets=[bucket_name(bucket) for bucket in buckets],
            programs=programs,
            memory=memory,
            load_seconds=load_seconds,
            inputs=inputs,
        )

    def _settle(self, run: StepRun, records: Sequence[TaskRecord]) -> Sums:
        """Add up what replicas, tied parameters and processes have found, once all tasks have ended."""
        if run.phase == "train":
            self._add_replicas()
            if self._ties:
                ties.collect_gradients(self._ties, self.stages, self.driver.exchange)
        mine = run.results(self.stages, self.optimizers, self.layout, records)
        told = mine if self.layout.reported else None  # of every stage replica once
        gathered = self.driver.gather(f"the results of {run.phase} step {run.step}", told, records, run.step)
        results = [result for result in gathered if result is not None]
        return add_up(results, len(run.programs), run.recorded(results, self.layout), run.memory.totals)

    def _add_replicas(self) -> None:
        """Give every replica of this process's stages the sum of all replicas' gradients."""
        for stage, reduction in self._reductions.items():
            own = [self.stages[number] for number in self.layout.replicas_of(stage)]
            self.world.recorder.enters("the sum of the replicas' gradients")
            for of, totals in zip(own, reduction([of.sums for of in own]), strict=True):
                of.replace_sums(totals)
        if self._reductions:
            sums = [array for stage in self.stages.values() for array in stage.sums]
            self.world.await_ready("the gradients of other replicas", sums)

    def reads(self, bucket: Bucket, microbatch: int) -> frozenset[str]:
        """The fields that this process loads of a microbatch in training; none before it is compiled."""
        if bucket not in self.library.buckets("train"):
            return frozenset()
        return self._inputs.reads(bucket, microbatch, self.library.programs(bucket, "train"))

    def update(self, scale: float) -> None:
        """One optimizer step on every stage with the gradient sums times `scale`."""
        self.world.recorder.enters("the optimizer's update")
        for optimizer in self.optimizers:
            optimizer.update(scale)
        updated = {stage.index for optimizer in self.optimizers for stage in optimizer.stages}
        for stage_replica in sorted(self.stages.keys() - updated):  # they own no parameter
            self.stages[stage_replica].reset_gradients()
        self._has_gradients = False
        if self._ties:
            ties.spread_values(self._ties, self.stages, self.driver.exchange)

    def gradients(self) -> Params:
        """The gradient sums of this process's stages after `run`; of tied parameters the sum over all."""
        ties.spread_gradients(self._ties, self.stages, self.driver.exchange)
        return {layer: own for stage in self.distinct for layer, own in stage.gradients.items()}

    def not_finite(self) -> str:
        """Where gradient sums are not finite after `run`; see `sums.not_finite`."""
        return not_finite(self.stages, self.layout)

    def reset_gradients(self) -> None:
        """Zero every stage's gradient sums."""
        for stage in self.stages.values():
            stage.reset_gradients()
        self._has_gradients = False
