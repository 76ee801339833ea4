"""A pipeline on this process's devices: where layers go, stages, programs per shape bucket."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import optax

from rrfp_jax.core.rules import StepRules
from rrfp_jax.core.trace import Part, StepTrace
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.delays import Delays
from rrfp_jax.runtime.driver import Driver
from rrfp_jax.runtime.initial import InitFunction, initial_params
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.pipeline import IDS, LayerShapes, Pipeline, split_evenly
from rrfp_jax.runtime.programs import EvaluationProgram, StagePrograms, StageShape, UpdatePrograms, nbytes
from rrfp_jax.runtime.stage import EvaluationStep, Stage, TrainingStep
from rrfp_jax.runtime.topology import Layout

Bucket: TypeAlias = tuple[tuple[str, tuple[int, ...], str], ...]
"""The shapes of a microbatch: (name, shape, dtype) of every field, sorted by name."""

Load: TypeAlias = Callable[[int, frozenset[str]], Mapping[str, Any]]
"""(microbatch, fields) -> arrays by name."""

Phase: TypeAlias = Literal["train", "evaluate"]


@dataclass(frozen=True)
class StageBytes:
    """What a stage needs of its device, in bytes; `held` is per microbatch in flight."""

    layers: range
    device: str
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    accumulator_bytes: int
    held_bytes: int
    temporary_bytes: int
    compile_seconds: float


@dataclass(frozen=True)
class Sums:
    """What the microbatches of a step add up to, in microbatch order, in float64."""

    totals: Sequence[float]  # per microbatch
    weight: float
    metrics: Mapping[str, float]
    squared_norm: float  # of the gradient sums over all stages; 0 if not asked for
    trace: StepTrace

    @property
    def total(self) -> float:
        """The step's summed loss."""
        return float(np.sum(np.asarray(self.totals, np.float64)))


@dataclass
class _Compiled:
    """The programs of this process's stages for one bucket, by stage."""

    train: dict[int, StagePrograms] = field(default_factory=dict)
    evaluate: dict[int, EvaluationProgram] = field(default_factory=dict)


class Engine:
    """Everything that a step runs on in this process. Nothing is allocated or compiled before `start`.

    Args:
        pipe: the model.
        layout: where the stages are; this engine has those of its process.
        split: layers per stage; None for an even split.
        optimizer: None if the model is never updated.
        seed: of initial values and random keys, 0 <= seed < 2**32.
        init: initial values from elsewhere, per leaf.
        stall_seconds: see `Driver`.
        delays: to inject.

    Raises:
        UsageError: more stages than layers, a split that does not add up, a seed out of range.
    """

    def __init__(
        self,
        pipe: Pipeline,
        layout: Layout,
        *,
        split: Sequence[int] | None,
        optimizer: optax.GradientTransformation | None,
        seed: int,
        init: InitFunction | None,
        stall_seconds: float,
        delays: Delays,
    ) -> None:
        self.pipe = pipe
        self.layout, self.world = layout, layout.world
        self.layers = _layer_ranges(len(pipe), len(layout.owners), split)
        if not 0 <= seed < 2**32:
            raise UsageError(f"seed={seed}: give a number from 0 to {2**32 - 1}")
        self._optimizer, self._seed, self._init = optimizer, seed, init
        self._stall_seconds, self._delays = stall_seconds, delays
        self._shapes: dict[Bucket, list[LayerShapes]] = {}
        self._compiled: dict[Bucket, _Compiled] = {}
        self._compile_seconds = dict.fromkeys(layout.devices, 0.0)
        self.stages: dict[int, Stage] = {}
        self._has_gradients = False  # whether the stages' sums may be other than zero
        self._driver: Driver | None = None

    @property
    def driver(self) -> Driver:
        """The driver, once started."""
        if self._driver is None:
            raise RuntimeError("the engine has not been started")
        return self._driver

    def examine(self, bucket: Bucket) -> list[LayerShapes]:
        """Check that the model takes microbatches of this bucket; specs only.

        Raises:
            UsageError: it does not, or it would have other parameters than for the first bucket.
        """
        if bucket not in self._shapes:
            shapes = self.pipe.shapes(_specs(bucket))
            first = next(iter(self._shapes.values()), shapes)
            for index, (a, b) in enumerate(zip(first, shapes, strict=True)):
                if a.params != b.params:
                    raise UsageError(
                        f"layer {index} ({self.pipe.layers[index].name}) has parameters {b.params} for "
                        f"microbatches {bucket}, but {a.params} before: parameters must not depend on shapes"
                    )
            self._shapes[bucket] = shapes
        return self._shapes[bucket]

    def params_specs(self) -> Params:
        """Specs of all parameters, {layer index as text: nested dict}; needs one examined bucket."""
        shapes = next(iter(self._shapes.values()))
        return {str(i): layer.params for i, layer in enumerate(shapes)}

    def all_initial_params(self) -> Params:
        """Initial parameters of all layers, on this process's first device."""
        fields, shapes = next(iter((_specs(bucket), shapes) for bucket, shapes in self._shapes.items()))
        device = next(iter(self.layout.devices.values()))
        layers = range(len(self.pipe))
        return initial_params(self.pipe, layers, shapes, fields, self._seed, self._init, device)

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Compile for the buckets of a first step and allocate parameters and optimizer state, once."""
        self.world.box.phase("compiling")
        for bucket in buckets:
            self.examine(bucket)
        stages = list(self.layout.devices)
        with _compile_pool() as pool:
            updates = pool.map(self._compile_updates, stages)
            params = pool.map(self._initial_params, stages, [buckets[0]] * len(stages))
            for bucket in buckets:
                self.prepare(bucket, "train")
            made = {
                s: Stage(s, self.layers[s], self.layout.devices[s], tree, update)
                for s, tree, update in zip(stages, params, updates, strict=True)
            }
        transport = self._delays.transport(self.layout.transport())
        queue = self._delays.queue()
        self._driver = Driver(self.layout.devices, self.world, transport, self._stall_seconds, queue)
        self.stages = made  # last: says that everything has been started

    def prepare(self, bucket: Bucket, phase: Phase) -> None:
        """Compile this process's programs for a bucket, unless that has been done; never inside a step."""
        self.examine(bucket)
        compiled = self._compiled.setdefault(bucket, _Compiled())
        if getattr(compiled, phase):
            return

        def build(index: int) -> Any:
            began = perf_counter()
            kind = StagePrograms if phase == "train" else EvaluationProgram
            programs = kind.compile(self._stage_shape(index, bucket), self.layout.devices[index])
            self._compile_seconds[index] += perf_counter() - began
            return programs

        with _compile_pool() as pool:
            stages = list(self.layout.devices)
            setattr(compiled, phase, dict(zip(stages, pool.map(build, stages), strict=True)))

    def run(
        self,
        phase: Phase,
        step: int,
        rules: StepRules,
        buckets: Sequence[Bucket],
        load: Load,
        norm: bool = False,
    ) -> Sums:
        """Run one step; with `phase="train"` the gradients are then in the stages' sums.

        All processes do so together, and all get the same sums.

        Args:
            phase: "evaluate" runs forwards only.
            step: number of the step, which random keys depend on.
            rules: of the step.
            buckets: of each microbatch; all prepared.
            load: gives the arrays of a microbatch; asked only for fields that a stage here reads.
            norm: whether to compute the squared norm of the gradient sums.

        Raises:
            TrainingError: see `Driver.run`.
        """
        order = {bucket: number for number, bucket in enumerate(self._compiled)}
        numbers = [order[bucket] for bucket in buckets]
        compiled = {order[bucket]: getattr(self._compiled[bucket], phase) for bucket in set(buckets)}
        inputs = self._load(step, buckets, [compiled[n] for n in numbers], load)
        kind = TrainingStep if phase == "train" else EvaluationStep
        parts = {
            s: kind(stage, {n: programs[s] for n, programs in compiled.items()}, numbers, inputs[s])
            for s, stage in self.stages.items()
        }
        for stage in self.stages.values():  # so that the last update counts neither as idle nor as compute
            jax.block_until_ready(stage.leaves)
        if phase == "train":
            if self._has_gradients:  # of a step that was broken off, or not applied
                self.reset_gradients()
            self._has_gradients = True
        records = self.driver.run(rules, step, parts)
        norms = {s: stage.squared_norm() if norm else 0.0 for s, stage in self.stages.items()}
        found, norms = jax.device_get(({s: part.statistics for s, part in parts.items()}, norms))
        part = Part.of(records, *self.world.clock)
        mine: dict[str, Any] = {"part": part.plain(), "stages": []}
        for s, vectors in found.items():
            names = [list(compiled[n][s].statistics) for n in numbers] if vectors else []
            statistics = {j: np.asarray(vector, np.float64).tolist() for j, vector in vectors.items()}
            mine["stages"].append({"names": names, "statistics": statistics, "norm": float(norms[s])})
        results = self.world.gather(f"the results of {phase} step {step}", mine)
        trace = StepTrace(step, rules.placement, [Part(*result["part"]) for result in results])
        return _add_up([s for result in results for s in result["stages"]], len(buckets), trace)

    def update(self, scale: float) -> None:
        """One optimizer step on every stage with the gradient sums times `scale`."""
        for stage in self.stages.values():
            stage.update(jax.device_put(np.float32(scale), stage.device))
        self._has_gradients = False

    def reset_gradients(self) -> None:
        """Zero every stage's gradient sums."""
        for stage in self.stages.values():
            stage.reset_gradients()
        self._has_gradients = False

    def bytes(self) -> list[StageBytes]:
        """What each stage of this process needs; of the buckets prepared for training, the largest counts."""
        table = []
        for index, stage in self.stages.items():
            programs = [c.train[index] for c in self._compiled.values() if c.train]
            size = sum(map(nbytes, stage.leaves))
            table.append(
                StageBytes(
                    layers=stage.layers,
                    device=str(stage.device),
                    parameters=sum(leaf.size for leaf in stage.leaves),
                    parameter_bytes=size,
                    optimizer_bytes=sum(map(nbytes, stage.state)),
                    accumulator_bytes=sum(map(nbytes, jax.tree.leaves(stage.gradients))),
                    held_bytes=max(p.held_bytes for p in programs),
                    temporary_bytes=max(p.temporary_bytes for p in programs),
                    compile_seconds=self._compile_seconds[index],
                )
            )
        return table

    def _stage_shape(self, index: int, bucket: Bucket) -> StageShape:
        shapes = self._shapes[bucket]
        return StageShape(pipe=self.pipe, layers=self.layers[index], fields=_specs(bucket), shapes=shapes)

    def _compile_updates(self, index: int) -> UpdatePrograms:
        params = {str(i): self.params_specs()[str(i)] for i in self.layers[index]}
        return UpdatePrograms.compile(params, self._optimizer, self.layout.devices[index])

    def _initial_params(self, index: int, bucket: Bucket) -> Params:
        fields, shapes = _specs(bucket), self._shapes[bucket]
        return initial_params(
            *(self.pipe, self.layers[index], shapes, fields, self._seed, self._init),
            self.layout.devices[index],
        )

    def _load(
        self, step: int, buckets: Sequence[Bucket], programs: Sequence[Mapping[int, Any]], load: Load
    ) -> dict[int, list[list[jax.Array | None]]]:
        """Per stage and microbatch, the inputs that its programs read, on its device."""
        host: dict[int, list[list[Any]]] = {s: [] for s in self.stages}
        for j, (bucket, stages) in enumerate(zip(buckets, programs, strict=True)):
            names = [name for name, _, _ in bucket]
            wanted = frozenset(names[i] for p in stages.values() for i in p.inputs if i < len(names))
            arrays = load(j, wanted) if wanted else {}
            ids = np.array([self._seed, step, j], IDS.dtype)
            for s, p in stages.items():
                values = [arrays.get(name) for name in names] + [ids]
                host[s].append([value if i in p.inputs else None for i, value in enumerate(values)])
        return {s: jax.device_put(values, self.layout.devices[s]) for s, values in host.items()}


def _add_up(stages: Sequence[Mapping[str, Any]], microbatches: int, trace: StepTrace) -> Sums:
    """Sum what all stages, in order, found of every microbatch."""
    totals = [0.0] * microbatches
    sums = {"weight": 0.0}
    for stage in stages:
        for j, vector in sorted(stage["statistics"].items()):
            totals[j] += vector[0]
            for name, value in zip(stage["names"][j][1:], vector[1:], strict=True):
                sums[name] = sums.get(name, 0.0) + value
    norm = float(sum(stage["norm"] for stage in stages))
    return Sums(totals, sums.pop("weight"), sums, norm, trace)


@contextmanager
def _compile_pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for compiling, which XLA does outside the interpreter lock; an error drops what waits."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _specs(bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for name, shape, dtype in bucket}


def _layer_ranges(layers: int, stages: int, split: Sequence[int] | None) -> list[range]:
    if stages > layers:
        raise UsageError(
            f"{stages} stages for {layers} layers: each stage needs at least one; use at most {layers} stages"
        )
    if split is None:
        split = split_evenly(layers, stages)
    if len(split) != stages or sum(split) != layers or min(split) < 1:
        raise UsageError(
            f"split={list(split)}: give {stages} positive numbers of layers, one per stage, "
            f"that add up to {layers}"
        )
    ends = np.cumsum(split).tolist()
    return [range(end - size, end) for end, size in zip(ends, split, strict=True)]
