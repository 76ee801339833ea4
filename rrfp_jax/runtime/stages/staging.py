"""Makes this process's stages: parameters, gradient sums, optimizers, and what adds up replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import optax

from rrfp_jax.random_keys import as_key, plain_spec
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.mesh.topology import Layout
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.model.roles import LeafRoles
from rrfp_jax.runtime.model.sharding import Sharding
from rrfp_jax.runtime.programs.compiler import Compiler, first_sum
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.runtime.programs.gradients import Reduction, SumPrograms, leaves_of, wide
from rrfp_jax.runtime.programs.initial import InitFunction, InitialParams
from rrfp_jax.runtime.programs.library import Library, specs_of
from rrfp_jax.runtime.programs.segments import placed_params
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.stages.leaves import Held, LeafShards, params_in
from rrfp_jax.runtime.stages.optimizer import Optimizer, OptimizerPart, OptimizerPrograms, WholeOptimizer
from rrfp_jax.runtime.stages.stage import Leaf, Stage, leaves_in


class BuiltStages(NamedTuple):
    """Stages by stage replica (see `Layout`), what updates them, and by stage what adds up its replicas."""

    stages: Mapping[int, Stage]
    optimizers: Sequence[Optimizer]
    reductions: Mapping[int, Reduction]


class LastingPrograms(NamedTuple):
    """Programs that do not depend on microbatches."""

    sums: Mapping[int, SumPrograms]  # by stage replica
    reductions: Mapping[int, Reduction]  # by stage, what adds up its replicas
    optimizers: Mapping[int, OptimizerPrograms | None]  # by the first stage replica that it updates


@dataclass(eq=False)
class Staging:
    """Makes the stages of a process, once the library has examined a bucket."""

    pipe: Pipeline
    layout: Layout
    chunks: Sequence[Sequence[range]]  # layers of each chunk, by stage
    library: Library
    executables: Executables
    optimizer: optax.GradientTransformation | None
    seed: int
    init: InitFunction | None

    @cached_property
    def optimizer_parts(self) -> tuple[WholeOptimizer, Sequence[OptimizerPart]]:
        """The optimizer for the whole model, and the part of each stage."""
        whole = WholeOptimizer.trace(self.optimizer, self.library.updated)
        layers = [{i for own in chunks for i in own} for chunks in self.chunks]
        return whole, [whole.part(own, f"stage {s}") for s, own in enumerate(layers)]

    @property
    def optimizer_state(self) -> Any:
        """Specs of the optimizer's state for the whole model, None without one."""
        if self.optimizer is None:
            return None
        whole, _ = self.optimizer_parts
        return jax.tree.unflatten(whole.structure, [spec for _, spec in whole.state])

    def compile(self, pool: ThreadPoolExecutor) -> Callable[[], LastingPrograms]:
        """Compile in a pool's threads; what is returned waits for that."""
        if self.optimizer is not None:
            _ = self.optimizer_parts  # before several threads ask for them
        layout, updaters = self.layout, self._updaters
        sums = pool.map(self._compile_sums, layout.stage_meshes)
        reductions = pool.map(self._reduction, layout.homes)
        optimizers = pool.map(self._compile_optimizer, updaters)
        return lambda: LastingPrograms(
            dict(zip(layout.stage_meshes, sums, strict=True)),
            dict(zip(layout.homes, reductions, strict=True)),
            dict(zip(updaters, optimizers, strict=True)),
        )

    def begin(self, pool: ThreadPoolExecutor) -> Callable[[], BuiltStages]:
        """Compile and allocate in a pool's threads; what is returned waits for that."""
        programs = self.compile(pool)
        params = pool.map(self._initial, self.layout.stage_meshes)
        return lambda: self._build(programs(), params, None)

    def taking(self, programs: LastingPrograms, held: Held) -> BuiltStages:
        """Stages with leaves that come from others."""

        def params(stage_replica: int) -> list[Params]:
            stage_mesh = self.layout.stage_meshes[stage_replica]
            placed, _ = self.parts(stage_replica, stage_mesh)
            return [params_in(held[stage_replica], specs, stage_mesh) for specs in placed]

        return self._build(programs, map(params, self.layout.stage_meshes), held)

    def _build(self, programs: LastingPrograms, params: Iterable[Any], held: Held | None) -> BuiltStages:
        layout, stages = self.layout, dict[int, Stage]()
        for (number, stage_mesh), own in zip(layout.stage_meshes.items(), params, strict=True):
            _, roles = self.parts(number, stage_mesh)
            chunks = self.chunks[number % layout.stages]
            stages[number] = Stage(number, chunks, stage_mesh, own, roles, programs.sums[number])
        optimizers = []
        for first, stage_mesh in self._updaters.items():
            numbers = range(first, first + stage_mesh.replicas * layout.stages, layout.stages)
            updated = [number for number in numbers if number in stages]
            if (of := programs.optimizers[first]) is not None:
                state = None if held is None else self._state_in([held[n] for n in updated], of, stage_mesh)
                optimizers.append(Optimizer(of, stage_mesh, [stages[n] for n in updated], state))
        return BuiltStages(stages, optimizers, programs.reductions)

    def compile_start(self, pool: ThreadPoolExecutor) -> None:
        """Compile what `begin` and `connect` run once, and wait for that."""
        layout = self.layout
        meshes = [*layout.stage_meshes.values(), *layout.homes.values()]
        several = [self.compiler(stage_mesh) for stage_mesh in meshes if not stage_mesh.single]
        params = pool.map(partial(self._initial, only_compile=True), layout.stage_meshes)
        list(chain(params, pool.map(first_sum, several)))  # waits for both

    def connect(self) -> None:
        """Have all communicators made before a step, in one order everywhere."""
        world = self.layout.world
        for stage_meshes in (self.layout.stage_meshes, self.layout.homes):
            for number, stage_mesh in sorted(stage_meshes.items()):
                if not stage_mesh.single:
                    what = f"the first sum over all devices of {self.layout.name(number)}"
                    world.recorder.enters(what)
                    world.await_ready(what, [first_sum(self.compiler(stage_mesh))()], START_SECONDS)

    def compiler(self, stage_mesh: StageMesh) -> Compiler:
        return Compiler(stage_mesh, self.executables)

    def initial(self, compiler: Compiler, sharding: Sharding) -> InitialParams:
        """Makes initial parameters on the compiler's devices."""
        bucket, shapes = self.library.first
        return InitialParams(
            pipe=self.pipe,
            shapes=shapes,
            fields=specs_of(bucket),
            seed=self.seed,
            init=self.init,
            owners=self.library.roles.owners,
            compiler=compiler,
            sharding=sharding,
        )

    def parts(self, stage_replica: int, stage_mesh: StageMesh) -> tuple[list[Params], list[LeafRoles]]:
        """By chunk, specs of parameters with where they lie on these devices, and their roles."""
        specs, sharding = self.library.params, self.library.sharding(stage_mesh.width)
        chunks = self.chunks[stage_replica % self.layout.stages]
        params = [{str(i): specs[str(i)] for i in layers} for layers in chunks]
        placed = [placed_params(own, stage_mesh, sharding) for own in params]
        return placed, list(map(self.library.roles.leaves, params))

    def _initial(self, stage_replica: int, only_compile: bool = False) -> list[Any]:
        """The parameters of each chunk; or compile what makes them."""
        stage_mesh = self.layout.stage_meshes[stage_replica]
        initial = self.initial(self.compiler(stage_mesh), self.library.sharding(stage_mesh.width))
        make = initial.compile if only_compile else initial.of
        return list(map(make, self.chunks[stage_replica % self.layout.stages]))

    def _compile_sums(self, stage_replica: int) -> SumPrograms:
        stage_mesh = self.layout.stage_meshes[stage_replica]
        return SumPrograms.compile(*self.parts(stage_replica, stage_mesh), self.compiler(stage_mesh))

    def _reduction(self, stage: int) -> Reduction:
        layout = self.layout
        meshes = [layout.stage_meshes[number] for number in layout.replicas_of(stage)]
        placed, roles = self.parts(stage, meshes[0])
        spread = map(self.library.sharding(layout.widths[stage]).of_params, placed)
        partition = [own[place] for own, of in zip(spread, roles, strict=True) for place in of.trained]
        sums = [wide(leaves[place]) for leaves, of in leaves_of(placed, roles) for place in of.trained]
        home = self.compiler(layout.homes[stage])
        return Reduction(list(map(self.compiler, meshes)), home, sums, partition)

    @property
    def _updaters(self) -> Mapping[int, StageMesh]:
        """Where those are updated that are updated together here, by the first of these stage replicas."""
        return self.layout.homes if self.layout.shard_optimizer else self.layout.stage_meshes

    def _compile_optimizer(self, stage_replica: int) -> OptimizerPrograms | None:
        if self.optimizer is None:
            return None
        stage_mesh, (whole, each) = self._updaters[stage_replica], self.optimizer_parts
        part, first = each[stage_replica % self.layout.stages], next(own for own in each if own.params)
        parts, compiler = self.parts(stage_replica, stage_mesh), self.compiler(stage_mesh)
        return OptimizerPrograms.compile(*parts, whole, part, compiler, tells=part is first)

    # The leaves that stages have, by names that hold in every split.

    def leaves(self) -> list[list[Leaf]]:
        """By stage. One whose layers have no parameters has no state either."""
        params = self.library.params
        trees = [{str(i): params[str(i)] for own in chunks for i in own} for chunks in self.chunks]
        found = list(map(leaves_in, trees))
        if self.optimizer is not None:
            for own, part in zip(found, self.optimizer_parts[1], strict=True):
                own.extend(map(self._of_state, part.state if part.params else ()))
        return found

    def held(self, stages: Mapping[int, Stage], optimizers: Iterable[Optimizer]) -> Held:
        """What stages and optimizers have; nothing is copied."""
        found: Held = {
            number: {leaf: stage.stage_mesh.shards([stage.leaf(leaf)]) for leaf in stage.places}
            for number, stage in stages.items()
        }
        for optimizer in optimizers:
            for stage, shards in zip(optimizer.stages, optimizer.shards(), strict=True):
                found[stage.index].update(zip(map(self._of_state, optimizer.places), shards, strict=True))
        return found

    def _state_in(self, held: list[LeafShards], programs: OptimizerPrograms, mesh: StageMesh) -> list[Any]:
        """An optimizer's state from what the stages that it updates here have, in their order."""
        leaves = map(self._of_state, programs.places)
        shards = [shard for leaf in leaves for own in held for shard in own[leaf]]
        arrays = mesh.joined(shards, [plain_spec(spec) for spec in programs.state])
        return [as_key(spec, array) for spec, array in zip(programs.state, arrays, strict=True)]

    def _of_state(self, k: int) -> Leaf:
        whole, _ = self.optimizer_parts
        return Leaf(whole.layer_of(k), True, k)
