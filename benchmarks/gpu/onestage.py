"""One layer as a middle stage of a pipeline: the runtime's own programs for it, compiled, timed, weighed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import rrfp_jax as rrfp
from benchmarks.gpu.work import median_seconds
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Task
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.layers import LayerSpec
from rrfp_jax.runtime.model.pipeline import IDS
from rrfp_jax.runtime.programs.compiler import Compiler
from rrfp_jax.runtime.programs.gradients import wide
from rrfp_jax.runtime.programs.segments import OnDevices, Segment, SegmentShape
from rrfp_jax.runtime.programs.stage_programs import StagePrograms
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.stages.step import ModelStep, StagePart

T = TypeVar("T")


@dataclass(frozen=True)
class OneStage:
    """A layer's compiled programs; it takes and gives a carry of one array.

    Attributes:
        carry: spec of that array.
    """

    pipe: rrfp.Pipeline
    shape: SegmentShape
    programs: StagePrograms
    carry: jax.ShapeDtypeStruct

    @classmethod
    def compile(cls, layer: LayerSpec, carry: jax.ShapeDtypeStruct, remat: str = "none") -> OneStage:
        """Trace and compile forward and backward, fused and split, for this process's first device."""
        ends = rrfp.layer(lambda x, mb: mb["x"] if x is None else x)
        pipe = rrfp.Pipeline([ends, layer, ends], lambda x, mb: rrfp.Loss(x.astype(jnp.float32).sum()))
        fields = {"x": carry}
        shape = SegmentShape(
            pipe=pipe, layers=range(1, 2), fields=fields, shapes=pipe.shapes(fields), remat=remat
        )
        by, kinds = OnDevices(Compiler(StageMesh((jax.local_devices()[0],)))), {BACKWARD, INPUT, WEIGHT}
        programs = StagePrograms.of([shape.layers], [Segment.lower(shape, kinds, by)], kinds, by)
        return cls(pipe, shape, programs, carry)

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.shape.params))

    def predicted(self) -> dict[str, int]:
        """Bytes by XLA's analysis of the programs, and what a microbatch holds between them."""
        tasks = self.programs.tasks
        found = {"input": nbytes(self.carry), "held": tasks[FORWARD].held_bytes}
        found["held_after_input"] = tasks[INPUT].held_bytes
        for name, kind in (("forward", FORWARD), ("backward", BACKWARD)):
            (program,) = tasks[kind].program.programs  # type: ignore[union-attr]
            analysis: Any = program.memory_analysis()
            found[f"{name}_temporary"] = int(analysis.temp_size_in_bytes)
            new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes  # sums are added to in place
            found[f"{name}_outputs"] = int(new)
        return found

    def begin(self) -> Run:
        """Allocate parameters and an input, and prepare a step."""
        return Run(self)


def side_by_side(jobs: Mapping[str, Callable[[], T]]) -> dict[str, Future[T]]:
    """Do jobs, such as compiling, in threads until all have ended; the error of one stays its own."""
    with ThreadPoolExecutor() as pool:
        return {name: pool.submit(job) for name, job in jobs.items()}


class Run:
    """A layer's arrays on the device, and microbatches through it, one at a time."""

    def __init__(self, stage: OneStage) -> None:
        self._x, self._cotangent = (random_array(stage.carry, seed, 1.0) for seed in (0, 1))
        self._ids = jax.device_put(np.zeros(IDS.shape, IDS.dtype))
        specs = jax.tree.leaves(stage.shape.params)
        leaves = [random_array(spec, 2 + i, spec.shape[0] ** -0.5) for i, spec in enumerate(specs)]
        sums = [jnp.zeros(spec.shape, wide(spec).dtype) for spec in specs]
        own = _Leaves(
            [leaves],
            jax.device_put(np.float32(1.0)),
            StageMesh((jax.local_devices()[0],)),
            [sums],
            [[jax.device_put(np.uint32(1))]],
        )
        self._step = ModelStep(own, "train", StagePart([0], [[stage.programs]], [0], [0]), [[]])  # type: ignore[arg-type]
        self._sums = own.sums
        jax.block_until_ready([self._x, self._cotangent, leaves, sums])
        jax.block_until_ready([head for _, head in self._step._bound.values()])

    def forward(self, x: jax.Array | None = None) -> Any:
        """Dispatch the forward of a microbatch; what it gives, and what is kept for the backward."""
        self._step._held[0, 0] = [None, self._ids]
        self._step.receive(task := Task(FORWARD, 0, 0), [self._x if x is None else x])
        outputs, _ = self._step.run(task, in_turn=True)
        return outputs, self._step._held[0, 0]

    def backward(self) -> Any:
        """Dispatch the fused backward; what it gives, and the gradient sums after it."""
        return self._again(BACKWARD), self._sums[0]

    def seconds(self, rounds: int) -> dict[str, float]:
        """Median seconds of forward (F), fused backward (B), input's (I) and weights' gradients (W)."""
        found = {"F": median_seconds(self.forward, rounds), "B": median_seconds(self.backward, rounds)}
        found["I"] = median_seconds(partial(self._again, INPUT), rounds)
        self._step.receive(task := Task(INPUT, 0, 0), [self._cotangent])
        self._step.run(task, in_turn=True)

        def weight() -> Any:
            self._again(WEIGHT)
            return self._sums[0]

        return found | {"W": median_seconds(weight, rounds)}

    def _again(self, kind: Kind) -> Any:
        """Dispatch a task; what it sends. What is held for it stays, so that it can be done again."""
        held = list(self._step._held[0, 0])
        if kind is not WEIGHT:
            self._step.receive(Task(kind, 0, 0), [self._cotangent])
        outputs, _ = self._step.run(Task(kind, 0, 0), in_turn=True)
        self._step._held[0, 0] = held
        return outputs


class _Leaves(NamedTuple):
    """What a step wants of its stage."""

    leaves: list[list[jax.Array]]
    loss_scale: jax.Array
    stage_mesh: StageMesh
    sums: list[list[jax.Array]]
    indices: list[list[jax.Array]]

    def sums_of(self, chunk: int) -> list[jax.Array]:
        return self.sums[chunk]

    def put_sums(self, chunk: int, sums: list[jax.Array]) -> None:
        self.sums[chunk] = sums


def random_array(spec: Any, seed: int, scale: float) -> jax.Array:
    """Normal numbers, repeated after the first million: as good for timing, and nothing to compile."""
    random = np.random.default_rng(seed).standard_normal(min(spec.size, 2**20), np.float32)
    array: jax.Array = jax.device_put(np.resize(random * np.float32(scale), spec.shape).astype(spec.dtype))
    return array
