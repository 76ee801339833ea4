"""Makes this process's stages: parameters, gradient sums, optimizers, and what adds up replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import optax

from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.model.roles import LeafRoles
from rrfp_jax.runtime.model.sharding import Sharding
from rrfp_jax.runtime.programs.compiler import Compiler, first_sum
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.runtime.programs.gradients import SumPrograms, wide
from rrfp_jax.runtime.programs.initial import InitFunction, InitialParams
from rrfp_jax.runtime.programs.library import Library, specs_of
from rrfp_jax.runtime.programs.virtual_stage import placed_params
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.stages.leaves import Held, Naming, params_in
from rrfp_jax.runtime.stages.optimizer import Optimizer, OptimizerPart, OptimizerPrograms, WholeOptimizer
from rrfp_jax.runtime.stages.replicas import Reduction
from rrfp_jax.runtime.stages.stage import Stage


@dataclass(frozen=True)
class BuiltStages:
    """Stages by stage replica (see `Layout`), what updates them, and by stage what adds up its replicas."""

    stages: Mapping[int, Stage]
    optimizers: Sequence[Optimizer]
    reductions: Mapping[int, Reduction]


@dataclass(frozen=True)
class LastingPrograms:
    """Programs that do not depend on microbatches.

    Attributes:
        sums: by stage replica.
        reductions: by stage, what adds up its replicas.
        optimizers: by the first stage replica of those that are updated together; None if nothing is.
    """

    sums: Mapping[int, SumPrograms]
    reductions: Mapping[int, Reduction]
    optimizers: Mapping[int, OptimizerPrograms | None]


class Staging:
    """Makes the stages of a process, once the library has examined a bucket.

    Args:
        pipe: the model.
        layout: where stages are.
        chunks: by stage, the layers of each of its chunks.
        library: knows the parameters' specs, roles and shardings.
        executables: where compiled programs are kept.
        optimizer: None if the model is never updated.
        seed: of initial values.
        init: initial values from elsewhere, per leaf.
    """

    def __init__(
        self,
        pipe: Pipeline,
        layout: Layout,
        chunks: Sequence[Sequence[range]],
        library: Library,
        executables: Executables,
        optimizer: optax.GradientTransformation | None,
        seed: int,
        init: InitFunction | None,
    ) -> None:
        self._pipe, self._layout, self._chunks, self._library = pipe, layout, chunks, library
        self._executables, self._optimizer, self._seed, self._init = executables, optimizer, seed, init

    @cached_property
    def optimizer_parts(self) -> tuple[WholeOptimizer, Sequence[OptimizerPart]]:
        """The optimizer for the whole model, and the part of each stage; needs one examined bucket."""
        whole = WholeOptimizer.trace(self._optimizer, self._library.updated)
        layers = [{i for own in chunks for i in own} for chunks in self._chunks]
        return whole, [whole.part(own, f"stage {s}") for s, own in enumerate(layers)]

    @property
    def optimizer_state(self) -> Any:
        """Specs of the optimizer's state for the whole model, None without one; as `optimizer_parts`."""
        if self._optimizer is None:
            return None
        whole, _ = self.optimizer_parts
        return jax.tree.unflatten(whole.structure, [spec for _, spec in whole.state])

    def compile(self, pool: ThreadPoolExecutor) -> Callable[[], LastingPrograms]:
        """Compile in a pool's threads; what is returned waits for that."""
        if self._optimizer is not None:
            _ = self.optimizer_parts  # before several threads ask for them
        layout, updaters = self._layout, self._updaters()
        sums = pool.map(self._compile_sums, layout.stage_meshes)
        reductions = pool.map(self._reduction, layout.homes)
        optimizers = pool.map(self._compile_optimizer, updaters.items())
        return lambda: LastingPrograms(
            dict(zip(layout.stage_meshes, sums, strict=True)),
            dict(zip(layout.homes, reductions, strict=True)),
            dict(zip(updaters, optimizers, strict=True)),
        )

    def begin(self, pool: ThreadPoolExecutor) -> Callable[[], BuiltStages]:
        """Compile and allocate in a pool's threads; what is returned waits for that."""
        programs = self.compile(pool)
        params = pool.map(self._initial_params, self._layout.stage_meshes)
        return lambda: self._build(programs(), params)

    def taking(self, programs: LastingPrograms, held: Held) -> BuiltStages:
        """Stages with leaves that come from others."""
        return self._build(programs, (self._params_in(held, number) for number in held), held)

    def _build(
        self, programs: LastingPrograms, params: Iterable[list[Params]], held: Held | None = None
    ) -> BuiltStages:
        meshes = self._layout.stage_meshes
        stages = {
            number: Stage(
                number,
                self._chunks_of(number),
                meshes[number],
                own,
                self._roles(number),
                programs.sums[number],
            )
            for number, own in zip(meshes, params, strict=True)
        }
        return BuiltStages(stages, self._optimizers(stages, programs, held), programs.reductions)

    def compile_start(self, pool: ThreadPoolExecutor) -> None:
        """Compile what `begin` and `connect` run once, and wait for that."""
        layout = self._layout
        meshes = [*layout.stage_meshes.values(), *layout.homes.values()]
        several = [self.compiler(stage_mesh) for stage_mesh in meshes if not stage_mesh.single]
        params = pool.map(self._compile_initial, layout.stage_meshes)
        first = pool.map(first_sum, several)
        for waited_for in (params, first):
            list(waited_for)

    def connect(self) -> None:
        """Have all communicators made before a step, in one order everywhere."""
        for stage_meshes in (self._layout.stage_meshes, self._layout.homes):
            for number, stage_mesh in sorted(stage_meshes.items()):
                if not stage_mesh.single:
                    what = f"the first sum over all devices of {self._layout.name(number)}"
                    self._layout.world.recorder.enters(what)
                    total = first_sum(self.compiler(stage_mesh))()
                    self._layout.world.await_ready(what, [total], START_SECONDS)

    def compiler(self, stage_mesh: StageMesh) -> Compiler:
        """For a set of devices."""
        return Compiler(stage_mesh, self._executables)

    def initial(self, compiler: Compiler, sharding: Sharding) -> InitialParams:
        """Makes initial parameters on the compiler's devices."""
        bucket, shapes = self._library.first
        return InitialParams(
            pipe=self._pipe,
            shapes=shapes,
            fields=specs_of(bucket),
            seed=self._seed,
            init=self._init,
            owners=self._library.roles.owners,
            compiler=compiler,
            sharding=sharding,
        )

    def _chunks_of(self, stage_replica: int) -> Sequence[range]:
        _, stage = self._layout.place(stage_replica)
        return self._chunks[stage]

    def _specs(self, stage_replica: int) -> list[Params]:
        """Of the parameters of each chunk."""
        specs = self._library.params
        return [{str(i): specs[str(i)] for i in layers} for layers in self._chunks_of(stage_replica)]

    def _placed(self, stage_replica: int, stage_mesh: StageMesh) -> list[Params]:
        """The same, with where they lie."""
        sharding = self._library.sharding(stage_mesh.width)
        return [placed_params(own, stage_mesh, sharding) for own in self._specs(stage_replica)]

    def _roles(self, stage_replica: int) -> list[LeafRoles]:
        return [self._library.roles.leaves(specs) for specs in self._specs(stage_replica)]

    def _initial(self, stage_replica: int) -> InitialParams:
        stage_mesh = self._layout.stage_meshes[stage_replica]
        return self.initial(self.compiler(stage_mesh), self._library.sharding(stage_mesh.width))

    def _initial_params(self, stage_replica: int) -> list[Params]:
        initial = self._initial(stage_replica)
        return [initial.of(layers) for layers in self._chunks_of(stage_replica)]

    def _params_in(self, held: Held, stage_replica: int) -> list[Params]:
        stage_mesh, own = self._layout.stage_meshes[stage_replica], held[stage_replica]
        return [params_in(own, specs, stage_mesh) for specs in self._placed(stage_replica, stage_mesh)]

    def _compile_initial(self, stage_replica: int) -> None:
        initial = self._initial(stage_replica)
        for layers in self._chunks_of(stage_replica):
            initial.compile(layers)

    def _compile_sums(self, stage_replica: int) -> SumPrograms:
        stage_mesh = self._layout.stage_meshes[stage_replica]
        placed, roles = self._placed(stage_replica, stage_mesh), self._roles(stage_replica)
        return SumPrograms.compile(placed, roles, self.compiler(stage_mesh))

    def _reduction(self, stage: int) -> Reduction:
        own = [self._layout.stage_meshes[number] for number in self._layout.replicas_of(stage)]
        specs: list[Any] = []
        partition: list[Any] = []
        sharding = self._library.sharding(self._layout.widths[stage])
        for params, roles in zip(self._specs(stage), self._roles(stage), strict=True):
            leaves, spread = jax.tree.leaves(params), sharding.of_params(params)
            specs += [wide(leaves[place]) for place in roles.trained]
            partition += [spread[place] for place in roles.trained]
        home = self.compiler(self._layout.homes[stage])
        return Reduction(list(map(self.compiler, own)), home, specs, partition)

    def _updaters(self) -> Mapping[int, StageMesh]:
        """Where those are updated that are updated together here, by the first of these stage replicas."""
        layout = self._layout
        return layout.homes if layout.shard_optimizer else layout.stage_meshes

    def _compile_optimizer(self, updater: tuple[int, StageMesh]) -> OptimizerPrograms | None:
        if self._optimizer is None:
            return None
        stage_replica, stage_mesh = updater
        placed, roles = self._placed(stage_replica, stage_mesh), self._roles(stage_replica)
        whole, parts = self.optimizer_parts
        part, first = parts[stage_replica % self._layout.stages], next(own for own in parts if own.params)
        compiler = self.compiler(stage_mesh)
        return OptimizerPrograms.compile(placed, roles, whole, part, compiler, tells=part is first)

    def _optimizers(
        self, stages: Mapping[int, Stage], programs: LastingPrograms, held: Held | None
    ) -> list[Optimizer]:
        found, count = [], self._layout.stages
        for first, stage_mesh in self._updaters().items():
            numbers = range(first, first + stage_mesh.replicas * count, count)
            updated = [number for number in numbers if number in stages]
            if (own := programs.optimizers[first]) is not None:
                state = None
                if held is not None:
                    state = self.naming.state_in([held[n] for n in updated], own, stage_mesh)
                found.append(Optimizer(own, stage_mesh, [stages[number] for number in updated], state))
        return found

    @property
    def naming(self) -> Naming:
        """Of the leaves that stages have; needs one examined bucket."""
        whole, parts = (None, ()) if self._optimizer is None else self.optimizer_parts
        return Naming(self._library.params, self._chunks, whole, parts)
