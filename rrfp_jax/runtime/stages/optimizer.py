"""The optimizer of a stage: its state, which may be spread over the stage's replicas, and its steps.

Optimizers may look at more than a leaf's own values: at its place in the tree, at the number of leaves, at
its depth. So none is ever run on a stage's parameters alone. `init` and `update` are traced once for the
whole model, on specs; a stage runs what of these programs its own leaves need. That must read nothing of
another stage: a norm over all gradients does, and is refused.

A leaf of the state belongs to the parameters that it follows from, or whose name and shape it has; what
belongs to none, such as a count of steps or a random key, every stage has, with the same values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.random_keys import is_key, plain
from rrfp_jax.runtime._jax import on_host
from rrfp_jax.runtime.autodiff.traced import (
    Program,
    bits,
    inline,
    output_dependence,
    parts,
    reduce,
    scalars_too,
    spec_of,
    without_prints,
)
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.layers import Params, zeros
from rrfp_jax.runtime.model.roles import LeafRoles, leaf_paths
from rrfp_jax.runtime.model.user_errors import instead_of_optimizer, kind_of
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler, each_once
from rrfp_jax.runtime.programs.equality import program_key
from rrfp_jax.runtime.programs.gradients import (
    apart,
    in_groups,
    owned_layers,
    owned_trees,
    together,
    where,
    wide,
    wide_dtype,
    widest,
)
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.stages.stage import Arrays, Stage, replace_arrays

_SETTLING = 3
"""Traces of `update` within which the dtypes of the state must have become what they stay."""

_SHARED = -1
"""Stands beside the places of parameters for what belongs to none."""


class OptimizerPart(NamedTuple):
    """What a stage has of an optimizer."""

    params: Mapping[str, int]  # places of the stage's parameters in the whole model's list, by path
    state: Sequence[int]  # places of its leaves in the whole state


class Piece(NamedTuple):
    """What an optimizer does with parameters that are updated together, and with their state.

    init      parameters                    -> state
    update    gradients, state, parameters  -> parameters, state

    The programs read of the lists of the whole model; see `Program.reads`.
    """

    params: Sequence[int]  # places in the whole model's list, in its order
    state: Sequence[int]  # the same in the whole state
    init: Program
    update: Program


def check_transformation(optimizer: Any) -> None:
    """Refuse what is no optax transformation."""
    # An nnx.Optimizer has an `update`, too, and no `init`; a TrainState has neither.
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        given = "optimizer" if kind_of(optimizer) else f"optimizer={shown(optimizer)}"
        raise UsageError(f"{given}: {instead_of_optimizer(optimizer)}")


@dataclass(frozen=True)
class WholeOptimizer:
    """An optimizer, traced for the parameters of a whole model."""

    paths: Sequence[str]  # of the parameters that it updates
    init: ClosedJaxpr  # as in `OptimizerPart`, on all of them
    update: ClosedJaxpr
    structure: Any  # of the state
    state: Sequence[tuple[Any, jax.ShapeDtypeStruct]]  # its leaves, with their key paths

    @classmethod
    def trace(cls, optimizer: optax.GradientTransformation, params: Params) -> WholeOptimizer:
        """Trace `init` and `update`; `UsageError` if there are none, or they do not take these parameters."""
        check_transformation(optimizer)
        if not jax.tree.leaves(params):
            raise UsageError(
                "optimizer: the model has no parameter that it could update; give a layer parameters, such "
                "as rrfp.layer(function, init=...), or no optimizer, Trainer(pipe), to evaluate only"
            )

        def updated(gradients: Params, state: Any, params: Params) -> tuple[Params, Any]:
            changes, after = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, changes), after

        try:
            init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
            at_first = _dtypes(state)
            for _ in range(_SETTLING):
                update, (_, after) = jax.make_jaxpr(updated, return_shape=True)(params, state, params)
                if settled := _dtypes(after) == _dtypes(state):
                    break
                state = after
            if _dtypes(state) != at_first or any(leaf.weak_type for leaf in jax.tree.leaves(state)):
                init = jax.make_jaxpr(lambda p: jax.tree.map(_cast, optimizer.init(p), state))(params)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(
                f"optimizer: it cannot update these parameters: {type(error).__name__}: {reason}. It sees "
                f"{{layer index as text: parameters}} of the whole model, without frozen ones and the "
                f"second names of tied ones, and neither the loss nor another function of the parameters"
            ) from error
        if not settled:
            raise UsageError("optimizer: every step changes the shapes or dtypes of its state; keep them")
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        return cls(leaf_paths(params), init, update, structure, leaves)

    def part(self, layers: Collection[int], where: str) -> OptimizerPart:
        """The part for the parameters of some layers; `UsageError` if it depends on others elsewhere."""
        own = {path: i for i, path in enumerate(self.paths) if int(path.partition(".")[0]) in layers}
        places = set(own.values())
        state = [k for k, of in enumerate(self.owners) if not of or places & of]
        of_params, of_state = self._reads
        reads = [(f"the update of {path}", of_params[i]) for path, i in own.items()]
        reads += [(f"its state{keystr(self.state[k][0])}", of_state[k]) for k in state]
        reads.append(("what it prints", self._printed))
        for what, read in reads:
            if foreign := sorted(read - places):
                raise UsageError(
                    f"optimizer: {what} depends on the gradient or value of {self.paths[foreign[0]]}, which "
                    f"is on another stage than {where}, so stages could not update by themselves. Leave "
                    f"that part out; to clip by the global norm (optax.clip_by_global_norm), use "
                    f"Trainer(clip_norm=...), taken over all stages as report.gradient_norm is"
                )
        return OptimizerPart(own, state)

    def pieces(self, part: OptimizerPart, groups: Sequence[Collection[int]]) -> list[Piece]:
        """What a part does with groups of its parameters, by places; those that need each other are one.

        The last piece has what belongs to no parameter, which others read. What has effects is not cut.
        """
        shared, n = len(groups), len(self.paths)
        group = {place: number for number, own in enumerate(groups) for place in own} | {_SHARED: shared}
        roots = [0] * (shared + 1) if self.init.effects or self.update.effects else list(range(shared + 1))

        def root(number: int) -> int:
            while roots[number] != number:
                number = roots[number]
            return number

        for bound in self._bound([*part.params.values(), *(n + k for k in part.state)]):
            first, *others = {root(group[place]) for place in bound}
            for number in others:
                roots[number] = first
        params, state = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for place in sorted(part.params.values()):
            params[root(group[place])].append(place)
        for k in part.state:
            state[root(group[min(self.owners[k], default=_SHARED)])].append(k)
        numbers = sorted(params.keys() | state.keys(), key=lambda number: number == root(shared))
        inits = parts(self.init, [state[number] for number in numbers])
        outputs = [[*params[number], *(n + k for k in state[number])] for number in numbers]
        made = zip(numbers, inits, parts(self.update, outputs), strict=True)
        return [Piece(params[number], state[number], init, update) for number, init, update in made]

    def _bound(self, outputs: Sequence[int]) -> Iterator[set[int]]:
        """For some outputs of the update, the places of parameters that are updated together for its sake."""
        n, count = len(self.paths), len(self.state)
        for output in outputs:
            mask = self._masks[output]
            found = {*_bits(mask, n), *_bits(mask >> (n + count), n)}
            found.update(*(self.owners[k] for k in _bits(mask >> n, count)))
            yield found | ({output} if output < n else self.owners[output - n] or {_SHARED})

    @cached_property
    def _masks(self) -> list[int]:
        """By output of `update`, the mask of what it follows from."""
        return output_dependence(self.update)

    def state_bytes(self, layer: int) -> int:
        """Bytes of the leaves that belong to a layer (the first of several), and of those that are shared."""
        return nbytes([spec for k, (_, spec) in enumerate(self.state) if self.layer_of(k) in (-1, layer)])

    def layer_of(self, k: int) -> int:
        """The layer that a leaf of the state belongs to, the first of several; -1 if to none."""
        return min((int(self.paths[i].partition(".")[0]) for i in self.owners[k]), default=-1)

    @cached_property
    def owners(self) -> list[frozenset[int]]:
        """For each leaf of the state, the places of the parameters that it belongs to; none if shared."""
        place = {path: frozenset([i]) for i, path in enumerate(self.paths)}
        named = [frozenset() if own is None else place[own] for own in self.namesakes]
        return [reads or own for reads, own in zip(self._reads[1], named, strict=True)]

    @cached_property
    def namesakes(self) -> list[str | None]:
        """For each leaf of the state, the parameter with whose name its path ends, if their shapes agree.

        An optimizer keeps trees like that of the parameters. A leaf has the name of no parameter that it does
        not follow from: one that ends like its own may be another layer's. One that follows from none, such
        as a count, has the name of none if the update of another reads it.
        """
        n, masks = len(self.paths), self._masks
        readers = Counter(k for mask in masks[:n] for k in _bits(mask >> n, len(self.state)))
        place = {path: i for i, path in enumerate(self.paths)}
        shapes = dict(zip(self.paths, (spec_of(var).shape for var in self.init.jaxpr.invars), strict=True))
        found = []
        for k, ((path, spec), reads) in enumerate(zip(self.state, self._reads[1], strict=True)):
            names = [keystr((entry,), simple=True) for entry in path]
            ends = (".".join(names[i:]) for i in range(len(names)))
            like = (place[end] for end in ends if shapes.get(end) == spec.shape)
            own = (i for i in like if (i in reads if reads else readers[k] <= masks[i] >> (n + k) & 1))
            found.append(next((self.paths[i] for i in own), None))
        return found

    @cached_property
    def _reads(self) -> tuple[list[frozenset[int]], list[frozenset[int]]]:
        """The parameters that each new parameter, and leaf of the state, follows from in any step."""
        n, count = len(self.paths), len(self.state)
        masks = self._masks
        directly = [_bits(mask, n) | _bits(mask >> (n + count), n) for mask in masks]
        through = [_bits(mask >> n, count) for mask in masks]
        at_first = [_bits(mask, n) for mask in output_dependence(self.init)]
        state = [first | own for first, own in zip(at_first, directly[n:], strict=True)]
        before: list[frozenset[int]] = []
        while state != before:
            before = state
            state = [own.union(*(before[k] for k in by)) for own, by in zip(before, through[n:], strict=True)]
        updates = zip(directly[:n], through[:n], strict=True)
        return [own.union(*(state[k] for k in by)) for own, by in updates], state

    @cached_property
    def _printed(self) -> frozenset[int]:
        """The parameters that its effects follow from, such as a print, which every stage has."""
        own = [frozenset([i]) for i in range(len(self.paths))]
        of = [*own, *self.owners, *own]
        quiet = ((traced, [False] * len(traced.jaxpr.outvars)) for traced in (self.init, self.update))
        return frozenset[int]().union(*(of[i] for args in quiet for i in reduce(*args).reads))

    @cached_property
    def hyperparams(self) -> Mapping[str, int]:
        """Places of the numbers that `optax.inject_hyperparams` keeps in the state, by name."""
        found: dict[int, tuple[str, str]] = {}
        for place, (path, spec) in enumerate(self.state):
            is_one = len(path) > 1 and path[-2] == GetAttrKey("hyperparams") and isinstance(path[-1], DictKey)
            if is_one and spec.shape == () and not (is_key(spec) or self.owners[place]):
                chosen = tuple(entry for entry in path if isinstance(entry, (DictKey, SequenceKey)))
                found[place] = keystr(chosen[-1:], simple=True), keystr(chosen, simple=True, separator=".")
        counts = Counter(short for short, _ in found.values())
        return {long if counts[short] > 1 else short: place for place, (short, long) in found.items()}

    def scheduled(self, place: int) -> bool:
        """Whether a hyperparameter follows a schedule, which has a state of its own beside it."""
        path, _ = self.state[place]
        beside = (*path[:-2], GetAttrKey("hyperparams_states"), path[-1])
        return any(other[: len(beside)] == beside for other, _ in self.state)


def _cast(leaf: Any, spec: Any) -> Any:
    """A leaf of a state at its first step with the dtype and shape that it has later."""
    extended = jnp.issubdtype(spec.dtype, jax.dtypes.extended)
    return leaf if extended else jnp.broadcast_to(jnp.asarray(leaf).astype(spec.dtype), spec.shape)


def _dtypes(state: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def _bits(mask: int, count: int) -> frozenset[int]:
    return frozenset(bits(mask & ((1 << count) - 1)))


class Hyperparams(NamedTuple):
    """Hyperparameters of a stage's optimizer."""

    names: Sequence[str]
    reads: Sequence[int]  # of the stage's leaves of the state, those that the program takes
    program: Compiled  # these leaves -> a vector, as wide as float32 or float64
    kept: Collection[str]  # of the names, those of plain numbers: no schedule gives them

    @classmethod
    def compile(
        cls, whole: WholeOptimizer, part: OptimizerPart, state: Sequence[Any], compiler: Compiler
    ) -> Hyperparams | None:
        """Compile for the stage's leaves of the state, given by specs; None if no hyperparameter is there."""
        places, count = whole.hyperparams, len(whole.paths)
        if not places:
            return None
        outputs = [i - count in places.values() for i in range(count + len(whole.state))]
        program = reduce(without_prints(inline(whole.update)), outputs)
        reads = [part.state.index(i - count) for i in program.reads]

        def numbers(*own: Any) -> Any:
            found = dict(zip(sorted(places.values()), program(*own), strict=True))
            real = widest(value.dtype for value in found.values())
            return jnp.stack([found[place].astype(real) for place in places.values()])

        kept = {name for name, place in places.items() if not whole.scheduled(place)}
        return cls(list(places), reads, compiler(numbers, *[state[i] for i in reads]), kept)

    def __call__(self, state: Sequence[jax.Array]) -> jax.Array:
        """The numbers of the next update."""
        return self.program(*[state[i] for i in self.reads])  # type: ignore[no-any-return]

    def kept_numbers(self, state: Sequence[jax.Array]) -> dict[str, float]:
        """The plain numbers of a state, by name."""
        found = zip(self.names, on_host(self(state)).tolist(), strict=True)
        return {name: value for name, value in found if name in self.kept}


class PiecePrograms(NamedTuple):
    """What an optimizer does on a stage with some of the leaves there; pieces that are alike share programs.

    init          owned parameters -> its leaves of the optimizer's state
    update        owned parameters, state, owned sums, others' state, scale -> parameters, state, zeroed sums,
                  and what is not needed (the first three are donated); gradients are the sums times `scale`
    """

    params: Sequence[int]  # indices among the stage's owned parameters
    state: Sequence[int]  # indices among its leaves of the state
    others: Sequence[int]  # the same of those that it only reads
    init: Compiled
    update: Compiled


class OptimizerPrograms(NamedTuple):
    """What an optimizer does on a stage, piece by piece."""

    pieces: Sequence[PiecePrograms]
    owned: Sequence[Any]  # specs of parameters of all chunks, with their shardings
    state: Sequence[Any]
    scale: jax.ShapeDtypeStruct  # a scalar as wide as the widest sum
    structure: Any  # of the state of the whole model
    places: Sequence[int]  # in it, of the stage's own leaves
    hyperparams: Hyperparams | None  # that this stage tells; None if another does, or there are none

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
        """Compile for chunks' parameters; one stage `tells` hyperparameters; None if it owns no parameter."""
        trees = owned_trees(chunks, roles)
        paths = [path for tree in trees for path in leaf_paths(tree)]
        if not (specs := dict(zip(paths, jax.tree.leaves(trees), strict=True))):
            return None
        state = [_placed(whole, k, specs, compiler.stage_mesh) for k in part.state]
        places = iter([part.params[path] for path in specs])
        layers = owned_layers(trees)
        numbered = [list(islice(places, len(own))) for own in layers]
        groups = [[place for i in group for place in numbered[i]] for group in in_groups(layers)]
        pieces = whole.pieces(part, groups)
        owned = {part.params[path]: spec for path, spec in specs.items()}
        make = _PieceCompiler(whole, owned, dict(zip(part.state, state, strict=True)), compiler)
        return cls(
            pieces=[make(piece) for piece in pieces],
            owned=list(specs.values()),
            state=state,
            scale=make.scale,
            structure=whole.structure,
            places=part.state,
            hyperparams=Hyperparams.compile(whole, part, state, compiler) if tells else None,
        )

    @property
    def updates(self) -> list[Compiled]:
        """The programs of updates, each once."""
        return each_once(piece.update for piece in self.pieces)

    def begin(self, owned: Sequence[jax.Array]) -> list[jax.Array]:
        """The state at the beginning, of owned parameters."""
        state: list[Any] = [None] * len(self.state)
        for piece in self.pieces:
            _put(state, piece.state, piece.init(_of(owned, piece.params)))
        return state

    def update(self, owned: Any, state: Any, sums: Any, scale: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """One step: new parameters, state, and zeroed sums, in the memory of the old ones."""
        new, after, zeroed = list(owned), list(state), list(sums)
        for piece in self.pieces:
            own, others = _of(state, piece.state), _of(state, piece.others)
            given = _of(owned, piece.params), own, _of(sums, piece.params), others
            params, own, empty, _ = piece.update(*given, scale)
            _put(new, piece.params, params)
            _put(after, piece.state, own)
            _put(zeroed, piece.params, empty)
        return new, after, zeroed


def _of(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [values[i] for i in places]


def _put(into: list[Any], places: Sequence[int], values: Sequence[Any]) -> None:
    for place, value in zip(places, values, strict=True):
        into[place] = value


class _PieceCompiler:
    """Compiles pieces of a stage, those that are alike once; `owned` and `state` are specs by place."""

    def __init__(
        self, whole: WholeOptimizer, owned: Mapping[int, Any], state: Mapping[int, Any], compiler: Compiler
    ) -> None:
        self._whole, self._owned, self._state, self._compiler = whole, owned, state, compiler
        self._params, self._leaves = list(owned), list(state)
        self._made: dict[Hashable, tuple[Compiled, Compiled]] = {}
        self.scale = jax.ShapeDtypeStruct((), widest(wide_dtype(spec.dtype) for spec in owned.values()))

    def __call__(self, piece: Piece) -> PiecePrograms:
        n, last = len(self._whole.paths), len(self._whole.paths) + len(self._whole.state)
        read = {i - n for i in piece.update.reads if n <= i < last}
        others = sorted(read - {*piece.state})
        state = [n + k for k in (*piece.state, *others)]
        arguments = [*piece.params, *state, *(last + i for i in piece.params)]
        update = piece.update.at({name: i for i, name in enumerate(arguments)})
        init = piece.init.at({place: i for i, place in enumerate(piece.params)})
        owned = [self._owned[i] for i in piece.params]
        own, more = ([self._state[k] for k in places] for places in (piece.state, others))
        programs = tuple((program_key(one.closed), one.reads) for one in (init, update))
        kind = programs, *map(tuple, (owned, own, more))
        if kind not in self._made:
            sums, compiler = list(map(wide, owned)), self._compiler
            self._made[kind] = (
                compiler(_init_of(init), owned, out=where(own), effort="roughly") if own else lambda _: [],
                compiler(
                    *(_update_of(update, len(owned) == 1), owned, own, sums, more, self.scale),
                    out=(*where((owned, own, sums)), None),
                    donate=(0, 1, 2),
                ),
            )
        params, at = map(self._params.index, piece.params), self._leaves.index
        return PiecePrograms([*params], [*map(at, piece.state)], [*map(at, others)], *self._made[kind])


def _init_of(program: Program) -> Any:
    return lambda owned: program(*(owned[i] for i in program.reads))


def _update_of(program: Program, alone: bool) -> Any:
    """The function behind `PiecePrograms.update`, of a parameter alone or of several."""

    def update(old: Any, state: Any, sums: Any, others: Any, scale: Any) -> tuple[Any, Any, Any, Any]:
        gradients = [(a * scale.astype(a.dtype)).astype(o.dtype) for a, o in zip(sums, old, strict=True)]
        given = [*gradients, *state, *others, *old]
        found = program(*(given[i] for i in program.reads))
        end = len(old) + len(state)
        return found[: len(old)], found[len(old) : end], zeros(sums), found[end:]

    # XLA turns a quotient by a number into a product, of other bits, if nobody else uses that number.
    if alone:
        program = scalars_too(program)
    return update


def _placed(whole: WholeOptimizer, k: int, specs: Mapping[str, Any], mesh: StageMesh) -> jax.ShapeDtypeStruct:
    """The spec of a leaf of the state: what has the name and shape of a parameter here lies as that does."""
    (_, leaf), own, lies = whole.state[k], specs.get(whole.namesakes[k] or ""), mesh.whole
    if own is not None:
        lies = own.sharding
        if mesh.replicas > 1:
            lies = mesh.sharding(_over_replicas(lies.spec, leaf.shape, mesh.replicas))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies)


def _over_replicas(spec: PartitionSpec, shape: Sequence[int], replicas: int) -> PartitionSpec:
    """Spread a dimension over the replicas, too: the first that is whole and can be; else none."""
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        if axis is None and size and size % replicas == 0:
            return PartitionSpec(*axes[:i], "dp", *axes[i + 1 :])
    return spec


LESS = 2.0**-64


@partial(jax.jit, donate_argnums=0)
def _lessened(sums: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Sums that are too large to be scaled at once."""
    return [a * LESS for a in sums]


class Optimizer:
    """The optimizer of one stage; `stages` are those of its replicas that are updated together here."""

    def __init__(
        self, programs: OptimizerPrograms, mesh: StageMesh, stages: Sequence[Stage], state: Arrays | None
    ) -> None:
        self._programs, self.stage_mesh, self.stages = programs, mesh, stages
        self.places, self.hyperparams = programs.places, programs.hyperparams
        self._meshes = [stage.stage_mesh for stage in stages]
        self._alone = self._meshes == [mesh]
        self.state: list[jax.Array] = [*state] if state is not None else []
        if state is None:
            self.begin()

    def begin(self) -> None:
        """Take the state that it begins with, given the parameters as they are now."""
        self.state = []  # first: there may be no room for two
        self.state = self._programs.begin(next(iter(self._owned())))

    @property
    def tree(self) -> Any:
        """The state as the optimizer has it, with None for what is another stage's."""
        leaves: list[Any] = [None] * self._programs.structure.num_leaves
        _put(leaves, self.places, self.state)
        return jax.tree.unflatten(self._programs.structure, leaves)

    def shards(self) -> list[list[Sequence[jax.Array]]]:
        """By stage that it updates, what its devices here have of each leaf of the state, `plain`."""
        each = iter(self.stage_mesh.shards([*map(plain, self.state)]))
        leaves = [[list(islice(each, len(own.own))) for own in self._meshes] for _ in self.state]
        return [[leaf[k] for leaf in leaves] for k in range(len(self.stages))]

    def replace(self, state: Any) -> None:
        """Take another state, a tree like the one that there is; see `Stage.replace`."""
        replace_arrays(self.state, jax.tree.leaves(state))

    def update(self, scale: float) -> None:
        """One step with the gradient sums times `scale`; zeroes the sums."""
        owned, sums = self._owned()
        if scale < np.finfo(self._programs.scale.dtype).tiny:  # it would be taken for 0, as it is not normal
            sums, scale = _lessened(sums), scale / LESS
        (factor,) = self.stage_mesh.put_whole([np.asarray(scale, self._programs.scale.dtype)])
        new, self.state, zeroed = self._programs.update(owned, self.state, sums, factor)
        if self._alone:
            self.stages[0].updated(new, zeroed)
            return
        parts = [apart(self.stage_mesh, self._meshes, arrays) for arrays in (new, zeroed)]
        for stage, params, own in zip(self.stages, *parts, strict=True):
            stage.updated(params, own)

    def _owned(self) -> Iterable[Sequence[jax.Array]]:
        """What the stages own, parameters and gradient sums, as arrays of this stage mesh."""
        if self._alone:
            return self.stages[0].owned()
        own = zip(*(stage.owned() for stage in self.stages), strict=True)
        specs = self._programs.owned, [*map(wide, self._programs.owned)]
        return (list(together(self.stage_mesh, self._meshes, *pair)) for pair in zip(own, specs, strict=True))
