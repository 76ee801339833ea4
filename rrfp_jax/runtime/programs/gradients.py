"""What a stage does with gradients, whatever the shapes of microbatches.

It adds parked ones and those of aliases, takes their norm, and adds up those of its replicas, once at the end
of a step: the sums of all replicas, side by side, are one array over the mesh of all of them, whose sum over
the first axis is an all-reduce. A stage's replicas do so as soon as all have run their tasks, whatever other
stages do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, groupby, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rrfp_jax.runtime.autodiff.traced import Specs
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.layers import Params, zeros
from rrfp_jax.runtime.model.roles import LeafRoles
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler, each_once

SMALLEST = np.finfo(np.float32).tiny


@dataclass(frozen=True, kw_only=True)
class SumPrograms:
    """Adding parked gradients, and the norm.

    zeros         of each chunk: -> sums of the trained leaves, all zero
    zero_aliases  -> those of the aliases among them, of all chunks
    accumulate    of each chunk: sums, parked gradients -> sums                   (sums donated)
    add_aliases   by chunk and place of an owner: its sum, its aliases' -> sum    (its own donated)
    norms         owned parameters, owned sums, of all chunks -> 3 numbers; see `NormPrograms`

    Sums are float32 or wider whatever the parameters are: they are taken over many microbatches. So are
    parked gradients, as they were added to zeros.
    """

    zeros: Sequence[InRow]
    zero_aliases: Compiled
    accumulate: Sequence[InRow]
    add_aliases: Mapping[tuple[int, int], Compiled]
    norms: NormPrograms

    @classmethod
    def compile(cls, chunks: Sequence[Params], roles: Sequence[LeafRoles], compiler: Compiler) -> SumPrograms:
        """Trace and compile for the parameters of each chunk, given by specs with their shardings."""
        parts = [(leaves, list(map(wide, leaves)), of) for leaves, of in leaves_of(chunks, roles)]
        trees = [of.tree(of.trained, [sums[i] for i in of.trained]) for _, sums, of in parts]
        trained = [owned_layers([tree]) for tree in trees]
        zeros_of = cache(lambda own: _zeros_program(compiler, [*own]))
        add_to = partial(compiler, _add_aliases, donate=(0,))
        add = cache(lambda own: compiler(_accumulate, [*own], [*own], out=where([*own]), donate=(0,)))
        return cls(
            zeros=[InRow.of(own, zeros_of) for own in trained],
            zero_aliases=_zeros_program(compiler, [sums[i] for _, sums, of in parts for i in of.aliases]),
            accumulate=[InRow.of(own, add) for own in trained],
            add_aliases={
                (chunk, i): add_to(sums[i], [sums[i]] * count, out=sums[i].sharding)
                for chunk, (_, sums, of) in enumerate(parts)
                for i, count in of.owners.items()
            },
            norms=NormPrograms.compile(owned_layers(owned_trees(chunks, roles)), compiler),
        )


@dataclass(frozen=True)
class NormPrograms:
    """Norms of the sums and parameters that a stage owns, added up leaf by leaf by programs of few layers.

    They give 3 numbers: the largest magnitude of a sum, not finite if one is not; squares of sums over that
    added up, which cannot overflow; those of parameters. Each program goes on from those before it, so that
    no bit depends on which layers it has.

    largest    sums, numbers -> numbers with the largest magnitude
    squares    parameters, sums, numbers -> numbers with the squares added
    """

    largest: InRow
    squares: InRow
    dtype: Any
    stage_mesh: StageMesh

    @classmethod
    def compile(cls, layers: Sequence[Sequence[Any]], compiler: Compiler) -> NormPrograms:
        """Compile for the owned parameters of each layer, given by specs."""
        dtype = widest(wide_dtype(spec.dtype) for own in layers for spec in own)
        numbers = jax.ShapeDtypeStruct((3,), dtype)
        largest = cache(lambda own: compiler(_largest, list(map(wide, own)), numbers))
        squares = cache(lambda own: compiler(_squares, list(own), list(map(wide, own)), numbers))
        return cls(InRow.of(layers, largest), InRow.of(layers, squares), dtype, compiler.stage_mesh)

    @cached_property
    def _zeros(self) -> jax.Array:
        """Where the numbers begin; no program donates it."""
        (numbers,) = self.stage_mesh.put_whole([np.zeros(3, self.dtype)])
        return numbers

    @property
    def programs(self) -> list[Compiled]:
        """All that there are, each once."""
        return each_once([*self.largest.programs, *self.squares.programs])

    def __call__(self, params: Sequence[jax.Array], sums: Sequence[jax.Array]) -> jax.Array:
        """The numbers of owned parameters and sums of all chunks."""
        numbers = self._zeros
        for own, largest in zip(self.largest.leaves, self.largest.programs, strict=True):
            numbers = largest(sums[own], numbers)
        for own, squares in zip(self.squares.leaves, self.squares.programs, strict=True):
            numbers = squares(params[own], sums[own], numbers)
        return numbers


def _largest(sums: Sequence[Any], numbers: Any) -> Any:
    magnitudes = [jnp.max(jnp.abs(a).astype(numbers.dtype), initial=0.0) for a in sums]
    return jnp.stack([jnp.max(jnp.stack([numbers[0], *magnitudes])), numbers[1], numbers[2]])


def _squares(params: Sequence[Any], sums: Sequence[Any], numbers: Any) -> Any:
    alone: Any = jax.lax.optimization_barrier  # what XLA fuses with others has other bits
    real = numbers.dtype
    # The inverse of a number above 2**126 is taken for 0, as it is not normal. Powers of two change no bits.
    less = jnp.where(numbers[0] > 1, jnp.asarray(2.0**-8, real), 1)
    inverse = alone(1 / jnp.maximum(numbers[0] * less, SMALLEST))
    shares = [jnp.sum(jnp.square(_real(a, real) * less * inverse)) for a in sums]
    squares = [jnp.sum(jnp.square(_real(p.astype(wide_dtype(p.dtype)), real))) for p in params]
    shares, squares = alone((shares, squares))
    return jnp.stack([numbers[0], sum(shares, numbers[1]), sum(squares, numbers[2])])


def _real(array: Any, real: Any) -> Any:
    """Numbers with the same squares, signs kept: with them left out XLA adds up in another order."""
    return (jnp.abs(array) if jnp.iscomplexobj(array) else array).astype(real)


@dataclass(frozen=True)
class InRow:
    """Programs of few layers, called one after the other for the lists of the leaves of all."""

    leaves: Sequence[slice]
    programs: Sequence[Compiled]  # equal ones are one

    @classmethod
    def of(cls, layers: Sequence[Sequence[Any]], program: Callable[[tuple[Any, ...]], Compiled]) -> InRow:
        """Those that `program` makes for the specs of a group of layers, given by the specs of all layers."""
        specs = [tuple(spec for i in group for spec in layers[i]) for group in in_groups(layers)]
        ends = accumulate(map(len, specs))
        leaves = [slice(end - len(own), end) for own, end in zip(specs, ends, strict=True)]
        return cls(leaves, [*map(program, specs)])

    def __call__(self, *lists: Sequence[jax.Array]) -> list[jax.Array]:
        made = zip(self.programs, self.leaves, strict=True)
        return [leaf for program, own in made for leaf in program(*[leaves[own] for leaves in lists])]


LAYERS = 4
"""Of one program, at most: more take longer to compile than they save in calls."""


def in_groups(layers: Sequence[Sequence[Any]]) -> list[range]:
    """Consecutive layers, given by the specs of their leaves, that a program takes together: equal ones."""
    found, first = list[range](), 0
    for specs, run in groupby(layers):
        end = first + len(list(run))
        found += [range(i, min(i + LAYERS, end)) for i in range(first, end, LAYERS) if specs]
        first = end
    return found


def leaves_of(chunks: Sequence[Params], roles: Sequence[LeafRoles]) -> list[tuple[list[Any], LeafRoles]]:
    """By chunk, the leaves of its parameters, and what they are."""
    return [(jax.tree.leaves(params), of) for params, of in zip(chunks, roles, strict=True)]


def owned_trees(chunks: Sequence[Params], roles: Sequence[LeafRoles]) -> list[Params]:
    """By chunk, the tree of the parameters that it owns."""
    return [of.tree(of.owned, [own[i] for i in of.owned]) for own, of in leaves_of(chunks, roles)]


def owned_layers(trees: Sequence[Params]) -> list[list[Any]]:
    """The leaves of each layer, in the order of all leaves."""
    return [jax.tree.leaves(tree[layer]) for tree in trees for layer in sorted(tree)]


def _zeros_program(compiler: Compiler, specs: list[Any]) -> Compiled:
    """Programs without any result cannot be loaded once stored, so there is none for no sums."""
    if not specs:
        return lambda: specs
    return compiler(lambda: zeros(specs), out=where(specs), effort="roughly")


def where(specs: Any) -> Any:
    """The shardings of a tree of specs."""
    return jax.tree.map(lambda spec: spec.sharding, specs)


def _accumulate(sums: list[Any], gradients: list[Any]) -> list[Any]:
    return [a + g for a, g in zip(sums, gradients, strict=True)]


def _add_aliases(own: Any, theirs: list[Any]) -> Any:
    for other in theirs:  # in order of declaration
        own = own + other
    return own


def wide(spec: Any) -> jax.ShapeDtypeStruct:
    """The spec of a sum of gradients of a parameter."""
    return jax.ShapeDtypeStruct(spec.shape, wide_dtype(spec.dtype), sharding=spec.sharding)


def wide_dtype(dtype: Any) -> Any:
    """The dtype of sums of such values: float32 or wider. float8 alone has no common dtype with others."""
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def widest(dtypes: Iterable[Any]) -> Any:
    """The dtype of real numbers about values of these dtypes: float64 if one of them is, else float32."""
    wide = {jnp.dtype(jnp.float64), jnp.dtype(jnp.complex128)}
    return jnp.dtype(jnp.float64 if wide.intersection(dtypes) else jnp.float32)


TOKEN = jax.ShapeDtypeStruct((), jnp.bool_)
"""What an adding program gives last: it is ready when the program has ended, and nobody takes its memory."""


def adding(program: Callable[..., Sequence[Any]], count: int) -> Callable[..., list[Any]]:
    """A program that takes sums first, and adds its last `count` results to them; it gives a token, too."""

    def sums_and_rest(*args: Any) -> list[Any]:
        results = program(*args[count:])
        own = len(results) - count
        return [*results[:own], *map(added, args[:count], results[own:]), jnp.zeros(TOKEN.shape, TOKEN.dtype)]

    return sums_and_rest


def added(total: Any, gradient: Any) -> Any:
    """Their sum, as if the gradient had been stored in its own dtype; -0 counts as +0."""
    if gradient.dtype != total.dtype:
        gradient = jax.lax.optimization_barrier(gradient).astype(total.dtype)
    return total + jnp.where(gradient != 0, gradient, jnp.zeros((), total.dtype))


class Reduction:
    """Adds up the gradients of one stage's replicas, given compilers for those here, and one for all."""

    def __init__(
        self, replicas: Sequence[Compiler], home: Compiler, sums: Specs, partition: Sequence[PartitionSpec]
    ) -> None:
        self._meshes, self._home = [compiler.stage_mesh for compiler in replicas], home.stage_mesh
        beside = [jax.ShapeDtypeStruct((home.stage_mesh.replicas, *s.shape), s.dtype) for s in sums]
        self._beside = home.stage_mesh.spread(beside, [PartitionSpec("dp", *spec) for spec in partition])
        self._lifts: list[Compiled] = []
        for compiler in replicas:
            own = compiler.stage_mesh.spread(sums, partition)
            out = [compiler.stage_mesh.sharding(PartitionSpec(None, *spec)) for spec in partition]
            self._lifts.append(compiler(_lift, own, out=out, donate=(0,)))
        where = [home.stage_mesh.sharding(spec) for spec in partition]
        self._add = home(_add_replicas, self._beside, out=where)

    def __call__(self, sums: Sequence[Sequence[jax.Array]]) -> list[Sequence[jax.Array]]:
        """The totals for each of this process's replicas, from its sums, which are donated."""
        lifted = [lift(list(own)) for lift, own in zip(self._lifts, sums, strict=True)]
        totals = self._add(together(self._home, self._meshes, lifted, self._beside))
        return apart(self._home, self._meshes, totals)


def _lift(sums: list[Any]) -> list[Any]:
    return [a[None] for a in sums]


def _add_replicas(sums: list[Any]) -> list[Any]:
    return [jnp.sum(a, axis=0) for a in sums]


def together(
    home: StageMesh, meshes: Sequence[StageMesh], arrays: Sequence[Sequence[jax.Array]], specs: Sequence[Any]
) -> Sequence[jax.Array]:
    """Arrays over the devices of all replicas, from what this process's replicas have of them."""
    beside = [
        shard
        for of_replicas in zip(*arrays, strict=True)
        for stage_mesh, array in zip(meshes, of_replicas, strict=True)
        for shard in stage_mesh.shards([array])
    ]
    return home.joined(beside, specs)


def apart(
    home: StageMesh, meshes: Sequence[StageMesh], arrays: Sequence[jax.Array]
) -> list[Sequence[jax.Array]]:
    """What each of this process's replicas has of arrays over all of them that are alike on each."""
    partition = [array.sharding.spec for array in arrays]  # type: ignore[attr-defined]
    shards, found = [iter(home.shards([array])) for array in arrays], list[Sequence[jax.Array]]()
    for stage_mesh in meshes:
        own = [shard for each in shards for shard in islice(each, len(stage_mesh.own))]
        found.append(stage_mesh.joined(own, stage_mesh.spread(arrays, partition)))
    return found
