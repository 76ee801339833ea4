"""The optimizer of a stage: its state, which may be spread over the stage's replicas, and its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from rrfp_jax.random_keys import plain
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.paths import leaf_paths
from rrfp_jax.runtime.model.roles import LeafRoles
from rrfp_jax.runtime.programs.compiling import Compiled, Compiler
from rrfp_jax.runtime.programs.gradients import where, wide, widest, zeros
from rrfp_jax.runtime.programs.stage_mesh import StageMesh
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.stages.hyperparams import Hyperparams
from rrfp_jax.runtime.stages.replicas import apart, together
from rrfp_jax.runtime.stages.stage import Stage, merged, replace_arrays
from rrfp_jax.runtime.stages.whole_optimizer import OptimizerPart, WholeOptimizer


@dataclass(frozen=True, kw_only=True)
class OptimizerPrograms:
    """What an optimizer does on a stage; lists of arrays come per chunk.

    init          owned parameters -> its leaves of the optimizer's state
    update        owned parameters, state, owned sums, scale -> parameters, state, zeroed sums
                  (all donated); gradients are the sums times `scale`, a scalar as wide as the widest sum

    Attributes:
        owned, sums: specs of parameters and gradient sums, with their shardings.
        state, scale: specs of its leaves of the state, and of the scale.
        structure: of the state of the whole model.
        places: in it, of the stage's own leaves.
        hyperparams: that this stage tells; None if another does, or there are none.
    """

    init: Compiled
    update: Compiled
    owned: Sequence[Sequence[Any]]
    sums: Sequence[Sequence[Any]]
    state: Sequence[Any]
    scale: jax.ShapeDtypeStruct
    structure: Any
    places: Sequence[int]
    hyperparams: Hyperparams | None

    @classmethod
    def compile(
        cls,
        chunks: Sequence[Params],
        roles: Sequence[LeafRoles],
        whole: WholeOptimizer,
        part: OptimizerPart,
        compiler: Compiler,
        tells: bool,
    ) -> OptimizerPrograms | None:
        """Compile for the parameters of each chunk, given by specs with their shardings.

        One stage `tells` the hyperparameters, which are the same on all.

        Where the compiler's devices are those of several replicas, so is the state spread over them. None if
        the stage owns no parameter.
        """
        leaves = [jax.tree.leaves(params) for params in chunks]
        owned = [[own[i] for i in of.owned] for own, of in zip(leaves, roles, strict=True)]
        if not any(owned):
            return None
        sums, stage_mesh = [[wide(spec) for spec in own] for own in owned], compiler.stage_mesh
        trees = [of.owned_tree(own) for of, own in zip(roles, owned, strict=True)]
        places = [[part.params[path] for path in leaf_paths(tree)] for tree in trees]
        state = _placed_state([whole.state[k] for k in part.state], merged(trees), stage_mesh)
        scale = jax.ShapeDtypeStruct((), widest(spec.dtype for own in sums for spec in own))
        return cls(
            init=compiler(_init_of(part, places), owned, out=where(state), roughly=True),
            update=compiler(
                *(_update_of(whole, part, places), owned, state, sums, scale),
                out=where((owned, state, sums)),
                donate=(0, 1, 2),
            ),
            owned=owned,
            sums=sums,
            state=state,
            scale=scale,
            structure=whole.structure,
            places=part.state,
            hyperparams=Hyperparams.compile(whole, part, state, compiler) if tells else None,
        )


class Optimizer:
    """Of one stage.

    Args:
        programs: its own.
        stage_mesh: where its state lies: on the devices of its one replica, or of all.
        stages: those of this process that it updates, in the order of their replicas.
        state: as a flat list; None for the one that it begins with.

    Attributes:
        state: as a flat list.
    """

    def __init__(
        self,
        programs: OptimizerPrograms,
        stage_mesh: StageMesh,
        stages: Sequence[Stage],
        state: Sequence[jax.Array] | None = None,
    ) -> None:
        self._programs, self.stage_mesh, self.stages = programs, stage_mesh, stages
        self._meshes = [stage.stage_mesh for stage in stages]
        self.state: list[jax.Array] = [*state] if state is not None else []
        if state is None:
            self.begin()

    def begin(self) -> None:
        """Take the state that it begins with, given the parameters as they are now."""
        self.state = self._programs.init(self._gathered("owned", self._programs.owned))

    @property
    def tree(self) -> Any:
        """The state as the optimizer has it, with None for what is another stage's."""
        programs = self._programs
        leaves: list[Any] = [None] * programs.structure.num_leaves
        for place, leaf in zip(programs.places, self.state, strict=True):
            leaves[place] = leaf
        return jax.tree.unflatten(programs.structure, leaves)

    def shards(self) -> list[list[Sequence[jax.Array]]]:
        """By stage that it updates, what its devices here have of each leaf of the state, `plain`."""
        counts, parts = (
            [len(own.own) for own in self._meshes],
            self.stage_mesh.shards([*map(plain, self.state)]),
        )
        each = iter(parts)
        found: list[list[Sequence[jax.Array]]] = [[] for _ in self.stages]
        for _ in self.state:
            for own, count in zip(found, counts, strict=True):
                own.append(list(islice(each, count)))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the state on each device."""
        return nbytes(self.state)

    @property
    def places(self) -> Sequence[int]:
        """Of its leaves in the state of the whole model."""
        return self._programs.places

    @property
    def hyperparams(self) -> Hyperparams | None:
        """What the stage tells of them."""
        return self._programs.hyperparams

    def replace(self, state: Any) -> None:
        """Take another state, a tree like the one that there is; see `Stage.replace`."""
        replace_arrays(self.state, jax.tree.leaves(state))

    def update(self, scale: float) -> None:
        """One step with the gradient sums times `scale`; zeroes the sums."""
        programs = self._programs
        owned, sums = self._gathered("owned", programs.owned), self._gathered("owned_sums", programs.sums)
        (factor,) = self.stage_mesh.put_whole([np.asarray(scale, programs.scale.dtype)])
        new, self.state, zeroed = programs.update(owned, self.state, sums, factor)
        parts = zip(self.stages, self._scattered(new), self._scattered(zeroed), strict=True)
        for stage, params, own in parts:
            stage.updated(params, own)

    def _gathered(self, name: str, specs: Sequence[Sequence[Any]]) -> list[list[jax.Array]]:
        """What the stages have, by chunk, as arrays of this stage mesh."""
        own = [getattr(stage, name)() for stage in self.stages]
        if self._meshes == [self.stage_mesh]:
            return own[0]  # type: ignore[no-any-return]
        chunks = range(len(specs))
        return [together(self.stage_mesh, self._meshes, [of[c] for of in own], specs[c]) for c in chunks]

    def _scattered(self, arrays: Sequence[Sequence[jax.Array]]) -> list[list[list[jax.Array]]]:
        """The inverse: by stage, by chunk."""
        if self._meshes == [self.stage_mesh]:
            return [[list(own) for own in arrays]]
        chunks = [apart(self.stage_mesh, self._meshes, own) for own in arrays]
        return [[list(own[k]) for own in chunks] for k in range(len(self.stages))]


def _placed_state(
    state: Sequence[tuple[Any, Any]], params: Params, stage_mesh: StageMesh
) -> list[jax.ShapeDtypeStruct]:
    """Specs of leaves of a state with shardings: what has a parameter's name and shape lies as it does.

    An optimizer keeps trees like that of the parameters, so a leaf's path ends with its parameter's.
    """
    known = {_names(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(params)}
    found = []
    for path, leaf in state:
        names = _names(path)
        ends = (known.get(names[i:]) for i in range(len(names)))
        own = next((spec for spec in ends if spec is not None and spec.shape == leaf.shape), None)
        lies = stage_mesh.whole if own is None else own.sharding
        if own is not None and stage_mesh.replicas > 1:
            lies = stage_mesh.sharding(_over_replicas(own.sharding.spec, leaf.shape, stage_mesh.replicas))
        found.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies))
    return found


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _over_replicas(spec: PartitionSpec, shape: Sequence[int], replicas: int) -> PartitionSpec:
    """Spread a dimension over the replicas, too: the first that is whole and can be; else none."""
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        if axis is None and size and size % replicas == 0:
            return PartitionSpec(*axes[:i], "dp", *axes[i + 1 :])
    return spec


def _init_of(part: OptimizerPart, places: Sequence[Sequence[int]]) -> Any:
    """The function behind `OptimizerPrograms.init`; `places` are those of parameters in the whole model."""

    def init(owned: Any) -> list[Any]:
        known = _by_place(places, owned)
        return part.init(*(known[i] for i in part.init.reads))

    return init


def _update_of(whole: WholeOptimizer, part: OptimizerPart, places: Sequence[Sequence[int]]) -> Any:
    """The function behind `OptimizerPrograms.update`."""
    count, last = len(whole.paths), len(whole.paths) + len(whole.state)

    def update(old: Any, state: list[Any], sums: Any, scale: Any) -> tuple[Any, Any, Any]:
        gradients = jax.tree.map(lambda a, o: (a * scale.astype(a.dtype)).astype(o.dtype), sums, old)
        known = _by_place(places, gradients)
        known |= {count + k: leaf for k, leaf in zip(part.state, state, strict=True)}
        known |= {last + i: leaf for i, leaf in _by_place(places, old).items()}
        found = part.update(*(known[i] for i in part.update.reads))
        new = dict(zip(sorted(part.params.values()), found, strict=False))
        return [[new[i] for i in own] for own in places], found[len(new) :], zeros(sums)

    return update


def _by_place(places: Sequence[Sequence[int]], chunks: Sequence[Sequence[Any]]) -> dict[int, Any]:
    return {
        i: leaf
        for own, leaves in zip(places, chunks, strict=True)
        for i, leaf in zip(own, leaves, strict=True)
    }
