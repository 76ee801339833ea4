"""What a stage does with gradients, whatever the shapes of microbatches: add them, update parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.runtime.compiling import Compiled, Compiler
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.roles import LeafRoles

SMALLEST = np.finfo(np.float32).tiny


@dataclass(frozen=True, kw_only=True)
class UpdatePrograms:
    """Adding gradients, their norm, and the optimizer; lists of arrays come per chunk of the stage.

    zeros         -> sums of the trained leaves, all zero
    zero_aliases  -> those of the aliases among them
    accumulate    of each chunk: sums, gradients -> sums                          (sums donated)
    add_aliases   by chunk and place of an owner: its sum, its aliases' -> sum    (its own donated)
    norms         owned parameters, owned sums -> float32[3]: the largest magnitude of a sum, not finite if
                  one is not; squares of sums over that added up, which cannot overflow; those of parameters
    init          owned parameters -> optimizer state
    update        owned parameters, optimizer state, owned sums, scale -> parameters, state, zeroed sums
                  (all donated); gradients are the sums times `scale`, a float32 scalar

    Sums are float32 or wider whatever the parameters are: they are taken over many microbatches. The
    optimizer sees a tree of the owned leaves only (`roles.py`); without any, or without an optimizer, there
    is no update.
    """

    zeros: Compiled
    zero_aliases: Compiled
    accumulate: Sequence[Compiled]
    add_aliases: Mapping[tuple[int, int], Compiled]
    norms: Compiled
    init: Compiled | None
    update: Compiled | None
    state_structure: Any

    @classmethod
    def compile(
        cls,
        chunks: Sequence[Params],
        roles: Sequence[LeafRoles],
        optimizer: optax.GradientTransformation | None,
        compiler: Compiler,
    ) -> UpdatePrograms:
        """Trace and compile for the parameters of each chunk."""
        leaves = [jax.tree.leaves(params) for params in chunks]
        wide = [[_wide(spec) for spec in specs] for specs in leaves]
        parts = list(zip(leaves, wide, roles, strict=True))
        trained = [[sums[i] for i in of.trained] for _, sums, of in parts]
        owned = [[own[i] for i in of.owned] for own, _, of in parts]
        owned_sums = [[sums[i] for i in of.owned] for _, sums, of in parts]
        aliases = [[sums[i] for i in of.aliases] for _, sums, of in parts]

        init = update = structure = None
        if optimizer is not None and any(owned):
            tree = merged([of.owned_tree(own) for of, own in zip(roles, owned, strict=True)])
            state, structure = jax.tree.flatten(jax.eval_shape(optimizer.init, tree))
            init = compiler(_init_of(optimizer, roles), owned)
            scale = jax.ShapeDtypeStruct((), jnp.float32)
            update = compiler(
                *(_update_of(optimizer, roles, structure), owned, state, owned_sums, scale), donate=(0, 1, 2)
            )
        return cls(
            zeros=_zeros_program(compiler, trained),
            zero_aliases=_zeros_program(compiler, aliases),
            accumulate=[
                compiler(_accumulate, sums, [own[i] for i in of.trained], donate=(0,))
                for sums, (own, _, of) in zip(trained, parts, strict=True)
            ],
            add_aliases={
                (chunk, i): compiler(_add_aliases, sums[i], [sums[i]] * count, donate=(0,))
                for chunk, (_, sums, of) in enumerate(parts)
                for i, count in of.owners.items()
            },
            norms=compiler(_norms, owned, owned_sums),
            init=init,
            update=update,
            state_structure=structure,
        )


def _zeros_program(compiler: Compiler, specs: list[list[Any]]) -> Compiled:
    """Of programs without any result, stored ones cannot be loaded."""
    return compiler(lambda: _zeros(specs)) if any(specs) else lambda: [[] for _ in specs]


def merged(chunks: Sequence[Params]) -> Params:
    """The layers of all chunks in one dict."""
    return {layer: params for chunk in chunks for layer, params in chunk.items()}


def _accumulate(sums: list[Any], gradients: list[Any]) -> list[Any]:
    return [a + g.astype(a.dtype) for a, g in zip(sums, gradients, strict=True)]


def _add_aliases(own: Any, theirs: list[Any]) -> Any:
    for other in theirs:  # in order of declaration
        own = own + other
    return own


def _norms(params: Any, sums: Any) -> Any:
    magnitudes = [jnp.abs(a).astype(jnp.float32) for a in jax.tree.leaves(sums)]
    zero = jnp.zeros((), jnp.float32)
    largest = jnp.max(jnp.stack([zero, *(jnp.max(a, initial=0.0) for a in magnitudes)]))
    shares = [jnp.sum(jnp.square(a / jnp.maximum(largest, SMALLEST))) for a in magnitudes]
    squares = [jnp.sum(jnp.square(jnp.abs(p).astype(jnp.float32))) for p in jax.tree.leaves(params)]
    return jnp.stack([largest, sum(shares, zero), sum(squares, zero)])


def _init_of(optimizer: optax.GradientTransformation, roles: Sequence[LeafRoles]) -> Any:
    """The function behind `UpdatePrograms.init`."""
    return lambda leaves: jax.tree.leaves(optimizer.init(merged(_trees(roles, leaves))))


def _update_of(optimizer: optax.GradientTransformation, roles: Sequence[LeafRoles], structure: Any) -> Any:
    """The function behind `UpdatePrograms.update`; `structure` is that of the optimizer's state."""

    def update(old: Any, state: list[Any], sums: Any, scale: Any) -> tuple[Any, Any, Any]:
        gradients = jax.tree.map(lambda a, o: (a * scale).astype(o.dtype), sums, old)
        trees = _trees(roles, old)
        state = jax.tree.unflatten(structure, state)
        changes, after = optimizer.update(merged(_trees(roles, gradients)), state, merged(trees))
        new = optax.apply_updates(merged(trees), changes)
        leaves = [jax.tree.leaves({layer: new[layer] for layer in own}) for own in trees]
        return leaves, jax.tree.leaves(after), _zeros(sums)

    return update


def _trees(roles: Sequence[LeafRoles], owned: Sequence[Sequence[Any]]) -> list[Params]:
    return [of.owned_tree(leaves) for of, leaves in zip(roles, owned, strict=True)]


def _wide(spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, jnp.promote_types(spec.dtype, jnp.float32))


def _zeros(specs: Any) -> Any:
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)
