"""Makes this process's stages: parameters, gradient sums, optimizers, and what adds up replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import optax

from rrfp_jax.runtime.mesh.layout import Layout
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.model.roles import LeafRoles
from rrfp_jax.runtime.model.sharding import Sharding
from rrfp_jax.runtime.programs.compiler import Compiler, FirstSum
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
class Made:
    """Stages by stage replica (see `Layout`), what updates them, and by stage what adds up its replicas."""

    stages: Mapping[int, Stage]
    optimizers: Sequence[Optimizer]
    reductions: Mapping[int, Reduction]


class _Begun(NamedTuple):
    """What is being compiled: in the order of stage replicas, of stages, and of updaters."""

    sums: Iterable[SumPrograms]
    reductions: Iterable[Reduction]
    optimizers: Iterable[OptimizerPrograms | None]


@dataclass(frozen=True)
class LastingPrograms:
    """Programs that do not depend on microbatches.

    Attributes:
        sums: by stage replica.
        optimizers: by the first stage replica of those that are updated together; None if nothing is.
    """

    sums: Mapping[int, SumPrograms]
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
        """The optimizer for the whole model, and the part of each stage; needs one examined bucket.

        Raises:
            UsageError: see `WholeOptimizer.trace` and `part`.
        """
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

    def begin(self, pool: ThreadPoolExecutor) -> Callable[[], Made]:
        """Compile and allocate in a pool's threads; what is returned waits for that."""
        programs = self._begin(pool)
        params = pool.map(self._params_of_chunks, self._layout.stage_meshes)
        return lambda: self._make(programs, params)

    def begin_again(self, pool: ThreadPoolExecutor) -> Callable[[], Callable[[Held], Made]]:
        """As `begin`, for stages whose leaves come from others: what it gives in the end takes them."""
        begun = self._begin(pool)

        def finish() -> Callable[[Held], Made]:
            programs = _Begun(*map(list, begun))  # type: ignore[arg-type]  # which waits for them
            return lambda held: self._make(programs, map(partial(self._params_in, held), held), held)

        return finish

    def _begin(self, pool: ThreadPoolExecutor) -> _Begun:
        if self._optimizer is not None:
            _ = self.optimizer_parts  # before several threads ask for them
        return _Begun(
            sums=pool.map(self._compile_sums, self._layout.stage_meshes),
            reductions=pool.map(self._reduction, self._layout.homes),
            optimizers=pool.map(self._compile_optimizer, self._updaters()),
        )

    def _make(self, begun: _Begun, params: Iterable[list[Params]], held: Held | None = None) -> Made:
        parts = zip(self._layout.stage_meshes.items(), params, begun.sums, strict=True)
        stages = {
            number: Stage(number, self._chunks_of(number), stage_mesh, own, self._roles(number), programs)
            for (number, stage_mesh), own, programs in parts
        }
        optimizers = self._make_optimizers(stages, begun.optimizers, held)
        return Made(stages, optimizers, dict(zip(self._layout.homes, begun.reductions, strict=True)))

    def compile(self, pool: ThreadPoolExecutor) -> LastingPrograms:
        """Compile in a pool's threads what `begin` and `connect` compile, and run none of it."""
        if self._optimizer is not None:
            _ = self.optimizer_parts  # before several threads ask for them
        layout, updaters = self._layout, self._updaters()
        sums = pool.map(self._compile_sums, layout.stage_meshes)
        params = pool.map(self._compile_initial, layout.stage_meshes)
        reductions = pool.map(self._reduction, layout.homes)
        optimizers = pool.map(self._compile_optimizer, updaters)
        meshes = [*layout.stage_meshes.values(), *layout.homes.values()]
        several = [self.compiler(stage_mesh) for stage_mesh in meshes if not stage_mesh.single]
        first = pool.map(lambda compiler: FirstSum(compiler).program, several)
        for waited_for in (params, reductions, first):
            list(waited_for)
        return LastingPrograms(
            dict(zip(layout.stage_meshes, sums, strict=True)),
            {number: own for (number, _), own in zip(updaters, optimizers, strict=True)},
        )

    def connect(self) -> None:
        """Have all communicators made before a step, in one order everywhere."""
        for stage_meshes in (self._layout.stage_meshes, self._layout.homes):
            for number, stage_mesh in sorted(stage_meshes.items()):
                if not stage_mesh.single:
                    what = f"the first sum over all devices of {self._layout.name(number)}"
                    self._layout.world.recorder.board.enters(what)
                    total = FirstSum(self.compiler(stage_mesh))()
                    self._layout.world.await_ready(what, [total], START_SECONDS)

    def compiler(self, stage_mesh: StageMesh) -> Compiler:
        """For a set of devices."""
        return Compiler(stage_mesh, self._executables)

    def initial_params(self, layers: range, compiler: Compiler, sharding: Sharding) -> Params:
        """Initial parameters of some layers, on the compiler's devices."""
        return self._initial(compiler, sharding).of(layers)

    def _initial(self, compiler: Compiler, sharding: Sharding) -> InitialParams:
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

    def _params_of_chunks(self, stage_replica: int) -> list[Params]:
        stage_mesh = self._layout.stage_meshes[stage_replica]
        compiler, sharding = self.compiler(stage_mesh), self._library.sharding(stage_mesh.width)
        return [self.initial_params(layers, compiler, sharding) for layers in self._chunks_of(stage_replica)]

    def _params_in(self, held: Held, stage_replica: int) -> list[Params]:
        stage_mesh, own = self._layout.stage_meshes[stage_replica], held[stage_replica]
        return [params_in(own, specs, stage_mesh) for specs in self._placed(stage_replica, stage_mesh)]

    def _compile_initial(self, stage_replica: int) -> None:
        stage_mesh = self._layout.stage_meshes[stage_replica]
        initial = self._initial(self.compiler(stage_mesh), self._library.sharding(stage_mesh.width))
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

    def _updaters(self) -> list[tuple[int, StageMesh]]:
        """One of each set of stage replicas that are updated together here, and where that is done."""
        layout = self._layout
        return list((layout.homes if layout.shard_optimizer else layout.stage_meshes).items())

    def _compile_optimizer(self, updater: tuple[int, StageMesh]) -> OptimizerPrograms | None:
        if self._optimizer is None:
            return None
        stage_replica, stage_mesh = updater
        placed, roles = self._placed(stage_replica, stage_mesh), self._roles(stage_replica)
        whole, parts = self.optimizer_parts
        part, first = parts[stage_replica % self._layout.stages], next(own for own in parts if own.params)
        compiler = self.compiler(stage_mesh)
        return OptimizerPrograms.compile(placed, roles, whole, part, compiler, tells=part is first)

    def _make_optimizers(
        self, stages: Mapping[int, Stage], programs: Iterable[OptimizerPrograms | None], held: Held | None
    ) -> list[Optimizer]:
        found, count = [], self._layout.stages
        for (first, stage_mesh), own in zip(self._updaters(), programs, strict=True):
            numbers = range(first, first + stage_mesh.replicas * count, count)
            if own is not None:
                updated = [number for number in numbers if number in stages]
                state = None
                if held is not None:
                    state = self.naming.state_in([held[n] for n in updated], own, stage_mesh)
                found.append(Optimizer(own, stage_mesh, [stages[number] for number in updated], state))
        return found

    @property
    def naming(self) -> Naming:
        """Of the leaves that stages have; needs one examined bucket.

        Raises:
            UsageError: see `optimizer_parts`.
        """
        whole, parts = (None, ()) if self._optimizer is None else self.optimizer_parts
        return Naming(self._library.params, self._chunks, whole, parts)
