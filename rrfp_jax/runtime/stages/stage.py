"""One stage's arrays, and its tasks in one step: what arrived, what a microbatch holds, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from rrfp_jax.core.memory.meter import Meter
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Task
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.paths import leaf_paths
from rrfp_jax.runtime.model.roles import LeafRoles
from rrfp_jax.runtime.programs.compiling import Compiled
from rrfp_jax.runtime.programs.gradients import SumPrograms
from rrfp_jax.runtime.programs.passage import Leg
from rrfp_jax.runtime.programs.programs import VirtualStagePrograms
from rrfp_jax.runtime.programs.stage_mesh import StageMesh
from rrfp_jax.runtime.sizes import nbytes

Arrays: TypeAlias = Sequence[jax.Array]


class Stage:
    """What a stage keeps from step to step, on its devices.

    Args:
        index: its stage replica (see `Layout`).
        chunks: indices of the layers of each chunk.
        stage_mesh: where its parameters live and its programs run.
        params: of each chunk, {layer index as text: nested dict}, there; from now on owned by the stage.
        roles: of each chunk's parameters.
        updates: its bucket-independent programs.

    Attributes:
        leaves: the parameters of each chunk as a flat list.
        loss_scale: float32 scalar, by which the gradients of coming steps are multiplied.
    """

    def __init__(
        self,
        index: int,
        chunks: Sequence[range],
        stage_mesh: StageMesh,
        params: Sequence[Params],
        roles: Sequence[LeafRoles],
        updates: SumPrograms,
    ) -> None:
        self.index = index
        self.chunks = chunks
        self.stage_mesh = stage_mesh
        self._roles, self._updates = roles, updates
        self.leaves = [jax.tree.leaves(own) for own in params]
        self._sums: list[list[jax.Array]] = []  # of the trained leaves
        self.reset_gradients()
        self._loss_scale = 0.0
        self.scale_loss(1.0)

    @property
    def params(self) -> Params:
        """The parameters as a tree. An update replaces them and frees the old ones."""
        pairs = zip(self._roles, self.leaves, strict=True)
        return merged([jax.tree.unflatten(roles.structure, own) for roles, own in pairs])

    @property
    def gradients(self) -> Params:
        """The sums of the gradients added since the last update or reset; frozen leaves are left out."""
        pairs = zip(self._roles, self._sums, strict=True)
        return merged([roles.trained_tree(own) for roles, own in pairs])

    @property
    def sums(self) -> list[jax.Array]:
        """Those sums as one flat list."""
        return [leaf for own in self._sums for leaf in own]

    def replace_sums(self, sums: Arrays) -> None:
        """Take other values for them."""
        rest = iter(sums)
        self._sums = [list(islice(rest, len(own))) for own in self._sums]

    @property
    def gradient_bytes(self) -> int:
        """Of a microbatch's gradients of the chunk that has most."""
        pairs = zip(self._roles, self.leaves, strict=True)
        return max(nbytes([own[place] for place in roles.trained]) for roles, own in pairs)

    def replace(self, params: Params) -> None:
        """Take other values for parameters.

        Args:
            params: a tree like the one that there is, of arrays or of what gives, for a tuple of slices, that
                part of one.
        """
        for layers, own in zip(self.chunks, self.leaves, strict=True):
            replace_arrays(own, jax.tree.leaves({str(i): params[str(i)] for i in layers}))

    def scale_loss(self, scale: float) -> None:
        """Set what gradients of coming steps are multiplied by."""
        if scale != self._loss_scale:
            self._loss_scale, self.loss_scale = scale, self.stage_mesh.put(np.float32(scale))

    def add(self, chunk: int, gradients: Arrays) -> None:
        """Add a microbatch's gradients of a chunk to the sums."""
        self._sums[chunk] = self._updates.accumulate[chunk](self._sums[chunk], gradients)

    def norms(self) -> jax.Array:
        """Of gradient sums and parameters that this stage owns; see `SumPrograms`."""
        return self._updates.norms(self.owned(), self.owned_sums())  # type: ignore[no-any-return]

    def updated(self, owned: Sequence[Arrays], sums: Sequence[Arrays]) -> None:
        """Take new values of the owned parameters, by chunk, and zeros for their sums.

        Aliases of parameters that are owned elsewhere wait for the new value.
        """
        aliased_sums = self._updates.zero_aliases()
        for chunk, roles in enumerate(self._roles):
            for place, leaf in zip(roles.owned, owned[chunk], strict=True):
                self.leaves[chunk][place] = leaf
            new = dict(zip(roles.owned, sums[chunk], strict=True))
            new |= zip(roles.aliases, aliased_sums[chunk], strict=True)
            self._sums[chunk] = [new[place] for place in roles.trained]

    def reset_gradients(self) -> None:
        """Start from zero, after a step that was broken off or is not applied."""
        self._sums = self._updates.zeros()

    def not_finite(self) -> list[str]:
        """The paths of gradient sums that are not finite; looks at all of them on the host."""
        tree = self.gradients
        leaves = zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
        return [path for path, leaf in leaves if not _is_finite(leaf)]

    # Tied parameters, by chunk and place in its list of leaves.

    def leaf(self, chunk: int, place: int) -> jax.Array:
        """A parameter."""
        own: Sequence[jax.Array] = self.leaves[chunk]
        return own[place]

    def set_leaf(self, chunk: int, place: int, value: jax.Array) -> None:
        """Give an alias its owner's value."""
        self.leaves[chunk][place] = value

    def gradient(self, chunk: int, place: int) -> jax.Array:
        """The gradient sum of a parameter."""
        sums: Sequence[jax.Array] = self._sums[chunk]
        return sums[self._roles[chunk].number[place]]

    def set_gradient(self, chunk: int, place: int, value: jax.Array) -> None:
        """Give an alias its owner's gradient sum."""
        self._sums[chunk][self._roles[chunk].number[place]] = value

    def add_aliases(self, chunk: int, place: int, gradients: Arrays) -> None:
        """Add the gradient sums of all its aliases to an owner's."""
        total = self._updates.add_aliases[chunk, place](self.gradient(chunk, place), list(gradients))
        self.set_gradient(chunk, place, total)

    # What an optimizer sees, by chunk.

    def owned(self) -> list[Arrays]:
        """The parameters that are updated here."""
        pairs = zip(self._roles, self.leaves, strict=True)
        return [[own[place] for place in roles.owned] for roles, own in pairs]

    def owned_sums(self) -> list[Arrays]:
        """Their gradient sums."""
        chunks = range(len(self._roles))
        return [[self.gradient(chunk, place) for place in self._roles[chunk].owned] for chunk in chunks]


def merged(chunks: Sequence[Params]) -> Params:
    """The layers of all chunks in one dict."""
    return {layer: params for chunk in chunks for layer, params in chunk.items()}


def replace_arrays(arrays: list[jax.Array], values: Sequence[Any]) -> None:
    """Put values where these arrays are, one after the other, so that no more than one is there twice."""
    for i, (old, new) in enumerate(zip(arrays, values, strict=True)):
        if isinstance(new, jax.Array):
            arrays[i] = jax.device_put(new, old.sharding)
        else:
            arrays[i] = jax.make_array_from_callback(old.shape, old.sharding, new.__getitem__)


def _is_finite(leaf: jax.Array) -> bool:
    """Whether all that is here of an array is."""
    return all(np.isfinite(np.asarray(shard.data)).all() for shard in leaf.addressable_shards)


class _Bound(NamedTuple):
    """A leg with the parameters and prepared values that it takes in this step."""

    leg: Leg
    program: Compiled | None
    head: Sequence[jax.Array]
    counts: bool  # whether a vector of statistics is the first of its outputs that stay


class ModelStep:
    """The tasks of every microbatch on one stage: of training, or forwards only.

    Args:
        stage: the stage, whose gradient sums it adds to.
        phase: for messages and expected durations.
        programs: of each bucket, those of each chunk.
        buckets: the bucket of each microbatch.
        inputs: per microbatch, what its programs read: fields, then numbers; None where none reads it.

    Attributes:
        meter: counts what the stage holds for microbatches.
        statistics: by chunk and microbatch, the vector of numbers that its forward gave.
    """

    def __init__(
        self,
        stage: Stage,
        phase: str,
        programs: Sequence[Sequence[VirtualStagePrograms]],
        buckets: Sequence[int],
        inputs: Sequence[Sequence[jax.Array | None]],
    ) -> None:
        self.stage, self.phase, self.buckets = stage, phase, buckets
        self.meter = Meter(
            [[virtual_stage.footprint for virtual_stage in virtual_stages] for virtual_stages in programs],
            buckets,
        )
        self.statistics: dict[tuple[int, int], jax.Array] = {}
        self._legs: dict[tuple[int, int, Kind], _Bound] = {}
        for bucket, virtual_stages in enumerate(programs):
            for chunk, virtual_stage in enumerate(virtual_stages):
                self._bind(bucket, chunk, virtual_stage, stage.leaves[chunk])
        self._arrived: dict[Task, Arrays] = {}
        self._held: dict[tuple[int, int], list[Any]] = {
            (chunk, j): list(values) for j, values in enumerate(inputs) for chunk in range(len(stage.leaves))
        }
        self._gradients: dict[tuple[int, int], Arrays] = {}

    def receive(self, task: Task, arrays: Arrays) -> None:
        """See `StageStep.receive`."""
        leg = self._legs[self.buckets[task.microbatch], task.chunk, task.kind].leg
        self._arrived[task] = self.stage.stage_mesh.copied(arrays) if leg.arrives_once else arrays

    def run(self, task: Task) -> tuple[Arrays, jax.Array | None]:
        """See `StageStep.run`."""
        kind, chunk, microbatch = task
        leg, program, head, counts = self._legs[self.buckets[microbatch], chunk, kind]
        stage_mesh = self.stage.stage_mesh
        at_hand = self._held.pop((chunk, microbatch))
        if task in self._arrived:
            arrays = self._arrived.pop(task)
            at_hand += arrays if leg.arrives_once else stage_mesh.joined(arrays, leg.arrives)
        if kind is BACKWARD or kind is INPUT:
            at_hand.append(self.stage.loss_scale)
        outputs = program(*head, *[at_hand[i] for i in leg.takes]) if program is not None else []
        if kind is BACKWARD or kind is WEIGHT:
            self._gradients[chunk, microbatch] = outputs[leg.sends :]
        else:
            at_hand += outputs
            self._held[chunk, microbatch] = [at_hand[i] for i in leg.keeps]
            if counts:
                self.statistics[chunk, microbatch] = outputs[leg.sends]
        sent = (stage_mesh.copies if leg.sends_once else stage_mesh.shards)(outputs[: leg.sends])
        return sent, outputs[0] if outputs else None

    def accumulate(self, chunk: int, microbatch: int) -> None:
        """See `StageStep.accumulate`."""
        self.stage.add(chunk, self._gradients.pop((chunk, microbatch)))

    def _bind(self, bucket: int, chunk: int, virtual_stage: VirtualStagePrograms, leaves: Arrays) -> None:
        fixed = [*leaves]
        if virtual_stage.prepare is not None:  # what depends on parameters alone is computed once a step
            fixed += virtual_stage.prepare(*[leaves[i] for i in virtual_stage.prepare_reads])
        for kind, leg in virtual_stage.legs.items():
            head = [fixed[i] for i in leg.head]
            counts = kind is FORWARD and bool(virtual_stage.statistics)
            self._legs[bucket, chunk, kind] = _Bound(leg, leg.program, head, counts)
