"""A pipeline on this process's devices: where layers go, stages, programs per shape bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from rrfp_jax.core.rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.core.trace import Part, StepTrace
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.agreement import Terms
from rrfp_jax.runtime.autodiff.remat import check_remat
from rrfp_jax.runtime.budget import Setting
from rrfp_jax.runtime.compiling import Compiler
from rrfp_jax.runtime.delays import Delays
from rrfp_jax.runtime.driver import Driver
from rrfp_jax.runtime.exchange import exchange
from rrfp_jax.runtime.executables import Executables
from rrfp_jax.runtime.initial import InitFunction, initial_params
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.library import Bucket, Library, StagePrograms, compile_pool, phase_of, specs_of
from rrfp_jax.runtime.memory import Memory
from rrfp_jax.runtime.pipeline import IDS, Pipeline, split_evenly
from rrfp_jax.runtime.roles import LeafRoles
from rrfp_jax.runtime.stage import ModelStep, Stage
from rrfp_jax.runtime.sums import Sums, add_up
from rrfp_jax.runtime.ties import Tie, collect_gradients, locate, spread_gradients, spread_values
from rrfp_jax.runtime.topology import Layout
from rrfp_jax.runtime.update import UpdatePrograms

Load: TypeAlias = Callable[[Sequence[frozenset[str]]], Sequence[Mapping[str, Any]]]
"""The fields wanted of each microbatch -> their arrays by name."""


class Engine:
    """Everything that a step runs on in this process. Nothing is allocated or compiled before `start`.

    Args:
        pipe: the model.
        layout: where the stages are; this engine has those of its process.
        placement: which stage has which pieces of the model.
        split: layers per piece, in the model's order; None for an even split.
        remat: what backwards compute again; see `autodiff/remat.py`.
        optimizer: None if the model is never updated.
        seed: of initial values and random keys, 0 <= seed < 2**32.
        init: initial values from elsewhere, per leaf.
        stall_seconds: see `Driver`.
        delays: to inject.
        budget: bytes of each device for microbatches in flight.
        executables: where compiled programs are kept.
        terms: by which the processes of a stage agree, where there are several.

    Attributes:
        chunks: by stage, of all processes, the layers of each of its chunks.
        compilers: by stage of this process.
        library: the compiled programs.
        memory: what all stages need, and may hold.

    Raises:
        UsageError: more pieces than layers, a split that does not add up, an unknown remat, a seed out of
            range.
    """

    def __init__(
        self,
        pipe: Pipeline,
        layout: Layout,
        placement: Placement,
        *,
        split: Sequence[int] | None,
        remat: str,
        optimizer: optax.GradientTransformation | None,
        seed: int,
        init: InitFunction | None,
        stall_seconds: float,
        delays: Delays,
        budget: Setting,
        executables: Executables,
        terms: Terms,
    ) -> None:
        self.pipe = pipe
        self.layout, self.world, self.placement = layout, layout.world, placement
        self.chunks = layers_of_chunks(len(pipe), placement, split)
        if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
            raise UsageError(f"seed={seed!r}: give a whole number from 0 to {2**32 - 1}")
        self._optimizer, self._seed, self._init = optimizer, seed, init
        self._stall_seconds, self._delays, self._terms = stall_seconds, delays, terms
        check_remat(remat)
        self.remat = remat
        self.compilers = {s: Compiler(device, executables) for s, device in layout.devices.items()}
        self.library = Library(pipe, {s: self.chunks[s] for s in layout.devices}, self.compilers, remat)
        self.memory = Memory(budget, layout, self.library)
        self.stages: dict[int, Stage] = {}
        self._has_gradients = False  # whether the stages' sums may be other than zero
        self._ties: Sequence[Tie] = ()
        self._driver: Driver | None = None

    @property
    def driver(self) -> Driver:
        """The driver, once started."""
        if self._driver is None:
            raise RuntimeError("the engine has not been started")
        return self._driver

    def as_text(self) -> dict[str, str]:
        """What must be equal in all processes of the run, by name."""
        found = {
            "split": [[len(layers) for layers in chunks] for chunks in self.chunks],
            "seed": self._seed,
            "remat": self.remat,
            "frozen": self.pipe.frozen,
            "tied": self.pipe.tied,
            "delays": self._delays,
            "jax": jax.__version__,
        }
        return {name: str(value) for name, value in found.items()}

    def all_initial_params(self) -> Params:
        """Initial parameters of all layers, on this process's first device."""
        return self._initial_params(range(len(self.pipe)), next(iter(self.compilers.values())))

    def start(self, buckets: Sequence[Bucket], rules: StepRules) -> None:
        """Compile for a first step and allocate parameters and optimizer state, once."""
        self.world.box.phase("compiling")
        for bucket in buckets:
            self.library.examine(bucket)
        stages = list(self.layout.devices)
        with compile_pool() as pool:
            updates = pool.map(self._compile_updates, stages)
            params = pool.map(self._params_of_chunks, stages)
            self.library.prepare(buckets, rules)
            made = {
                s: Stage(s, self.chunks[s], self.layout.devices[s], own, self._roles(s), update)
                for s, own, update in zip(stages, params, updates, strict=True)
            }
        self._ties = locate(self.library.params, self.chunks, self.library.roles.ties)
        self._transport = self.layout.transport(
            self.placement
        )  # delays are injected into tasks' messages only
        self._driver = Driver(
            self.layout.devices,
            self.world,
            self._delays.transport(self._transport, self.placement, rank=self.world.rank),
            self._stall_seconds,
            self._delays.queue(),
            agreement=self.layout.agreement(self._terms),
        )
        self.memory.start(list(made.values()), rules)
        self.stages = made  # last: says that everything has been started

    def run(
        self,
        step: int,
        rules: StepRules,
        buckets: Sequence[Bucket],
        load: Load,
        loss_scale: float = 1.0,
    ) -> Sums:
        """Run one step; the gradients are then in the stages' sums, unless it has forwards only.

        All processes do so together, and all get the same sums.

        Args:
            step: number of the step, which random keys depend on.
            rules: of the step.
            buckets: of each microbatch; compiled first if they have not been.
            load: gives the arrays of all microbatches; asked once, and only for what a stage here reads.
            loss_scale: by which gradients are multiplied.

        Raises:
            TrainingError: see `Driver.run`.
        """
        phase = phase_of(rules)
        self.library.prepare(buckets, rules)
        memory = self.memory.of_step(rules, buckets)
        distinct = list(dict.fromkeys(buckets))
        numbers = [distinct.index(bucket) for bucket in buckets]
        for stage in self.stages.values():
            stage.scale_loss(loss_scale)
        programs = [self.library.programs(bucket, phase) for bucket in distinct]
        began = perf_counter()
        inputs = self._load(step, buckets, [programs[n] for n in numbers], load)
        load_seconds = perf_counter() - began
        parts = {
            s: ModelStep(stage, phase, [own[s] for own in programs], numbers, inputs[s])
            for s, stage in self.stages.items()
        }
        for stage in self.stages.values():  # so that the last update counts neither as idle nor as compute
            jax.block_until_ready(stage.leaves)
        if phase == "train":
            if self._has_gradients:  # of a step that was broken off, or not applied
                self.reset_gradients()
            self._has_gradients = True
        records = self.driver.run(rules, step, parts, memory.budgets)
        norms = {}
        if phase == "train":
            collect_gradients(self._ties, self.stages, self._exchange)
            norms = {s: stage.norms() for s, stage in self.stages.items()}
        found, norms = jax.device_get(({s: part.statistics for s, part in parts.items()}, norms))
        part = Part.of(records, *self.world.clock)
        mine: dict[str, Any] = {"part": part.plain(), "norms": [(s, n.tolist()) for s, n in norms.items()]}
        mine["load_seconds"] = load_seconds
        mine["peaks"] = [(s, part.meter.peak) for s, part in parts.items()]
        mine["pieces"] = [
            (self.placement.virtual_stage(s, c), j, programs[numbers[j]][s][c].statistics, vector.tolist())
            for s, vectors in found.items()
            for (c, j), vector in vectors.items()
        ]
        agreement = self.driver.agreement
        account = agreement.account(records) if agreement is not None else None
        told = [mine if self.layout.member == 0 else None, account]  # of every stage once
        gathered = self.world.gather(f"the results of {phase} step {step}", told)
        if agreement is not None:
            agreement.settle([account for _, account in gathered], step)
        results = [result for result, _ in gathered if result is not None]
        trace = StepTrace(step, rules.placement, [Part(*result["part"]) for result in results])
        return add_up(results, len(buckets), trace, memory.totals)

    def reads(self, bucket: Bucket) -> frozenset[str]:
        """The fields that this process loads of such a microbatch in training; none before it is compiled."""
        if bucket not in self.library.buckets("train"):
            return frozenset()
        return _fields_read(bucket, self.library.programs(bucket, "train"))

    def update(self, scale: float) -> None:
        """One optimizer step on every stage with the gradient sums times `scale`.

        Raises:
            PeerLost, TrainingError: see `exchange`, for tied parameters between processes.
        """
        for stage in self.stages.values():
            stage.update(jax.device_put(np.float32(scale), stage.device))
        self._has_gradients = False
        spread_values(self._ties, self.stages, self._exchange)

    def gradients(self) -> Params:
        """The gradient sums of this process's stages after `run`; of tied parameters the sum over all."""
        spread_gradients(self._ties, self.stages, self._exchange)
        return {layer: own for stage in self.stages.values() for layer, own in stage.gradients.items()}

    def not_finite(self) -> str:
        """Where gradient sums are not finite after `run`: the one nearest to the loss; of all processes."""
        mine = [(s, path) for s, stage in self.stages.items() for path in stage.not_finite()]
        found = [own for part in self.world.gather("where gradients are not finite", mine) for own in part]
        if not found:  # finite in float64, too large for the norm's float32
            return "some parameter"
        stage, path = max(found, key=lambda own: int(own[1].split(".")[0]))
        return f"{path} on stage {stage}"

    def reset_gradients(self) -> None:
        """Zero every stage's gradient sums."""
        for stage in self.stages.values():
            stage.reset_gradients()
        self._has_gradients = False

    def _compile_updates(self, stage: int) -> UpdatePrograms:
        chunks, compiler = self._specs_of_chunks(stage), self.compilers[stage]
        return UpdatePrograms.compile(chunks, self._roles(stage), self._optimizer, compiler)

    def _roles(self, stage: int) -> list[LeafRoles]:
        return [self.library.roles.leaves(specs) for specs in self._specs_of_chunks(stage)]

    def _specs_of_chunks(self, stage: int) -> list[Params]:
        specs = self.library.params
        return [{str(i): specs[str(i)] for i in layers} for layers in self.chunks[stage]]

    def _exchange(
        self, what: str, sends: Mapping[tuple[int, int], jax.Array], expected: Sequence[tuple[int, int]]
    ) -> Mapping[tuple[int, int], jax.Array]:
        return exchange(
            *(what, sends, expected),
            world=self.world,
            transport=self._transport,
            devices=self.layout.devices,
            stall_seconds=self._stall_seconds,
        )

    def _params_of_chunks(self, stage: int) -> list[Params]:
        return [self._initial_params(layers, self.compilers[stage]) for layers in self.chunks[stage]]

    def _initial_params(self, layers: range, compiler: Compiler) -> Params:
        bucket, shapes = self.library.first
        owners = self.library.roles.owners
        fields = specs_of(bucket)
        return initial_params(self.pipe, layers, shapes, fields, self._seed, self._init, compiler, owners)

    def _load(
        self, step: int, buckets: Sequence[Bucket], programs: Sequence[StagePrograms], load: Load
    ) -> dict[int, list[list[jax.Array | None]]]:
        """Per stage and microbatch, the inputs that its programs read, on its device."""
        host: dict[int, list[list[Any]]] = {s: [] for s in self.stages}
        wanted = [_fields_read(bucket, own) for bucket, own in zip(buckets, programs, strict=True)]
        for j, arrays in enumerate(load(wanted)):
            names = [name for name, _, _ in buckets[j]]
            values = [*(arrays.get(name) for name in names), np.array([self._seed, step, j], IDS.dtype)]
            for s, own in programs[j].items():
                used = frozenset().union(*(piece.inputs for piece in own))
                host[s].append([value if i in used else None for i, value in enumerate(values)])
        return {s: jax.device_put(values, self.layout.devices[s]) for s, values in host.items()}


def _fields_read(bucket: Bucket, programs: StagePrograms) -> frozenset[str]:
    """The names of a bucket's fields that these programs read."""
    used = frozenset().union(*(piece.inputs for own in programs.values() for piece in own))
    return frozenset(name for i, (name, _, _) in enumerate(bucket) if i in used)


def layers_of_chunks(layers: int, placement: Placement, split: Sequence[int] | None) -> list[list[range]]:
    """By stage, the layers of each of its chunks.

    Raises:
        UsageError: fewer layers than pieces, or a split that does not add up.
    """
    pieces, what = placement.last + 1, "stage"
    if placement.chunks > 1:
        what = f"chunk of each of {placement.stages} stages"
    if pieces > layers:
        many = (
            f"{pieces} stages"
            if placement.chunks == 1
            else f"{placement.chunks} chunks on {placement.stages} stages"
        )
        raise UsageError(
            f"{many} for {layers} layers: each {what} needs at least one; use at most {layers} in all"
        )
    if split is None:
        split = split_evenly(layers, pieces)
    whole = all(isinstance(size, (int, np.integer)) for size in split)
    if not whole or len(split) != pieces or sum(split) != layers or min(split) < 1:
        raise UsageError(
            f"split={list(split)}: give {pieces} positive whole numbers of layers, one per {what}, in the "
            f"model's order, that add up to {layers}"
        )
    ends = np.cumsum(split).tolist()
    ranges = [range(end - size, end) for end, size in zip(ends, split, strict=True)]
    return [
        [ranges[placement.virtual_stage(s, c)] for c in range(placement.chunks)]
        for s in range(placement.stages)
    ]
