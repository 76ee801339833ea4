"""The optimizer of a stage: its state, which may be spread over the stage's replicas, and its steps.

An optimizer as it is on one device, for the whole model, and the part of it that each stage runs.

Optimizers may look at more than a leaf's own values: at its place in the tree, at the number of leaves, at
its depth. So none is ever run on a stage's parameters alone. `init` and `update` are traced once for the
whole model, on specs; a stage runs what of these programs its own leaves need. That must read nothing of
another stage: a norm over all gradients does, and is refused.

A leaf of the state belongs to the parameters that it follows from, or whose name and shape it has; what
belongs to none, such as a count of steps or a random key, every stage has, with the same values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.random_keys import plain
from rrfp_jax.runtime.autodiff.traced import Program, output_dependence, reduce
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.roles import LeafRoles, leaf_paths
from rrfp_jax.runtime.model.user_errors import instead_of_optimizer, kind_of
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler
from rrfp_jax.runtime.programs.gradients import where, wide, widest, zeros
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.stages.replicas import apart, together
from rrfp_jax.runtime.stages.stage import Stage, merged, replace_arrays

FIELD = "hyperparams"
"""Of the states that `optax.inject_hyperparams` makes."""

SCHEDULES = "hyperparams_states"
"""Of the same, the states of schedules, by the names of their hyperparameters."""


@dataclass(frozen=True)
class Hyperparams:
    """Those of a stage's optimizer.

    Attributes:
        names: such as "learning_rate"; where several have one name, "decoder.learning_rate".
        reads: of the stage's leaves of the state, those that the program takes.
        program: leaves of the state -> a vector, as wide as float32 or float64.
        kept: of the names, those of plain numbers: no schedule gives them, so they stay what they are.
    """

    names: Sequence[str]
    reads: Sequence[int]
    program: Compiled
    kept: Collection[str]

    @classmethod
    def compile(
        cls, whole: WholeOptimizer, part: OptimizerPart, state: Sequence[Any], compiler: Compiler
    ) -> Hyperparams | None:
        """Compile for the stage's leaves of the state, given by specs; None if no hyperparameter is there."""
        places = places_of(whole)
        if not places:
            return None
        count = len(whole.paths)
        chosen = {count + place for place in places.values()}
        outputs = [i in chosen for i in range(count + len(whole.state))]
        program = reduce(whole.update, outputs)
        reads = [part.state.index(i - count) for i in program.reads]

        def numbers(*own: Any) -> Any:
            found = dict(zip(sorted(places.values()), program(*own), strict=True))
            real = widest(value.dtype for value in found.values())
            return jnp.stack([found[place].astype(real) for place in places.values()])

        kept = {name for name, place in places.items() if not _scheduled(whole, place)}
        return cls(list(places), reads, compiler(numbers, *[state[i] for i in reads]), kept)

    def __call__(self, state: Sequence[jax.Array]) -> jax.Array:
        """The numbers of the next update."""
        return self.program(*[state[i] for i in self.reads])  # type: ignore[no-any-return]

    def kept_numbers(self, state: Sequence[jax.Array]) -> dict[str, float]:
        """The plain numbers of a state, by name."""
        found = zip(self.names, self(state).tolist(), strict=True)
        return {name: value for name, value in found if name in self.kept}


def places_of(whole: WholeOptimizer) -> Mapping[str, int]:
    """Places in the state of the hyperparameters that are a number and follow from no parameter, by name."""
    found: dict[int, tuple[str, str]] = {}
    for place, (path, spec) in enumerate(whole.state):
        is_one = len(path) > 1 and path[-2] == GetAttrKey(FIELD) and isinstance(path[-1], DictKey)
        if is_one and spec.shape == () and not whole.owners[place]:
            chosen = tuple(entry for entry in path if isinstance(entry, (DictKey, SequenceKey)))
            found[place] = keystr(chosen[-1:], simple=True), keystr(chosen, simple=True, separator=".")
    counts = Counter(short for short, _ in found.values())
    return {long if counts[short] > 1 else short: place for place, (short, long) in found.items()}


def _scheduled(whole: WholeOptimizer, place: int) -> bool:
    """Whether a hyperparameter follows a schedule, which has a state of its own beside it."""
    path, _ = whole.state[place]
    beside = (*path[:-2], GetAttrKey(SCHEDULES), path[-1])
    return any(other[: len(beside)] == beside for other, _ in whole.state)


_SETTLING = 3
"""Traces of `update` within which the dtypes of the state must have become what they stay."""


@dataclass(frozen=True)
class OptimizerPart:
    """What a stage runs of an optimizer.

    init      parameters                    -> state
    update    gradients, state, parameters  -> parameters, state

    The programs read of the lists of the whole model; see `Program.reads`.

    Attributes:
        params: places of the stage's parameters in the whole model's list, by path.
        state: places of its leaves in the whole state.
    """

    init: Program
    update: Program
    params: Mapping[str, int]
    state: Sequence[int]


def check_transformation(optimizer: Any) -> None:
    """Refuse what is no optax transformation."""
    # An nnx.Optimizer has an `update`, too, and no `init`; a TrainState has neither.
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        given = "optimizer" if kind_of(optimizer) else f"optimizer={shown(optimizer)}"
        raise UsageError(f"{given}: {instead_of_optimizer(optimizer)}")


@dataclass(frozen=True)
class WholeOptimizer:
    """An optimizer, traced for the parameters of a whole model.

    Attributes:
        paths: of the parameters that it updates.
        init, update: as in `OptimizerPart`, on all of them.
        structure: of the state.
        state: specs of its leaves, with their key paths.
    """

    paths: Sequence[str]
    init: ClosedJaxpr
    update: ClosedJaxpr
    structure: Any
    state: Sequence[tuple[Any, jax.ShapeDtypeStruct]]

    @classmethod
    def trace(cls, optimizer: optax.GradientTransformation, params: Params) -> WholeOptimizer:
        """Trace `init` and `update`.

        Raises:
            UsageError: it is none, or does not work for these parameters, or there are none.
        """
        check_transformation(optimizer)
        if not jax.tree.leaves(params):
            raise UsageError(
                "optimizer: the model has no parameter that it could update; give a layer parameters, such "
                "as rrfp.layer(function, init=...), or no optimizer, Trainer(pipe), to evaluate only"
            )
        try:
            state = jax.eval_shape(optimizer.init, params)
            for _ in range(_SETTLING):
                update, (_, after) = jax.make_jaxpr(_updater(optimizer), return_shape=True)(
                    params, state, params
                )
                if _dtypes(after) == _dtypes(state):
                    break
                state = after
            init = jax.make_jaxpr(lambda p: _like(optimizer.init(p), state))(params)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(
                f"optimizer: it cannot update these parameters: {type(error).__name__}: {reason}. It sees "
                f"{{layer index as text: parameters}} of the whole model, without frozen ones, and neither "
                f"the loss nor another function of the parameters"
            ) from error
        if _dtypes(after) != _dtypes(state):
            raise UsageError("optimizer: every step changes the shapes or dtypes of its state; keep them")
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        return cls(leaf_paths(params), init, update, structure, leaves)

    def part(self, layers: Collection[int], where: str) -> OptimizerPart:
        """The part for the parameters of some layers.

        Raises:
            UsageError: it depends on a parameter or gradient elsewhere; `where` names where the layers are.
        """
        own = {path: i for i, path in enumerate(self.paths) if int(path.partition(".")[0]) in layers}
        places = set(own.values())
        state = [k for k, of in enumerate(self.owners) if not of or places & of]
        for what, reads in self._reads(own, state):
            if foreign := sorted(reads - places):
                raise UsageError(
                    f"optimizer: {what} depends on the gradient or value of {self.paths[foreign[0]]}, which "
                    f"is on another stage than {where}, so stages could not update by themselves. Leave "
                    f"that part out; to clip by the global norm (optax.clip_by_global_norm), use "
                    f"Trainer(clip_norm=...), taken over all stages"
                )
        chosen, kept = set(state), len(self.paths)
        return OptimizerPart(
            init=reduce(self.init, [k in chosen for k in range(len(self.state))]),
            update=reduce(
                self.update,
                [i in places for i in range(kept)] + [k in chosen for k in range(len(self.state))],
            ),
            params=own,
            state=state,
        )

    def state_bytes(self, layer: int) -> int:
        """Of the leaves that belong to a layer (to the first of several), and of those that are shared."""
        return nbytes([spec for k, (_, spec) in enumerate(self.state) if self.layer_of(k) in (-1, layer)])

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        """Of the parameters."""
        return [var.aval.shape for var in self.init.jaxpr.invars]

    def layer_of(self, k: int) -> int:
        """The layer that a leaf of the state belongs to, the first of several; -1 if to none."""
        return min((int(self.paths[i].partition(".")[0]) for i in self.owners[k]), default=-1)

    @cached_property
    def owners(self) -> list[frozenset[int]]:
        """For each leaf of the state, the places of the parameters that it belongs to; none if shared."""
        return [reads or named for reads, named in zip(self._state_reads, self._namesakes(), strict=True)]

    def _reads(self, own: Mapping[str, int], state: Sequence[int]) -> list[tuple[str, frozenset[int]]]:
        """Of some parameters and leaves of the state, which gradients and parameters they depend on."""
        params = [(f"the update of {path}", self._after(self._masks[i])) for path, i in own.items()]
        names = (keystr(path) for path, _ in self.state)
        leaves = [(f"its state{name}", reads) for name, reads in zip(names, self._state_reads, strict=True)]
        return params + [leaves[k] for k in state]

    @cached_property
    def _masks(self) -> list[int]:
        """Of every output of `update`: its inputs."""
        return output_dependence(self.update)

    @cached_property
    def _state_reads(self) -> list[frozenset[int]]:
        """The parameters that each leaf of the state follows from, at first or in any step."""
        n = len(self.paths)
        found = [
            _bits(mask, n) | self._direct(after)
            for mask, after in zip(output_dependence(self.init), self._masks[n:], strict=True)
        ]
        while True:
            more = [of.union(*(found[k] for k in self._of_state(n + j))) for j, of in enumerate(found)]
            if more == found:
                return found
            found = more

    def _after(self, mask: int) -> frozenset[int]:
        """What an output with this mask depends on in any step, also by way of the state."""
        n, count = len(self.paths), len(self.state)
        through = (self._state_reads[k] for k in _bits(mask >> n, count))
        return self._direct(mask).union(*through)

    def _direct(self, mask: int) -> frozenset[int]:
        n, count = len(self.paths), len(self.state)
        return _bits(mask, n) | _bits(mask >> (n + count), n)

    def _of_state(self, output: int) -> frozenset[int]:
        return _bits(self._masks[output] >> len(self.paths), len(self.state))

    def _namesakes(self) -> list[frozenset[int]]:
        """For each leaf of the state, the parameter whose name its own ends with, if their shapes agree."""
        shapes = dict(zip(self.paths, self._shapes, strict=True))
        found = (namesake(path, spec.shape, shapes) for path, spec in self.state)
        return [frozenset([self.paths.index(own)] if own is not None else ()) for own in found]


def _updater(optimizer: optax.GradientTransformation) -> Any:
    def update(gradients: Params, state: Any, params: Params) -> tuple[Params, Any]:
        changes, after = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), after

    return update


def _like(state: Any, specs: Any) -> Any:
    """A state at its first step with the dtypes that it has later."""
    return jax.tree.map(
        lambda leaf, spec: leaf if jnp.issubdtype(spec.dtype, jax.dtypes.extended) else _cast(leaf, spec),
        state,
        specs,
    )


def _cast(leaf: Any, spec: Any) -> Any:
    return jnp.asarray(leaf).astype(spec.dtype)


def _dtypes(state: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def _bits(mask: int, count: int) -> frozenset[int]:
    return frozenset(i for i in range(count) if mask >> i & 1)


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
        each = iter(self.stage_mesh.shards([*map(plain, self.state)]))
        leaves = [[list(islice(each, len(own.own))) for own in self._meshes] for _ in self.state]
        return [[leaf[k] for leaf in leaves] for k in range(len(self.stages))]

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
    """Specs of leaves of a state with shardings: what has a parameter's name and shape lies as it does."""
    known = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    shapes, found = {path: spec.shape for path, spec in known.items()}, []
    for path, leaf in state:
        own, lies = namesake(path, leaf.shape, shapes), stage_mesh.whole
        if own is not None:
            lies = known[own].sharding
            if stage_mesh.replicas > 1:
                lies = stage_mesh.sharding(_over_replicas(lies.spec, leaf.shape, stage_mesh.replicas))
        found.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies))
    return found


def namesake(path: Any, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The parameter that a leaf of a state belongs to by name: its path ends with the parameter's.

    An optimizer keeps trees like that of the parameters. None if no parameter of that name has this shape.
    """
    names = [keystr((entry,), simple=True) for entry in path]
    ends = (".".join(names[i:]) for i in range(len(names)))
    return next((end for end in ends if shapes.get(end) == shape), None)


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
