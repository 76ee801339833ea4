"""A pipeline on this process's devices: made, started, and run step by step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import optax

from rrfp_jax.core.group import GroupProtocol
from rrfp_jax.core.step_rules import Bucket, StepRules, bucket_name
from rrfp_jax.core.tasks import Placement
from rrfp_jax.printing import say
from rrfp_jax.runtime._jax import on_host
from rrfp_jax.runtime.engine.device import LEAD_SECONDS
from rrfp_jax.runtime.engine.loop import Driver
from rrfp_jax.runtime.engine.settings import Settings
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.mesh.topology import Layout
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.model.roles import layers_of_chunks
from rrfp_jax.runtime.programs.compiler import Compiler, compile_pool, compiled_for
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.runtime.programs.gradients import Reduction
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.runtime.programs.library import Library, phase_of
from rrfp_jax.runtime.run.consensus import Agreement, CarrierName
from rrfp_jax.runtime.run.recorder import COMPILING
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.stages import leaves as ties
from rrfp_jax.runtime.stages.leaves import Held
from rrfp_jax.runtime.stages.memory import Memory
from rrfp_jax.runtime.stages.optimizer import Optimizer
from rrfp_jax.runtime.stages.stage import Stage
from rrfp_jax.runtime.stages.staging import BuiltStages, Staging
from rrfp_jax.runtime.stages.step import (
    Inputs,
    Load,
    LoadedStep,
    ModelStep,
    StagePart,
    StepPrograms,
    Sums,
    add_up,
)
from rrfp_jax.runtime.transport.choice import TransportName, between_processes
from rrfp_jax.runtime.transport.mailed import MailedTransport
from rrfp_jax.runtime.transport.protocol import Endpoints, OneArrayCompiler, Transport, by_jit
from rrfp_jax.trace.records import Part, RecordedStep, StepTrace, TaskRecord


class EngineSpec(NamedTuple):
    """What an engine is made of."""

    pipe: Pipeline
    layout: Layout
    placement: Placement
    optimizer: optax.GradientTransformation | None
    init: InitFunction | None
    settings: Settings


def _if_room(parts: Mapping[int, ModelStep], inputs: Mapping[int, Any], put: Callable[[], None]) -> None:
    """Put data like a step's on the devices if it takes no more than the step's microbatches took."""
    if all(nbytes(inputs[s]) <= part.meter.peak for s, part in parts.items()):
        put()


def remote_of(
    layout: Layout,
    placement: Placement,
    name: TransportName = "socket",
    tied: Collection[tuple[int, int]] = (),
    compiler: OneArrayCompiler = by_jit,
) -> Transport | None:
    """What carries messages between processes, made by all of them together; None if there is only one.

    Rank 0 prints which way they take. `tied` are stage replicas that exchange tied values, in pairs.
    """
    if layout.world.size == 1:
        return None
    near = neighbours(layout, placement, tied)
    ends = Endpoints(layout.world, layout.receivers, layout.devices, near, compiler)
    made = between_processes(name, ends)
    if made.details and layout.world.rank == 0:
        say(f"messages between processes: {made.way} ({made.details})")
    return MailedTransport(ends, made.transport)


def agreement_of(layout: Layout, carrier: CarrierName, protocol: GroupProtocol) -> Agreement | None:
    """What the processes that share a stage agree by, made by all together; None if none share one."""
    return Agreement(layout.world, layout.groups, carrier, protocol) if layout.grouped else None


def neighbours(layout: Layout, placement: Placement, tied: Collection[tuple[int, int]] = ()) -> set[int]:
    """The ranks of stages before and after this process's, and of those that share a parameter with one."""
    pairs = [*tied, *((other, one) for one, other in tied)]
    found = {theirs for mine, theirs in pairs if mine in layout.devices}
    for replica, stage in map(layout.place, layout.devices):
        found |= {replica * layout.stages + other for other in placement.beside(stage)}
    return {rank for stage_replica in found for rank in layout.groups[stage_replica]} - {layout.world.rank}


class Engine:
    """Everything that a step runs on in this process. Nothing is allocated or compiled before `start`.

    Attributes:
        chunks: by stage, of all processes, the layers of each of its chunks.
        compilers: by stage replica of this process; see `Layout`.
        staging: makes its stages.
        given_up: whether another engine goes on, or should have.
        memory: what all stages need, and may hold.
    """

    def __init__(
        self, spec: EngineSpec, split: Sequence[int] | None, executables: Executables | None = None
    ) -> None:
        self.spec, settings = spec, spec.settings
        self.pipe, self.layout, self.placement = spec.pipe, spec.layout, spec.placement
        self.world = spec.layout.world
        self.chunks = layers_of_chunks(len(self.pipe), self.placement, split)
        self.executables = executables or Executables(settings.executables)
        meshes = self.layout.stage_meshes.items()
        self.compilers = {s: Compiler(stage_mesh, self.executables) for s, stage_mesh in meshes}
        own = self.layout.virtual_stages(self.placement, self.chunks)
        how = settings.remat, settings.equal_schedules, settings.layers_per_program
        self.library = Library(self.pipe, own, self.compilers, *how)
        foresees = settings.dispatch == "foreseen" and not settings.delays
        self.memory = Memory(settings.budget, self.layout, self.library, foresees)
        self._inputs = Inputs(self.layout, settings.seed)
        given = spec.optimizer, settings.seed, spec.init
        self.staging = Staging(self.pipe, self.layout, self.chunks, self.library, self.executables, *given)
        self.stages: Mapping[int, Stage] = {}  # by stage replica
        self.optimizers: Sequence[Optimizer] = ()
        self._without_optimizer: Sequence[Stage] = ()  # stages that own no parameter
        self._reductions: Mapping[int, Reduction] = {}
        self._has_gradients = False  # whether the stages' sums may be other than zero
        self._numbers: dict[Bucket, int] = {}  # of every bucket that a step has had
        self._updated: float | None = None  # when the latest update was dispatched, if one was
        self._known: StepPrograms | None = None  # of the latest step
        self._ties: Sequence[ties.LeafTransfer] = ()
        self.driver: Driver  # once started
        self._closing: weakref.finalize[..., Any]  # of `run_on`
        self.given_up = False

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
        compiler, settings, world = partial(compiled_for, self.executables), self.spec.settings, self.world
        apart = {(tie.source, tie.target) for tie in tied if tie.source != tie.target}
        driver = Driver(
            self.layout.devices,
            world,
            remote_of(self.layout, self.placement, settings.transport, apart, compiler),
            settings.stall_seconds,
            settings.injected.queue(),
            agreement=agreement_of(self.layout, settings.agreement, settings.protocol),
            dispatch=settings.dispatch,
            delays=settings.injected.arrivals(self.placement, rank=world.rank),
            name=self.layout.name,
        )
        driver.reserve(self.library.arrivals(phase_of(rules)))
        self.run_on(driver, made, tied, [rules])
        self.staging.connect()
        self.stages = made.stages  # last: says that everything has been started

    def run_on(
        self, driver: Driver, made: BuiltStages, tied: Sequence[ties.LeafTransfer], rules: Sequence[StepRules]
    ) -> None:
        """Take what a start or a move has made; `rules` are of steps that there may be, first of training."""
        self.driver, self._ties = driver, tied
        self.optimizers, self._reductions = made.optimizers, made.reductions
        updated = {stage.index for optimizer in made.optimizers for stage in optimizer.stages}
        self._without_optimizer = [stage for s, stage in sorted(made.stages.items()) if s not in updated]
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
        self.stages, self.optimizers, self._without_optimizer, self.given_up = {}, (), (), True
        self.memory.forget()
        return driver, held

    def prepare(self, buckets: Sequence[Bucket], rules: StepRules) -> None:
        """Compile what a step with these buckets needs and is not there yet; see `Library.prepare`."""
        self._known = None  # what may be held depends on all steps that there may be
        if self.library.prepare(buckets, rules):
            self.driver.reserve(self.library.arrivals(phase_of(rules)))

    def programs_of(self, rules: StepRules, buckets: Sequence[Bucket]) -> StepPrograms:
        """What a step with these rules and buckets runs, compiled first if it has not been."""
        known = self._known
        if known is not None and (known.rules, known.buckets) == (rules, buckets):
            return known
        self.prepare(buckets, rules)
        layout, placement, phase = self.layout, self.placement, phase_of(rules)
        distinct = list(dict.fromkeys(buckets))
        numbers = [distinct.index(bucket) for bucket in buckets]
        shapes = [self._numbers.setdefault(bucket, len(self._numbers)) for bucket in buckets]
        of_bucket = [self.library.programs(bucket, phase) for bucket in distinct]
        programs = [of_bucket[number] for number in numbers]
        stages = {}
        for s in self.stages:
            places = [placement.virtual_stage(s % layout.stages, c) for c in range(placement.chunks)]
            share = slice(s // layout.stages, None, layout.replicas)  # of the step's microbatches
            stages[s] = StagePart(places, [of[s] for of in of_bucket], numbers[share], shapes[share])
        here = [layout.stages_of(replica) for replica in range(layout.replicas)]
        self._known = StepPrograms(
            phase=phase,
            rules=rules,
            buckets=buckets,
            names=[bucket_name(bucket) for bucket in buckets],
            memory=self.memory.of_step(rules, buckets),
            programs=programs,
            fields=[self._inputs.reads(bucket, j, programs[j]) for j, bucket in enumerate(buckets)],
            readers=[{s: own.reads[s] for s in here[j % len(here)]} for j, own in enumerate(programs)],
            stages=stages,
        )
        return self._known

    def load(self, step: int, known: StepPrograms, load: Load) -> LoadedStep:
        """Put a step's data on the devices.

        Args:
            step: its number, which random keys depend on.
            known: what it runs.
            load: gives the arrays of all microbatches; asked once, and only for what a stage here reads.
        """
        began = perf_counter()
        inputs = self._inputs.load(step, known, load)  # kept to the end, which ledgers count
        return LoadedStep(step=step, known=known, inputs=inputs, seconds=perf_counter() - began)

    def run(
        self, loaded: LoadedStep, loss_scale: float, waited: float, meanwhile: Sequence[Callable[[], None]]
    ) -> Sums:
        """Run one step; the gradients are then in the stages' sums, unless it has forwards only.

        All processes do so together, and all get the same sums.

        Args:
            loaded: what `load` gave.
            loss_scale: by which gradients are multiplied.
            waited: that its data has been waited for already (s).
            meanwhile: what else there is to do; see `Driver.run`. The last puts data like that of `loaded` on
                the devices, where microbatches were; it is left out if they took less.

        Raises:
            TrainingError: see `Driver.run`.
        """
        step, known, inputs = loaded.step, loaded.known, loaded.inputs
        phase, stages, memory = known.phase, self.stages.items(), known.memory
        for stage in self.stages.values():
            stage.scale_loss(loss_scale)
        final = phase == "train" and not (self._reductions or self._ties)
        parts = {s: ModelStep(stage, phase, known.stages[s], inputs[s], final) for s, stage in stages}
        params = {s: [*chain.from_iterable(stage.leaves)] for s, stage in stages}
        if phase == "train":
            if self._has_gradients:  # of a step that was broken off, or not applied
                self.reset_gradients()
            self._has_gradients = True
        if errands := [*meanwhile]:
            errands.append(partial(_if_room, parts, inputs, errands.pop()))
        update = self._updated, params
        records = self.driver.run(known.rules, step, parts, memory.budgets, *update, memory.early, errands)
        if phase == "train":
            if self._reductions:
                if self.driver.remote is not None and self.layout.crossed:
                    # A sum that a process waits in may need a stage that still waits for its messages.
                    self.world.gather("the end of all tasks", None)
                self._add_replicas()
            if self._ties:
                ties.collect_gradients(self._ties, self.stages, self.driver.exchange)
        mine = self._results(step, known, parts, records) | {"load_seconds": waited + loaded.seconds}
        told = mine if self.layout.reported else None  # of every stage replica once
        gathered = self.driver.gather(f"the results of {phase} step {step}", told, records, step)
        results = [*filter(None, gathered)]
        return add_up(results, self._recorded(step, known, results), known.memory.totals)

    def _results(
        self, step: int, known: StepPrograms, parts: Mapping[int, ModelStep], records: Sequence[TaskRecord]
    ) -> dict[str, Any]:
        """What this process has found, as plain data that `add_up` takes; replicas are alike."""
        layout, training = self.layout, known.phase == "train"
        statistics, norms = [], []
        for s, part in parts.items():
            replica, stage = divmod(s, layout.stages)
            for (kind, chunk, i), vector in part.statistics.items():
                microbatch = i * layout.replicas + replica
                metrics = known.programs[microbatch][s][chunk].tasks[kind].statistics
                virtual_stage = known.stages[s].virtual_stages[chunk]
                statistics.append([virtual_stage, microbatch, int(kind), metrics, vector])
            if training and not replica:
                norms.append([stage, self.stages[s].norms() if part.norms is None else part.norms])
        tells = [(of, own.state) for own in self.optimizers if training and (of := own.hyperparams)]
        hyperparams: list[list[Any]] = [[of.names, of(state)] for of, state in tells[:1]]
        self._read(step, statistics)
        by_replica = self._by_replica(records)  # while devices work out the norms
        self._read(step, [*norms, *hyperparams])
        return {
            "hyperparams": dict(zip(*hyperparams[0], strict=True)) if hyperparams else {},
            "norms": norms,
            "peaks": [[s, part.meter.peak] for s, part in parts.items()],
            "virtual_stages": statistics,
            "parts": by_replica,
        }

    def _read(self, step: int, rows: Sequence[list[Any]]) -> None:
        """Fetch the last column of these rows from the devices."""
        arrays = [row[-1] for row in rows]
        self.world.await_ready(f"the results of step {step}", arrays)
        for row, array in zip(rows, on_host(arrays), strict=True):
            row[-1] = array.tolist()

    def _by_replica(self, records: Sequence[TaskRecord]) -> list[tuple[int, Part]]:
        """This process's records by replica."""
        clock, own = self.world.clock, dict[int, list[TaskRecord]]()
        if self.layout.replicas == 1:
            return [(0, Part.of(records, *clock))]
        for record in records:
            replica, stage = self.layout.place(record.stage)
            own.setdefault(replica, []).append(record._replace(stage=stage))
        return [(replica, Part.of(found, *clock)) for replica, found in own.items()]

    def _recorded(self, step: int, known: StepPrograms, results: Sequence[Mapping[str, Any]]) -> RecordedStep:
        """The step of the replica that ended last, and how busy all were, from all processes' results."""
        layout, parts = self.layout, dict[int, list[Part]]()
        for result in results:
            for replica, plain in result["parts"]:
                parts.setdefault(replica, []).append(Part(*plain))
        last = max(parts, key=lambda replica: max(part.end for part in parts[replica]))
        trace, replicas = StepTrace(step, known.rules.placement, parts[last], last), range(layout.replicas)
        if len(replicas) > 1:
            busy = [replace(trace, parts=parts[replica]).busy_seconds[0] for replica in replicas]
            trace = replace(trace, busy_by_replica=busy)
        first = last * layout.stages  # of its stage replicas
        return RecordedStep(
            trace=trace,
            rules=known.rules,
            budgets=known.memory.budgets[first : first + layout.stages] or None,
            buckets=known.names[last :: layout.replicas],
            grouped=layout.grouped,
            lead=LEAD_SECONDS,
        )

    def _add_replicas(self) -> None:
        """Give every replica of this process's stages the sum of all replicas' gradients."""
        for stage, reduction in self._reductions.items():
            own = [self.stages[number] for number in self.layout.replicas_of(stage)]
            self.world.recorder.enters("the sum of the replicas' gradients")
            for of, totals in zip(own, reduction([of.sums for of in own]), strict=True):
                of.replace_sums(totals)
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
        for stage in self._without_optimizer:
            stage.reset_gradients()
        self._has_gradients, self._updated = False, perf_counter()
        if self._ties:
            ties.spread_values(self._ties, self.stages, self.driver.exchange)

    def gradients(self) -> Params:
        """The gradient sums of this process's stages after `run`; of tied parameters the sum over all."""
        ties.spread_gradients(self._ties, self.stages, self.driver.exchange)
        return {layer: own for stage in self.distinct for layer, own in stage.gradients.items()}

    def reset_gradients(self) -> None:
        """Zero every stage's gradient sums."""
        for stage in self.stages.values():
            stage.reset_gradients()
        self._has_gradients = False
