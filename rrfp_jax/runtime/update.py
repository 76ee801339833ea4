"""What a stage does with gradients, whatever the shapes of microbatches: add them, update parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rrfp_jax.runtime.compiling import Compiled, compile_for
from rrfp_jax.runtime.layers import Params


@dataclass(frozen=True, kw_only=True)
class UpdatePrograms:
    """Adding gradients, their norm, and the optimizer; lists of arrays come per chunk of the stage.

    zeros       -> accumulators, all zero
    init        parameters -> optimizer state
    accumulate  of each chunk: accumulators, gradients -> accumulators          (accumulators donated)
    norm        accumulators -> sum of squares, float32 scalar
    update      parameters, optimizer state, accumulators, scale -> parameters, state, zeroed accumulators
                (all donated); gradients are the accumulators times `scale`, a float32 scalar

    Accumulators are float32 or wider whatever the parameters are: they hold sums over many microbatches.
    """

    zeros: Compiled
    accumulate: Sequence[Compiled]
    norm: Compiled
    init: Compiled | None
    update: Compiled | None
    state_structure: Any

    @classmethod
    def compile(
        cls, chunks: Sequence[Params], optimizer: optax.GradientTransformation | None, device: jax.Device
    ) -> UpdatePrograms:
        """Trace and compile for the parameters of each chunk; without an optimizer there is no update."""
        leaves = [jax.tree.leaves(params) for params in chunks]
        wide = [
            [jax.ShapeDtypeStruct(s.shape, jnp.promote_types(s.dtype, jnp.float32)) for s in specs]
            for specs in leaves
        ]

        def accumulate(sums: list[Any], gradients: list[Any]) -> list[Any]:
            return [a + g.astype(a.dtype) for a, g in zip(sums, gradients, strict=True)]

        def norm(sums: list[Any]) -> Any:
            squares = [jnp.sum(jnp.square(a.astype(jnp.float32))) for a in jax.tree.leaves(sums)]
            return sum(squares, jnp.zeros((), jnp.float32))

        def zeros() -> Any:
            return _zeros(wide)

        init = update = structure = None
        if optimizer is not None:
            state, structure = jax.tree.flatten(jax.eval_shape(optimizer.init, merged(chunks)))
            init = compile_for(device, lambda p: jax.tree.leaves(optimizer.init(merged(p))), chunks)
            update = compile_for(
                *(device, _update_of(optimizer, chunks, structure), leaves, state, wide),
                jax.ShapeDtypeStruct((), jnp.float32),
                donate=(0, 1, 2),
            )
        return cls(
            zeros=compile_for(device, zeros),
            accumulate=[
                compile_for(device, accumulate, sums, gradients, donate=(0,))
                for sums, gradients in zip(wide, leaves, strict=True)
            ],
            norm=compile_for(device, norm, wide),
            init=init,
            update=update,
            state_structure=structure,
        )


def merged(chunks: Sequence[Params]) -> Params:
    """The layers of all chunks in one dict."""
    return {layer: params for chunk in chunks for layer, params in chunk.items()}


def _update_of(optimizer: optax.GradientTransformation, chunks: Sequence[Params], structure: Any) -> Any:
    """The function behind `UpdatePrograms.update`; `structure` is that of the optimizer's state."""

    def tree(leaves: Sequence[Sequence[Any]]) -> Params:
        pairs = zip(chunks, leaves, strict=True)
        return merged([jax.tree.unflatten(jax.tree.structure(params), own) for params, own in pairs])

    def update(old: Any, state: list[Any], sums: Any, scale: Any) -> tuple[Any, Any, Any]:
        gradients = jax.tree.map(lambda a, o: (a * scale).astype(o.dtype), sums, old)
        changes, after = optimizer.update(tree(gradients), jax.tree.unflatten(structure, state), tree(old))
        new = optax.apply_updates(tree(old), changes)
        leaves = [jax.tree.leaves({layer: new[layer] for layer in params}) for params in chunks]
        return leaves, jax.tree.leaves(after), _zeros(sums)

    return update


def _zeros(specs: Any) -> Any:
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)
