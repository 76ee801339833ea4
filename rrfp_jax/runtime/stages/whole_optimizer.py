"""An optimizer as it is on one device, for the whole model, and the part of it that each stage runs.

Optimizers may look at more than a leaf's own values: at its place in the tree, at the number of leaves, at
its depth. So none is ever run on a stage's parameters alone. `init` and `update` are traced once for the
whole model, on specs; a stage runs what of these programs its own leaves need. That must read nothing of
another stage: a norm over all gradients does, and is refused.

A leaf of the state belongs to the parameters that it follows from, or whose name and shape it has; what
belongs to none, such as a count of steps or a random key, every stage has, with the same values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.runtime.autodiff.dataflow import output_dependence
from rrfp_jax.runtime.autodiff.traced import Program, reduce
from rrfp_jax.runtime.model.built import instead_of_optimizer, kind_of
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.paths import leaf_paths
from rrfp_jax.runtime.sizes import nbytes

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
    """Refuse what is no optax transformation.

    Raises:
        UsageError: with what to give instead.
    """
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

        Args:
            optimizer: any optax transformation.
            params: specs of what is updated of the whole model, {layer index as text: nested dict}.

        Raises:
            UsageError: it is none, or does not work for these parameters.
        """
        check_transformation(optimizer)
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

    def state_bytes(self, layer: int, parts: Mapping[str, int]) -> int:
        """Of the leaves that belong to a layer (to the first of several), and of those that are shared.

        A leaf as large as its parameter is spread over as many devices; `parts` says how many, by path, where
        that is more than one.
        """
        total = 0
        for k, ((_, spec), of) in enumerate(zip(self.state, self.owners, strict=True)):
            if self.layer_of(k) in (-1, layer):
                shares = [parts.get(self.paths[i], 1) for i in of if self._shapes[i] == spec.shape]
                total += nbytes(spec) // max(shares, default=1)
        return total

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
        names = (jax.tree_util.keystr(path) for path, _ in self.state)
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
        shapes = self._shapes
        known = {path: i for i, path in enumerate(self.paths)}
        found = []
        for path, spec in self.state:
            names = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
            ends = (known.get(".".join(names[i:])) for i in range(len(names)))
            own = next((i for i in ends if i is not None and shapes[i] == spec.shape), None)
            found.append(frozenset() if own is None else frozenset([own]))
        return found


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
