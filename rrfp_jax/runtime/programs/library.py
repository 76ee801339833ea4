"""The programs of this process's virtual stages, compiled ahead of time for every shape bucket."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from rrfp_jax.core.step_rules import Bucket, StepRules
from rrfp_jax.core.tasks import FORWARD, Kind, parts_of
from rrfp_jax.errors import UsageError
from rrfp_jax.progress import Progress, silent
from rrfp_jax.runtime.autodiff.residuals import NONE
from rrfp_jax.runtime.autodiff.traced import check_repeatable
from rrfp_jax.runtime.mesh.stage_mesh import Shapes, VirtualStage
from rrfp_jax.runtime.model.gradient_flow import Flow, gradient_flow, lost_gradients
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.pipeline import LayerShapes, Pipeline
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.model.sharding import Sharding, sharding_of
from rrfp_jax.runtime.programs.compiler import Compiler, Counting, Job, compile_pool
from rrfp_jax.runtime.programs.stage_programs import OnDevices, StagePrograms, VirtualStageShape

Phase: TypeAlias = Literal["train", "evaluate"]


class RankPrograms(dict[int, Sequence[StagePrograms]]):
    """By stage replica, the programs of each of its chunks for a bucket.

    Attributes:
        fields: by replica of the model, those that stages here read; for who loads them (`Inputs`).
    """

    def __init__(self, programs: Mapping[int, Sequence[StagePrograms]]) -> None:
        super().__init__(programs)
        self.fields: dict[int, frozenset[str]] = {}
        self.reads = {n: sorted({i for of in own for i in of.inputs}) for n, own in programs.items()}


class Library:
    """Shapes and compiled programs by bucket. Nothing is compiled but by `prepare`."""

    def __init__(
        self,
        pipe: Pipeline,
        virtual_stages: Sequence[Sequence[VirtualStage]],
        compilers: Mapping[int, Compiler],
        remat: str = NONE,
        halves: bool = False,
    ) -> None:
        self._pipe, self._compilers, self._remat, self._halves = pipe, compilers, remat, halves
        self._virtual_stages = {s: virtual_stages[s % len(virtual_stages)] for s in compilers}
        self._everywhere = [virtual_stage for own in virtual_stages for virtual_stage in own]
        self._shapes: dict[Bucket, list[LayerShapes]] = {}
        self._flows: dict[Bucket, Flow] = {}
        self._programs: dict[tuple[Bucket, Phase], RankPrograms] = {}
        self._kinds: Mapping[int, Sequence[Collection[Kind]]] = {}  # of backwards in the latest step
        self._complete: set[Bucket] = set()  # those with programs for all these kinds
        self._shardings: dict[int, Sharding] = {}  # by number of devices
        self.compile_seconds = dict.fromkeys(compilers, 0.0)
        self.progress: Progress = silent

    @cached_property
    def roles(self) -> Roles:
        """What is trained, frozen and tied; `UsageError` if the Pipeline names what there is not."""
        pipe = self._pipe
        return Roles.of(self.params, pipe.frozen, pipe.tied, pipe.constants(self.params))

    def sharding(self, width: int) -> Sharding:
        """How parameters and carries lie on the stages of so many devices; `UsageError` if they cannot."""
        if width not in self._shardings:
            layers = {i for own in self._everywhere if own.width == width for i in own.layers}
            _, shapes = self.first
            self._shardings[width] = sharding_of(self._pipe, shapes, self.roles, layers, width)
        return self._shardings[width]

    @property
    def spread(self) -> Set[str]:
        """The paths of parameters that are not whole on every device of their stage."""
        return {path for own in self._everywhere for path in self.sharding(own.width).params}

    @property
    def params(self) -> Params:
        """Specs of all parameters, {layer index as text: nested dict}."""
        _, shapes = self.first
        return {str(i): layer.params for i, layer in enumerate(shapes)}

    @property
    def updated(self) -> Params:
        """Specs of the parameters that an optimizer sees, neither frozen nor aliases of others."""
        leaves = self.roles.leaves(self.params)
        flat = jax.tree.leaves(self.params)
        return leaves.owned_tree([flat[place] for place in leaves.owned])

    @property
    def first(self) -> tuple[Bucket, list[LayerShapes]]:
        """The bucket that was examined first, and the specs of every layer for it."""
        return next(iter(self._shapes.items()))

    @property
    def first_bucket(self) -> Bucket | None:
        """The bucket that was examined first; None before that."""
        return next(iter(self._shapes), None)

    def examine(self, bucket: Bucket) -> list[LayerShapes]:
        """Check that the model takes microbatches of this bucket, with the parameters of the first one."""
        if bucket not in self._shapes:
            with self._tracing():
                shapes = self._pipe.shapes(specs_of(bucket))
            first = next(iter(self._shapes.values()), shapes)
            for index, (a, b) in enumerate(zip(first, shapes, strict=True)):
                if a.params != b.params:
                    raise UsageError(
                        f"layer {index} ({self._pipe.layers[index].name}) has parameters {b.params} for "
                        f"microbatches {bucket}, but {a.params} before: parameters must not depend on shapes"
                    )
            self._shapes[bucket] = shapes
            try:
                self._check_shardings(shapes)
            except UsageError:
                del self._shapes[bucket]
                raise
        return self._shapes[bucket]

    def know(self, other: Library) -> None:
        """Take over what one of another split knows; `UsageError` if carries cannot be spread so."""
        self._shapes, self._flows, self.progress = dict(other._shapes), dict(other._flows), other.progress
        for shapes in self._shapes.values():
            self._check_shardings(shapes)

    def flow(self, bucket: Bucket) -> Flow:
        """Which parameters, and leaves of the carries, have a gradient; of an examined bucket."""
        if bucket not in self._flows:
            shapes = self._shapes[bucket]
            with self._tracing():
                flow = gradient_flow(self._pipe, shapes, specs_of(bucket), self.roles)
            if self._remat != NONE:
                names, traced = [spec.name for spec in self._pipe.layers], [own.traced for own in shapes]
                check_repeatable(names, traced, self._remat)
            self._flows[bucket] = flow
        return self._flows[bucket]

    @property
    def lost_gradients(self) -> dict[str, str]:
        """By trained parameter that no gradient reaches although the loss follows from it, why."""
        return lost_gradients([*self._flows.values()]) if self._flows else {}

    def _tracing(self) -> AbstractContextManager[Any]:
        return next(iter(self._compilers.values())).stage_mesh.tracing()

    def _check_shardings(self, shapes: Sequence[LayerShapes]) -> None:
        """All processes check all virtual stages, so that all refuse alike."""
        for virtual_stage in self._everywhere:
            sharding = self.sharding(virtual_stage.width)
            if not virtual_stage.ends.before:
                sharding.check_carry(shapes[virtual_stage.layers.start].carry_in, virtual_stage.width)

    def prepare(self, buckets: Sequence[Bucket], rules: StepRules) -> bool:
        """Compile for these buckets what a step by these rules needs and is not there yet; never inside one.

        What was compiled stays, so that a change of schedule back and forth compiles once. Whether there was
        anything to compile.
        """
        stages = rules.placement.stages
        kinds = {s: rules.backward_kinds(s % stages) for s in self._virtual_stages}
        if kinds != self._kinds:
            self._kinds, self._complete = kinds, set()
        if self._complete.issuperset(buckets):
            return False
        missing = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self._complete]
        for bucket in missing:
            self.examine(bucket)
            if not rules.forward_only:
                self.flow(bucket)
        jobs = {
            (bucket, s, chunk): kinds[s][chunk]
            for bucket in missing
            for s, own in self._virtual_stages.items()
            for chunk in range(len(own))
        }
        expected = {job: count for job, of in jobs.items() if (count := self._expected(job, of))}
        with Counting(self.progress, expected, self._compiles) as counting, compile_pool() as pool:
            results = pool.map(partial(self._compile, counting), jobs, jobs.values())
            made = dict(zip(jobs, results, strict=True))
        for bucket in missing:
            by_stage = {
                s: [made[bucket, s, chunk] for chunk in range(len(own))]
                for s, own in self._virtual_stages.items()
            }
            self._programs[bucket, phase_of(rules)] = RankPrograms(by_stage)
        self._complete.update(missing)
        return True

    def _compiles(self) -> int:
        return sum(compiler.executables.compiles for compiler in self._compilers.values())

    def programs(self, bucket: Bucket, phase: Phase) -> RankPrograms:
        """What `prepare` has compiled."""
        return self._programs[bucket, phase]

    def buckets(self, phase: Phase) -> list[Bucket]:
        """Buckets that programs have been compiled for; steps may add some while another thread asks."""
        return [bucket for bucket, of in list(self._programs) if of == phase]

    def of_stage(self, stage_replica: int) -> dict[Bucket, Sequence[StagePrograms]]:
        """By bucket, what trains on the chunks of a stage replica."""
        return {bucket: self.programs(bucket, "train")[stage_replica] for bucket in self.buckets("train")}

    def all_programs(self, phase: Phase) -> list[RankPrograms]:
        """What has been compiled for all buckets."""
        return [made for (_, of), made in self._programs.items() if of == phase]

    def arrivals(self, phase: Phase) -> dict[int, set[Shapes]]:
        """By stage replica here, all messages to it in such steps: shape and dtype's name of each array."""
        return {
            stage_replica: {
                self._compilers[stage_replica].stage_mesh.shapes_sent(how.arrives, how.arrives_once)
                for programs in self.all_programs(phase)
                for virtual_stage in programs[stage_replica]
                for how in virtual_stage.tasks.values()
                if how.arrives
            }
            for stage_replica in self._virtual_stages
        }

    def _before(self, job: Job, kinds: Collection[Kind]) -> StagePrograms | None:
        """What there is of a virtual stage already, for these kinds of backward or others."""
        bucket, stage_replica, chunk = job
        before = self._programs.get((bucket, "train" if kinds else "evaluate"))
        return None if before is None else before[stage_replica][chunk]

    def _expected(self, job: Job, kinds: Collection[Kind]) -> int:
        """How many programs are to be compiled for a virtual stage, at most."""
        own = self._before(job, kinds)
        wanted = {FORWARD, *(parts_of(kinds) if self._halves else kinds)}
        if own is None:
            return len(wanted) + bool(kinds)  # and what all of them prepare
        return 0 if own.tasks.keys() == {FORWARD, *kinds} else len(wanted - own.lowered.keys())

    def _compile(self, counting: Counting, job: Job, kinds: Collection[Kind]) -> StagePrograms:
        """The programs of a virtual stage; without any kind of backward, those for forwards only."""
        bucket, stage_replica, chunk = job
        own = self._before(job, kinds)
        if own is not None and own.tasks.keys() == {FORWARD, *kinds}:
            counting.ended(job)
            return own
        began = perf_counter()
        compiler = replace(self._compilers[stage_replica], made=partial(counting.one_more, job))
        virtual_stage = self._virtual_stages[stage_replica][chunk]
        layers, borders = virtual_stage.layers, self.flow(bucket).borders if kinds else None
        roles = self.roles.leaves({str(i): self._shapes[bucket][i].params for i in layers})
        shape = VirtualStageShape(
            pipe=self._pipe,
            layers=layers,
            fields=specs_of(bucket),
            shapes=self._shapes[bucket],
            trainable=[i in roles.number for i in range(roles.structure.num_leaves)],
            carry_gradients=None if borders is None else borders[layers.start],
            cotangents=None if borders is None else borders[layers.stop],
            remat=self._remat,
            sharding=self.sharding(virtual_stage.width),
            ends=virtual_stage.ends,
        )
        with compiler.stage_mesh.tracing():
            programs = StagePrograms.lower(shape, kinds, OnDevices(compiler), own, self._halves)
        self.compile_seconds[stage_replica] += perf_counter() - began
        counting.ended(job)
        return programs


def phase_of(rules: StepRules) -> Phase:
    """What a step by these rules is for."""
    return "evaluate" if rules.forward_only else "train"


def specs_of(bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
    """Specs of a bucket's fields by name."""
    return {name: jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for name, shape, dtype in bucket}
