"""What a stage keeps from step to step: its parameters and the sums of their gradients, on its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from rrfp_jax.random_keys import as_key, plain
from rrfp_jax.runtime._jax import on_host
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh, from_shards
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.roles import LeafRoles, leaf_paths
from rrfp_jax.runtime.programs.gradients import SumPrograms
from rrfp_jax.runtime.sizes import nbytes

Arrays: TypeAlias = Sequence[jax.Array]


class Leaf(NamedTuple):
    """Names an array that an update changes."""

    layer: int  # that it belongs to; -1 for what belongs to none, which every stage has
    of_state: bool  # whether it is of the optimizer's state, and not a parameter
    number: int  # among the layer's parameters, or in the state of the whole model


def leaves_in(params: Params) -> list[Leaf]:
    """The leaves of {layer index as text: tree}, in leaf order."""
    return [Leaf(int(i), False, n) for i in sorted(params) for n in range(len(jax.tree.leaves(params[i])))]


class Stage:
    """What a stage keeps from step to step, on its devices."""

    def __init__(
        self,
        index: int,
        chunks: Sequence[range],
        stage_mesh: StageMesh,
        params: Sequence[Params],
        roles: Sequence[LeafRoles],
        programs: SumPrograms,
    ) -> None:
        self.index, self.chunks, self.stage_mesh = index, chunks, stage_mesh
        self._roles, self._programs = roles, programs
        of_chunks = list(enumerate(roles))
        self._owned = [(chunk, place, of.number[place]) for chunk, of in of_chunks for place in of.owned]
        self._aliases = [(chunk, of.number[place]) for chunk, of in of_chunks for place in of.aliases]
        self.leaves = [jax.tree.leaves(own) for own in params]
        self._sums: list[list[jax.Array]] = []  # of the trained leaves, by chunk
        self.reset_gradients()
        self._loss_scale = 0.0
        self.scale_loss(1.0)

    @cached_property
    def indices(self) -> list[Arrays]:
        """The indices of the layers of each chunk, as programs take them."""
        values = iter(self.stage_mesh.put_whole([np.uint32(i) for own in self.chunks for i in own]))
        return [[*islice(values, len(own))] for own in self.chunks]

    @property
    def params(self) -> Params:
        """The parameters as a tree. An update replaces them and frees the old ones."""
        pairs = zip(self._roles, self.leaves, strict=True)
        return merged([jax.tree.unflatten(roles.structure, own) for roles, own in pairs])

    @property
    def gradients(self) -> Params:
        """The sums of the gradients added since the last update or reset; frozen leaves are left out."""
        return merged([of.tree(of.trained, own) for of, own in zip(self._roles, self._sums, strict=True)])

    @property
    def sums(self) -> list[jax.Array]:
        """The gradient sums as one flat list."""
        return [leaf for own in self._sums for leaf in own]

    def replace_sums(self, sums: Arrays) -> None:
        """Take other values for them."""
        rest = iter(sums)
        self._sums = [list(islice(rest, len(own))) for own in self._sums]

    @property
    def gradient_bytes(self) -> list[int]:
        """Bytes of a microbatch's parked gradients, by chunk: as wide as the sums."""
        return [nbytes(own) for own in self._sums]

    def replace(self, params: Params) -> None:
        """Take other values for parameters: a tree like the one that there is; see `replace_arrays`."""
        for layers, own in zip(self.chunks, self.leaves, strict=True):
            replace_arrays(own, jax.tree.leaves({str(i): params[str(i)] for i in layers}))

    def scale_loss(self, scale: float) -> None:
        """Set what gradients of coming steps are multiplied by."""
        if scale != self._loss_scale:
            self._loss_scale, self.loss_scale = scale, self.stage_mesh.put(np.float32(scale))

    def sums_of(self, chunk: int) -> list[jax.Array]:
        """The sums of a chunk, for a program that adds to them and takes their memory; see `put_sums`."""
        return self._sums[chunk]

    def put_sums(self, chunk: int, sums: list[jax.Array]) -> None:
        """Take what such a program gives."""
        self._sums[chunk] = sums

    def zeros(self, chunk: int) -> list[jax.Array]:
        """Zeros in the place of a chunk's sums, for a program whose gradients are to be parked."""
        return self._programs.zeros[chunk]()

    def add(self, chunk: int, parked: Arrays) -> None:
        """Add a microbatch's parked gradients of a chunk to the sums."""
        self._sums[chunk] = self._programs.accumulate[chunk](self._sums[chunk], parked)

    def reset_gradients(self) -> None:
        """Start from zero, also after a step that was broken off or is not applied."""
        self._sums = []  # first: there may be no room for two
        self._sums = [*map(self.zeros, range(len(self.chunks)))]

    def owned(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """The parameters that are updated here, and their gradient sums."""
        params = [self.leaves[chunk][place] for chunk, place, _ in self._owned]
        return params, [self._sums[chunk][number] for chunk, _, number in self._owned]

    def norms(self) -> jax.Array:
        return self._programs.norms(*self.owned())  # type: ignore[no-any-return]

    def updated(self, params: Arrays, sums: Arrays) -> None:
        """Take new values of those; aliases of what is owned elsewhere wait for theirs, with zeroed sums."""
        for (chunk, place, number), leaf, zero in zip(self._owned, params, sums, strict=True):
            self.leaves[chunk][place], self._sums[chunk][number] = leaf, zero
        if self._aliases:
            for (chunk, number), zero in zip(self._aliases, self._programs.zero_aliases(), strict=True):
                self._sums[chunk][number] = zero

    def not_finite(self) -> list[str]:
        """The paths of gradient sums that are not finite; looks at all of them on the host."""
        tree = self.gradients
        leaves = zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
        return [path for path, leaf in leaves if not _is_finite(leaf)]

    # Single parameters, such as tied ones.

    @cached_property
    def places(self) -> Mapping[Leaf, tuple[int, int]]:
        """By parameter, its chunk and its place in the chunk's list of leaves."""
        trees = [jax.tree.unflatten(of.structure, range(of.structure.num_leaves)) for of in self._roles]
        chunks = [list(enumerate(leaves_in(tree))) for tree in trees]
        return {leaf: (chunk, place) for chunk, own in enumerate(chunks) for place, leaf in own}

    def leaf(self, leaf: Leaf) -> jax.Array:
        chunk, place = self.places[leaf]
        return self.leaves[chunk][place]  # type: ignore[no-any-return]

    def set_leaf(self, leaf: Leaf, value: jax.Array) -> None:
        """Give an alias its owner's value."""
        chunk, place = self.places[leaf]
        self.leaves[chunk][place] = value

    def gradient(self, leaf: Leaf) -> jax.Array:
        """The gradient sum of a parameter."""
        chunk, place = self.places[leaf]
        return self._sums[chunk][self._roles[chunk].number[place]]

    def set_gradient(self, leaf: Leaf, value: jax.Array) -> None:
        """Give an alias its owner's gradient sum."""
        chunk, place = self.places[leaf]
        self._sums[chunk][self._roles[chunk].number[place]] = value

    def add_aliases(self, leaf: Leaf, gradients: Arrays) -> None:
        """Add the gradient sums of all its aliases to an owner's."""
        add = self._programs.add_aliases[self.places[leaf]]
        self.set_gradient(leaf, add(self.gradient(leaf), list(gradients)))


def merged(chunks: Sequence[Params]) -> Params:
    """The layers of all chunks in one dict."""
    return {layer: params for chunk in chunks for layer, params in chunk.items()}


def replace_arrays(arrays: list[jax.Array], values: Sequence[Any]) -> None:
    """Put values where these arrays are, one after the other, so that no more than one is there twice.

    A value is an array, or gives by `value[slices]` that part of one, of a typed key that of its numbers.
    """
    for i, (old, new) in enumerate(zip(arrays, values, strict=True)):
        if isinstance(new, jax.Array):
            arrays[i] = jax.device_put(new, old.sharding)
        else:
            numbers = plain(old)
            arrays[i] = as_key(old, from_shards(numbers.shape, numbers.sharding, new.__getitem__))


def _is_finite(leaf: jax.Array) -> bool:
    """Whether all that is here of an array is."""
    return all(np.isfinite(on_host(shard.data)).all() for shard in leaf.addressable_shards)
