"""One step on this process's stages: what it begins with, and what is told of it when it has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rrfp_jax.core.measure.recorded_step import RecordedStep
from rrfp_jax.core.measure.trace import Part, StepTrace, TaskRecord, busy_of
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.runtime.driver.device import LEAD_SECONDS
from rrfp_jax.runtime.memory.budget import StepMemory
from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.model.metrics import Name
from rrfp_jax.runtime.programs.library import Phase, StagePrograms
from rrfp_jax.runtime.stages.model_step import ModelStep
from rrfp_jax.runtime.stages.optimizer import Optimizer
from rrfp_jax.runtime.stages.stage import Stage


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """A step that has begun.

    Attributes:
        step: its number.
        rules: which all processes agree on.
        phase: training, or evaluation.
        parts: by stage replica of this process, its tasks.
        buckets: the name of each microbatch's.
        programs: by microbatch, those of this process's stages.
        memory: what the stages may hold.
        load_seconds: that loading the data took.
        inputs: the data by stage replica, held until the step has ended, which is what ledgers count.
    """

    step: int
    rules: StepRules
    phase: Phase
    parts: Mapping[int, ModelStep]
    buckets: Sequence[str]
    programs: Sequence[StagePrograms]
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
        """What this process has found, as plain data that `sums.add_up` takes.

        Args:
            stages: of this process, by stage replica.
            optimizers: of this process.
            layout: where stages are.
            records: of all tasks that ran here.
        """
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
        """Virtual stage, microbatch, metrics and numbers of the statistics that each forward gave.

        Args:
            vectors: by stage replica, then by chunk and number of the microbatch among the replica's.
            layout: where stages are.
        """
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
