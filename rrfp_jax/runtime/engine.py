"""A pipeline on its devices: where layers go, stages with their parameters, programs per shape bucket."""

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

from rrfp_jax.core.scheduler import StepRules
from rrfp_jax.core.trace import StepTrace
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.driver import Driver
from rrfp_jax.runtime.initial import InitFunction, initial_params
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.pipeline import IDS, LayerShapes, Pipeline, split_evenly
from rrfp_jax.runtime.programs import EvaluationProgram, StagePrograms, StageShape, UpdatePrograms, nbytes
from rrfp_jax.runtime.stage import EvaluationStep, Stage, TrainingStep

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
    trace: StepTrace

    @property
    def total(self) -> float:
        """The step's summed loss."""
        return float(np.sum(np.asarray(self.totals, np.float64)))


@dataclass
class _Compiled:
    """The programs of all stages for one bucket."""

    train: list[StagePrograms] = field(default_factory=list)
    evaluate: list[EvaluationProgram] = field(default_factory=list)


class Engine:
    """Everything that a step runs on. Nothing is allocated or compiled before `start`.

    Args:
        pipe: the model.
        devices: one per stage.
        split: layers per stage; None for an even split.
        optimizer: None if the model is never updated.
        seed: of initial values and random keys, 0 <= seed < 2**32.
        init: initial values from elsewhere, per leaf.
        stall_seconds: see `Driver`.

    Raises:
        UsageError: more stages than layers, a split that does not add up, a seed out of range.
    """

    def __init__(
        self,
        pipe: Pipeline,
        devices: Sequence[jax.Device],
        *,
        split: Sequence[int] | None,
        optimizer: optax.GradientTransformation | None,
        seed: int,
        init: InitFunction | None,
        stall_seconds: float,
    ) -> None:
        self.pipe = pipe
        self.devices = devices
        self.layers = _layer_ranges(len(pipe), len(devices), split)
        if not 0 <= seed < 2**32:
            raise UsageError(f"seed={seed}: give a number from 0 to {2**32 - 1}")
        self._optimizer, self._seed, self._init = optimizer, seed, init
        self._stall_seconds = stall_seconds
        self._shapes: dict[Bucket, list[LayerShapes]] = {}
        self._compiled: dict[Bucket, _Compiled] = {}
        self._compile_seconds = [0.0] * len(devices)
        self.stages: list[Stage] = []
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

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Compile for the buckets of a first step and allocate parameters and optimizer state, once."""
        for bucket in buckets:
            self.examine(bucket)
        stages = range(len(self.devices))
        with _compile_pool() as pool:
            updates = pool.map(self._compile_updates, stages)
            params = pool.map(self._initial_params, stages, [buckets[0]] * len(stages))
            for bucket in buckets:
                self.prepare(bucket, "train")
            made = zip(stages, self.layers, self.devices, params, updates, strict=True)
            made_stages = [Stage(*parts) for parts in made]
        self._driver = Driver(made_stages, stall_seconds=self._stall_seconds)
        self.stages = made_stages  # last: says that everything has been started

    def prepare(self, bucket: Bucket, phase: Phase) -> None:
        """Compile the programs of all stages for a bucket, unless that has been done; never inside a step."""
        self.examine(bucket)
        compiled = self._compiled.setdefault(bucket, _Compiled())
        if getattr(compiled, phase):
            return

        def build(index: int) -> Any:
            began = perf_counter()
            kind = StagePrograms if phase == "train" else EvaluationProgram
            programs = kind.compile(self._stage_shape(index, bucket), self.devices[index])
            self._compile_seconds[index] += perf_counter() - began
            return programs

        with _compile_pool() as pool:
            setattr(compiled, phase, list(pool.map(build, range(len(self.devices)))))

    def run(self, phase: Phase, step: int, rules: StepRules, buckets: Sequence[Bucket], load: Load) -> Sums:
        """Run one step; with `phase="train"` the gradients are then in the stages' sums.

        Args:
            phase: "evaluate" runs forwards only.
            step: number of the step, which random keys depend on.
            rules: of the step.
            buckets: of each microbatch; all prepared.
            load: gives the arrays of a microbatch; asked only for fields that some stage reads.
        """
        order = {bucket: number for number, bucket in enumerate(self._compiled)}
        numbers = [order[bucket] for bucket in buckets]
        compiled = {order[bucket]: getattr(self._compiled[bucket], phase) for bucket in set(buckets)}
        inputs = self._load(step, buckets, [compiled[n] for n in numbers], load)
        part = TrainingStep if phase == "train" else EvaluationStep
        parts = [
            part(stage, {n: programs[s] for n, programs in compiled.items()}, numbers, inputs[s])
            for s, stage in enumerate(self.stages)
        ]
        for stage in self.stages:  # so that the last update counts neither as idle nor as compute
            jax.block_until_ready(stage.leaves)
        if phase == "train":
            if self._has_gradients:  # of a step that was broken off, or not applied
                self.reset_gradients()
            self._has_gradients = True
        trace = self.driver.run(rules, step, parts)
        found = jax.device_get([part.statistics for part in parts])
        names = [[compiled[n][s].statistics for n in numbers] for s in range(len(parts))]
        return _add_up(found, names, trace)

    def squared_norm(self) -> float:
        """The squared norm of the gradient sums over all stages, added in stage order."""
        return float(sum(float(s) for s in jax.device_get([s.squared_norm() for s in self.stages])))

    def update(self, scale: float) -> None:
        """One optimizer step on every stage with the gradient sums times `scale`."""
        for stage in self.stages:
            stage.update(jax.device_put(np.float32(scale), stage.device))
        self._has_gradients = False

    def reset_gradients(self) -> None:
        """Zero every stage's gradient sums."""
        for stage in self.stages:
            stage.reset_gradients()
        self._has_gradients = False

    def bytes(self) -> list[StageBytes]:
        """What each stage needs; of the buckets prepared for training, the largest counts."""
        table = []
        for index, stage in enumerate(self.stages):
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
        return UpdatePrograms.compile(params, self._optimizer, self.devices[index])

    def _initial_params(self, index: int, bucket: Bucket) -> Params:
        fields, shapes = _specs(bucket), self._shapes[bucket]
        return initial_params(
            self.pipe, self.layers[index], shapes, fields, self._seed, self._init, self.devices[index]
        )

    def _load(
        self, step: int, buckets: Sequence[Bucket], programs: Sequence[Sequence[Any]], load: Load
    ) -> list[list[list[jax.Array | None]]]:
        """Per stage and microbatch, the inputs that its programs read, on its device."""
        host: list[list[list[Any]]] = [[] for _ in self.stages]
        for j, (bucket, stages) in enumerate(zip(buckets, programs, strict=True)):
            names = [name for name, _, _ in bucket]
            wanted = frozenset(names[i] for p in stages for i in p.inputs if i < len(names))
            arrays = load(j, wanted) if wanted else {}
            ids = np.array([self._seed, step, j], IDS.dtype)
            for s, p in enumerate(stages):
                values = [arrays.get(name) for name in names] + [ids]
                host[s].append([value if i in p.inputs else None for i, value in enumerate(values)])
        return [jax.device_put(values, stage.device) for values, stage in zip(host, self.stages, strict=True)]


def _add_up(
    found: Sequence[Mapping[int, Any]], names: Sequence[Sequence[Sequence[str]]], trace: StepTrace
) -> Sums:
    """Sum every stage's statistics {microbatch: vector}, labelled by `names[stage][microbatch]`."""
    totals = [0.0] * len(names[0])
    sums = {"weight": 0.0}
    for vectors, labels in zip(found, names, strict=True):
        for j in sorted(vectors):
            totals[j] += float(vectors[j][0])
            for name, value in zip(labels[j][1:], vectors[j][1:], strict=True):
                sums[name] = sums.get(name, 0.0) + float(value)
    return Sums(totals, sums.pop("weight"), sums, trace)


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
