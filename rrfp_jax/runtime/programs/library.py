"""The programs of this process's virtual stages, compiled ahead of time for every shape bucket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from rrfp_jax.core.step_rules import Bucket, StepRules
from rrfp_jax.core.tasks import Kind, parts_of
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
from rrfp_jax.runtime.programs.compiler import Compiler, Job, compile_pool, counting
from rrfp_jax.runtime.programs.gradients import owned_trees
from rrfp_jax.runtime.programs.segments import OnDevices, Segment, SegmentShape, segments_of
from rrfp_jax.runtime.programs.stage_programs import StagePrograms

Phase: TypeAlias = Literal["train", "evaluate"]


_Work: TypeAlias = tuple[SegmentShape, set[Kind]]
"""A segment, and the kinds of backward that it is to have."""


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
        together: int = 1,
    ) -> None:
        self._pipe, self._compilers, self._remat, self._halves = pipe, compilers, remat, halves
        self._together = together  # layers of a segment
        self._virtual_stages = {s: virtual_stages[s % len(virtual_stages)] for s in compilers}
        self._everywhere = [virtual_stage for own in virtual_stages for virtual_stage in own]
        self._shapes: dict[tuple[Bucket, bool], list[LayerShapes]] = {}  # in training, or not
        self._flows: dict[Bucket, Flow] = {}
        self._alike: dict[Hashable, SegmentShape] = {}  # by bucket, width and kind, the first segment of it
        self._segments: dict[Job, Segment] = {}  # by bucket, stage replica and kind
        self._programs: dict[tuple[Bucket, Phase], RankPrograms] = {}
        self._made_for: dict[tuple[Bucket, Phase], Any] = {}  # `StepRules.programs`
        self.joined = False  # see `StepRules.joined`; of the latest step that trained
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
        return owned_trees([self.params], [self.roles.leaves(self.params)])[0]

    @property
    def first(self) -> tuple[Bucket, list[LayerShapes]]:
        """The bucket that was examined first, and the specs of every layer for it."""
        (bucket, _), shapes = next(iter(self._shapes.items()))
        return bucket, shapes

    @property
    def first_bucket(self) -> Bucket | None:
        """The bucket that was examined first; None before that."""
        return next((bucket for bucket, _ in self._shapes), None)

    def examine(self, bucket: Bucket, training: bool = True) -> list[LayerShapes]:
        """Check that the model takes microbatches of this bucket, with the parameters of the first one."""
        if (bucket, training) not in self._shapes:
            trained = self._shapes.get((bucket, True))
            built = [] if training else trained or self.first[1]
            with self.tracing():
                shapes = self._pipe.shapes(specs_of(bucket), built, alike=built is trained)
            first = next(iter(self._shapes.values()), shapes)
            for index, (a, b) in enumerate(zip(first, shapes, strict=True)):
                if a.params != b.params:
                    raise UsageError(
                        f"{self._pipe.who(index)} has parameters {b.params} for "
                        f"microbatches {bucket}, but {a.params} before: parameters must not depend on shapes"
                    )
            self._shapes[bucket, training] = shapes
            try:
                self._check_shardings(shapes)
            except UsageError:
                del self._shapes[bucket, training]
                raise
        return self._shapes[bucket, training]

    def know(self, other: Library) -> None:
        """Take over what one of another split knows; `UsageError` if carries cannot be spread so."""
        self._shapes, self._flows, self._alike = dict(other._shapes), dict(other._flows), dict(other._alike)
        self.progress = other.progress
        for shapes in self._shapes.values():
            self._check_shardings(shapes)

    def flow(self, bucket: Bucket) -> Flow:
        """Which parameters, and leaves of the carries, have a gradient; of an examined bucket."""
        if bucket not in self._flows:
            shapes = self._shapes[bucket, True]
            with self.tracing():
                flow = gradient_flow(self._pipe, shapes, specs_of(bucket), self.roles)
            for index, own in enumerate(shapes if self._remat != NONE else ()):
                check_repeatable(self._pipe.who(index), own.traced, self._remat)
            self._flows[bucket] = flow
        return self._flows[bucket]

    @property
    def lost_gradients(self) -> dict[str, str]:
        """By trained parameter that no gradient reaches although the loss follows from it, why."""
        return lost_gradients([*self._flows.values()]) if self._flows else {}

    def tracing(self) -> AbstractContextManager[Any]:
        """In which layers are traced as on a stage's devices."""
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
        kinds = {s: rules.backward_kinds(s % rules.placement.stages) for s in self._virtual_stages}
        if not rules.forward_only:
            self.joined = rules.joined and not self._halves
        phase = phase_of(rules)
        missing = [b for b in dict.fromkeys(buckets) if self._made_for.get((b, phase)) != rules.programs]
        if not missing:
            return False
        for bucket in missing:
            self.examine(bucket, training=not rules.forward_only)
            if not rules.forward_only:
                self.flow(bucket)
        jobs = self._jobs(missing, kinds)
        parts = f"kinds ({sum(len(of.layers) for own in self._virtual_stages.values() for of in own)} layers)"
        with counting(self.progress, jobs, parts, self._compiles) as ended, compile_pool() as pool:
            made = dict(zip(jobs, pool.map(partial(self._lower, ended), jobs, jobs.values()), strict=True))
        self._segments |= made
        for bucket in missing:
            programs = {
                s: [*map(partial(self._stage, bucket, s), own, kinds[s])]
                for s, own in self._virtual_stages.items()
            }
            self._programs[bucket, phase] = RankPrograms(programs)
            self._made_for[bucket, phase] = rules.programs
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
                self._compilers[stage_replica].stage_mesh.shapes_sent(how.arrives, how.once.before)
                for programs in self.all_programs(phase)
                for virtual_stage in programs[stage_replica]
                for how in virtual_stage.tasks.values()
                if how.arrives
            }
            for stage_replica in self._virtual_stages
        }

    def _jobs(
        self, buckets: Sequence[Bucket], kinds: Mapping[int, Sequence[Collection[Kind]]]
    ) -> dict[Job, _Work]:
        """What there is to lower yet for virtual stages here, equal segments of a stage once."""
        jobs: dict[Job, _Work] = {}
        for bucket in buckets:
            for s, own in self._virtual_stages.items():
                for virtual_stage, wanted in zip(own, kinds[s], strict=True):
                    for shape in self._shapes_of(bucket, virtual_stage, bool(wanted)):
                        alike = self._alike.setdefault((bucket, virtual_stage.width, shape.kind), shape)
                        _, all_wanted = jobs.setdefault((bucket, s, shape.kind), (alike, set()))
                        all_wanted.update(parts_of(wanted) if self._halves else wanted)
        there = {job: own.lowered.keys() for job, own in self._segments.items()}
        return {job: own for job, own in jobs.items() if job not in there or own[1] - there[job]}

    def _shapes_of(self, bucket: Bucket, virtual_stage: VirtualStage, training: bool) -> list[SegmentShape]:
        """The segments of a virtual stage."""
        shapes, fields, layers = self._shapes[bucket, training], specs_of(bucket), virtual_stage.layers
        return [
            SegmentShape(
                pipe=self._pipe,
                layers=own,
                fields=fields,
                shapes=shapes,
                roles=self.roles,
                borders=self.flow(bucket).borders if training else None,  # else all leaves have a gradient
                remat=self._remat,
                joined=training and self.joined and own.stop == len(self._pipe),
                sharding=self.sharding(virtual_stage.width),
                ends=virtual_stage.ends,
            )
            for own in segments_of(layers, virtual_stage.width, self._together)
        ]

    def _lower(self, ended: Callable[[Job], None], job: Job, work: _Work) -> Segment:
        """The programs of a segment; without any kind of backward, those for forwards only."""
        (_, stage_replica, _), (shape, kinds) = job, work
        began, compiler = perf_counter(), self._compilers[stage_replica]
        with compiler.stage_mesh.tracing():
            made = Segment.lower(shape, kinds, OnDevices(compiler), self._segments.get(job))
        self.compile_seconds[stage_replica] += perf_counter() - began
        ended(job)
        return made

    def _stage(
        self, bucket: Bucket, stage_replica: int, virtual_stage: VirtualStage, kinds: Collection[Kind]
    ) -> StagePrograms:
        """Of segments that have been lowered."""
        shapes = self._shapes_of(bucket, virtual_stage, bool(kinds))
        segments = [self._segments[bucket, stage_replica, own.kind] for own in shapes]
        layers, by = [own.layers for own in shapes], OnDevices(self._compilers[stage_replica])
        with by.compiler.stage_mesh.tracing():
            return StagePrograms.of(layers, segments, kinds, by, ends=virtual_stage.ends, halves=self._halves)


def phase_of(rules: StepRules) -> Phase:
    """What a step by these rules is for."""
    return "evaluate" if rules.forward_only else "train"


def specs_of(bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
    """Specs of a bucket's fields by name."""
    return {name: jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for name, shape, dtype in bucket}
