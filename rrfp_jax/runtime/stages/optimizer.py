"""The optimizer of a stage: its state, which may be spread over the stage's replicas, and its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.roles import LeafRoles
from rrfp_jax.runtime.programs.compiling import Compiled, Compiler
from rrfp_jax.runtime.programs.gradients import where, wide, zeros
from rrfp_jax.runtime.programs.stage_mesh import StageMesh
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.stages.replicas import apart, together
from rrfp_jax.runtime.stages.stage import Stage, merged, replace_arrays


@dataclass(frozen=True, kw_only=True)
class OptimizerPrograms:
    """What an optimizer does; lists of arrays come per chunk of the stage.

    init          owned parameters -> optimizer state
    update        owned parameters, optimizer state, owned sums, scale -> parameters, state, zeroed sums
                  (all donated); gradients are the sums times `scale`, a float32 scalar

    The optimizer sees a tree of the owned leaves only (`roles.py`).

    Attributes:
        owned, sums: specs of parameters and gradient sums, with their shardings.
        structure: of the state.
    """

    init: Compiled
    update: Compiled
    owned: Sequence[Sequence[Any]]
    sums: Sequence[Sequence[Any]]
    structure: Any

    @classmethod
    def compile(
        cls,
        chunks: Sequence[Params],
        roles: Sequence[LeafRoles],
        optimizer: optax.GradientTransformation,
        compiler: Compiler,
    ) -> OptimizerPrograms | None:
        """Trace and compile for the parameters of each chunk, given by specs with their shardings.

        Where the compiler's devices are those of several replicas, so is the state spread over them. None if
        the stage owns no parameter.
        """
        leaves = [jax.tree.leaves(params) for params in chunks]
        owned = [[own[i] for i in of.owned] for own, of in zip(leaves, roles, strict=True)]
        if not any(owned):
            return None
        sums, stage_mesh = [[wide(spec) for spec in own] for own in owned], compiler.stage_mesh
        tree = merged(_trees(roles, owned))
        state, structure = jax.tree.flatten(
            _state_like(
                jax.eval_shape(optimizer.init, tree), tree, stage_mesh, over_replicas=stage_mesh.replicas > 1
            )
        )
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        return cls(
            init=compiler(_init_of(optimizer, roles), owned, out=where(state)),
            update=compiler(
                *(_update_of(optimizer, roles, structure), owned, state, sums, scale),
                out=where((owned, state, sums)),
                donate=(0, 1, 2),
            ),
            owned=owned,
            sums=sums,
            structure=structure,
        )


class Optimizer:
    """Of one stage.

    Args:
        programs: its own.
        stage_mesh: where its state lies: on the devices of its one replica, or of all.
        stages: those of this process that it updates, in the order of their replicas.

    Attributes:
        state: as a flat list.
    """

    def __init__(self, programs: OptimizerPrograms, stage_mesh: StageMesh, stages: Sequence[Stage]) -> None:
        self._programs, self.stage_mesh, self.stages = programs, stage_mesh, stages
        self._sites = [stage.stage_mesh for stage in stages]
        self.state: list[jax.Array] = programs.init(self._gathered("owned", programs.owned))

    @property
    def tree(self) -> Any:
        """The state as the optimizer has it."""
        return jax.tree.unflatten(self._programs.structure, self.state)

    @property
    def nbytes(self) -> int:
        """Bytes of the state on each device."""
        return nbytes(self.state)

    def replace(self, state: Any) -> None:
        """Take another state, a tree like the one that there is; see `Stage.replace`."""
        replace_arrays(self.state, jax.tree.leaves(state))

    def update(self, scale: float) -> None:
        """One step with the gradient sums times `scale`; zeroes the sums."""
        programs = self._programs
        owned, sums = self._gathered("owned", programs.owned), self._gathered("owned_sums", programs.sums)
        factor = self.stage_mesh.put(np.float32(scale))
        new, self.state, zeroed = programs.update(owned, self.state, sums, factor)
        parts = zip(self.stages, self._scattered(new), self._scattered(zeroed), strict=True)
        for stage, params, own in parts:
            stage.updated(params, own)

    def _gathered(self, name: str, specs: Sequence[Sequence[Any]]) -> list[list[jax.Array]]:
        """What the stages have, by chunk, as arrays of this stage mesh."""
        own = [getattr(stage, name)() for stage in self.stages]
        if self._sites == [self.stage_mesh]:
            return own[0]  # type: ignore[no-any-return]
        chunks = range(len(specs))
        return [together(self.stage_mesh, self._sites, [of[c] for of in own], specs[c]) for c in chunks]

    def _scattered(self, arrays: Sequence[Sequence[jax.Array]]) -> list[list[list[jax.Array]]]:
        """The inverse: by stage, by chunk."""
        if self._sites == [self.stage_mesh]:
            return [[list(own) for own in arrays]]
        chunks = [apart(self.stage_mesh, self._sites, own) for own in arrays]
        return [[list(own[k]) for own in chunks] for k in range(len(self.stages))]


def _state_like(state: Any, params: Params, stage_mesh: StageMesh, over_replicas: bool) -> Any:
    """Specs of an optimizer's state with shardings: what has a parameter's name and shape lies as it does.

    An optimizer keeps trees like that of the parameters, so a leaf's path ends with its parameter's.
    """
    known = {_names(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(params)}

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        names = _names(path)
        ends = (known.get(names[i:]) for i in range(len(names)))
        own = next((spec for spec in ends if spec is not None and spec.shape == leaf.shape), None)
        lies = stage_mesh.whole if own is None else own.sharding
        if own is not None and over_replicas:
            lies = stage_mesh.sharding(_over_replicas(own.sharding.spec, leaf.shape, stage_mesh.replicas))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies)

    return jax.tree_util.tree_map_with_path(placed, state)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _over_replicas(spec: PartitionSpec, shape: Sequence[int], replicas: int) -> PartitionSpec:
    """Spread a dimension over the replicas, too: the first that is whole and can be; else none."""
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        if axis is None and size and size % replicas == 0:
            return PartitionSpec(*axes[:i], "dp", *axes[i + 1 :])
    return spec


def _init_of(optimizer: optax.GradientTransformation, roles: Sequence[LeafRoles]) -> Any:
    """The function behind `OptimizerPrograms.init`."""
    return lambda leaves: jax.tree.leaves(optimizer.init(merged(_trees(roles, leaves))))


def _update_of(optimizer: optax.GradientTransformation, roles: Sequence[LeafRoles], structure: Any) -> Any:
    """The function behind `OptimizerPrograms.update`; `structure` is that of the optimizer's state."""

    def update(old: Any, state: list[Any], sums: Any, scale: Any) -> tuple[Any, Any, Any]:
        gradients = jax.tree.map(lambda a, o: (a * scale).astype(o.dtype), sums, old)
        trees = _trees(roles, old)
        state = jax.tree.unflatten(structure, state)
        changes, after = optimizer.update(merged(_trees(roles, gradients)), state, merged(trees))
        new = optax.apply_updates(merged(trees), changes)
        leaves = [jax.tree.leaves({layer: new[layer] for layer in own}) for own in trees]
        return leaves, jax.tree.leaves(after), zeros(sums)

    return update


def _trees(roles: Sequence[LeafRoles], owned: Sequence[Sequence[Any]]) -> list[Params]:
    return [of.owned_tree(leaves) for of, leaves in zip(roles, owned, strict=True)]
