"""The arrays that updates change, by names that say nothing of where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax

from rrfp_jax.random_keys import as_key, plain_spec
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.programs.stage_mesh import StageMesh
from rrfp_jax.runtime.stages.optimizer import Optimizer, OptimizerPrograms
from rrfp_jax.runtime.stages.stage import Stage
from rrfp_jax.runtime.stages.whole_optimizer import OptimizerPart, WholeOptimizer
from rrfp_jax.runtime.transport.exchange import Shards


class Leaf(NamedTuple):
    """Names an array that an update changes.

    Attributes:
        layer: that it belongs to; -1 for what belongs to none, which every stage has.
        of_state: whether it is of the optimizer's state, and not a parameter.
        number: among the layer's parameters, or in the state of the whole model.
    """

    layer: int
    of_state: bool
    number: int


Own: TypeAlias = MutableMapping[Leaf, Shards]
"""What a process's devices have of the leaves of a stage."""

Held: TypeAlias = MutableMapping[int, Own]
"""The same by stage replica of the process (see `Layout`)."""


@dataclass(frozen=True)
class Naming:
    """Which leaves the stages of a split have.

    Attributes:
        params: specs of all parameters, {layer index as text: nested dict}.
        chunks: by stage, the layers of each of its chunks.
        whole, parts: the optimizer, and the part of each stage; None and nothing without one.
    """

    params: Params
    chunks: Sequence[Sequence[range]]
    whole: WholeOptimizer | None
    parts: Sequence[OptimizerPart]

    def leaves(self) -> list[list[Leaf]]:
        """By stage. One whose layers have no parameters has no state either."""
        counts = {int(layer): len(jax.tree.leaves(own)) for layer, own in self.params.items()}
        layers = [[i for own in chunks for i in own] for chunks in self.chunks]
        found = [[Leaf(i, False, n) for i in own for n in range(counts[i])] for own in layers]
        for own, part in zip(found, self.parts, strict=False):
            own += [self._of_state(k) for k in part.state if part.params]
        return found

    def held(self, stages: Mapping[int, Stage], optimizers: Iterable[Optimizer]) -> Held:
        """What stages and optimizers have; nothing is copied."""
        found: Held = {}
        for number, stage in stages.items():
            found[number] = {
                Leaf(int(layer), False, n): stage.stage_mesh.shards([leaf])
                for layer, own in stage.params.items()
                for n, leaf in enumerate(jax.tree.leaves(own))
            }
        for optimizer in optimizers:
            for stage, shards in zip(optimizer.stages, optimizer.shards(), strict=True):
                of_state = zip(map(self._of_state, optimizer.places), shards, strict=True)
                found[stage.index].update(of_state)
        return found

    def state_in(
        self, held: Sequence[Own], programs: OptimizerPrograms, stage_mesh: StageMesh
    ) -> Sequence[jax.Array]:
        """An optimizer's state from what the stages that it updates here have, in their order."""
        leaves = map(self._of_state, programs.places)
        shards = [shard for leaf in leaves for own in held for shard in own[leaf]]
        arrays = stage_mesh.joined(shards, [plain_spec(spec) for spec in programs.state])
        return [as_key(spec, array) for spec, array in zip(programs.state, arrays, strict=True)]

    def _of_state(self, k: int) -> Leaf:
        assert self.whole is not None
        return Leaf(self.whole.layer_of(k), True, k)


def params_in(own: Own, specs: Params, stage_mesh: StageMesh) -> Params:
    """Parameters of some layers, like these specs (with shardings), from what a stage has."""
    found = {}
    for layer, of_layer in specs.items():
        leaves, structure = jax.tree.flatten(of_layer)
        shards = [shard for n in range(len(leaves)) for shard in own[Leaf(int(layer), False, n)]]
        found[layer] = jax.tree.unflatten(structure, stage_mesh.joined(shards, leaves))
    return found
