"""A step in plain, unpipelined JAX, on one device: what a pipeline's numbers are held against.

The objective is written down once more here, from its definition: the sum of all totals over the sum of all
weights. It is differentiated as it stands, through the weights, too, so that this shares no mistake with the
pipeline, which is cut into programs and knows of the weights that they need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.runtime.mesh.stage_mesh import tracing_alone
from rrfp_jax.runtime.model.layers import MicrobatchView, Params
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.model.roles import LeafRoles, Roles, leaf_paths


@dataclass(frozen=True)
class PlainStep:
    """One step of a pipeline's model.

    Attributes:
        params: of the whole model, on the first local device.
        numbers: seed and step, which random keys follow from.
    """

    pipe: Pipeline
    params: Params
    microbatches: Sequence[Mapping[str, Any]]
    numbers: tuple[int, int]

    def value_and_grad(self) -> tuple[float, Params]:
        """Loss and gradient of all microbatches, the model compiled as one program.

        The gradient has no frozen parameters; tied ones are one argument of what is differentiated.
        """
        return self._value_and_grad(jax.jit(_pulled_back(self._sums(_as_it_is))), self._owned)

    def in_pieces(self) -> tuple[float, Params]:
        """The same with every layer compiled by itself, and differentiated by itself."""
        return self._value_and_grad(_pulled_back(self._sums(jax.jit)), self._owned)

    def nearby(self) -> tuple[float, Params]:
        """The same as one program, at parameters that each are larger or smaller by one rounding."""
        draw = np.random.default_rng(0)

        def moved(leaf: Any) -> Any:
            epsilon = float(jnp.finfo(leaf.dtype).eps)  # type: ignore[no-untyped-call]
            signs = draw.choice([-epsilon, epsilon], leaf.shape)
            return (leaf.astype(_wide(leaf)) * (1 + signs)).astype(leaf.dtype)

        return self._value_and_grad(
            jax.jit(_pulled_back(self._sums(_as_it_is))), [moved(leaf) for leaf in self._owned]
        )

    @cached_property
    def _roles(self) -> Roles:
        pipe = self.pipe
        return Roles.of(self.params, pipe.frozen, pipe.tied, pipe.constants(self.params))

    @cached_property
    def _places(self) -> LeafRoles:
        return self._roles.leaves(self.params)

    @cached_property
    def _leaves(self) -> list[Any]:
        return jax.device_put(jax.tree.leaves(self.params), jax.local_devices()[0])  # type: ignore[no-any-return]

    @cached_property
    def _owned(self) -> list[Any]:
        return [self._leaves[place] for place in self._places.owned]

    @cached_property
    def _sources(self) -> list[int]:
        """Where each leaf has its value from: tied ones from their owner."""
        roles, paths = self._roles, leaf_paths(self.params)
        first = {path: place for place, path in enumerate(paths)}
        return [first[roles.owners.get(path, path)] for path in paths]

    def _sums(self, compiled: Callable[[Any], Any]) -> Callable[..., Any]:
        """(owned parameters, all parameters, fields, numbers) -> summed total and weight of a microbatch."""
        pipe, places, sources = self.pipe, self._places, self._sources
        layers = [compiled(_layer(pipe, index)) for index in range(len(pipe))]

        def sums(owned: Sequence[Any], leaves: Sequence[Any], fields: Any, ids: Any) -> tuple[Any, Any]:
            values = {**dict(enumerate(leaves)), **dict(zip(places.owned, owned, strict=True))}
            tree = jax.tree.unflatten(places.structure, [values[place] for place in sources])
            carry, terms = None, []
            for index, layer in enumerate(layers):
                carry, term = layer(tree[str(index)], carry, fields, ids)
                terms += [] if term is None else [term]
            terms.append(pipe.apply_loss(carry, MicrobatchView(fields, ids, len(pipe))))
            return _sum([term.total for term in terms]), _sum([term.weight for term in terms])

        return sums

    def _value_and_grad(self, step: Callable[..., Any], owned: Sequence[Any]) -> tuple[float, Params]:
        total, weight = 0.0, 0.0
        zeros = [np.zeros(leaf.shape, _wide(leaf)) for leaf in owned]
        of_total, of_weight = zeros, zeros
        for j, fields in enumerate(self.microbatches):
            ids = jnp.array([*self.numbers, j], jnp.uint32)
            with tracing_alone():
                (part, count), first, second = step(owned, self._leaves, dict(fields), ids)
            total, weight = total + float(part), weight + float(count)
            of_total = [a + g.astype(a.dtype) for a, g in zip(of_total, first, strict=True)]
            of_weight = [a + g.astype(a.dtype) for a, g in zip(of_weight, second, strict=True)]
        mean, places = total / weight, self._places
        pairs = zip(places.owned, of_total, of_weight, strict=True)
        gradient = {place: jnp.asarray((a - mean * b) / weight) for place, a, b in pairs}
        return mean, places.trained_tree([gradient[self._sources[place]] for place in places.trained])


def _layer(pipe: Pipeline, index: int) -> Callable[..., Any]:
    def layer(params: Params, carry: Any, fields: Any, ids: Any) -> Any:
        return pipe.apply_layer(index, params, carry, MicrobatchView(fields, ids, index))

    return layer


def _pulled_back(sums: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the gradients of its two results by its first argument."""

    def pulled_back(owned: Any, *rest: Any) -> Any:
        found, pull = jax.vjp(lambda own: sums(own, *rest), owned)
        ones = [jnp.ones_like(value) for value in found]
        zeros = [jnp.zeros_like(value) for value in found]
        return found, pull((ones[0], zeros[1]))[0], pull((zeros[0], ones[1]))[0]

    return pulled_back


def _sum(values: Sequence[Any]) -> Any:
    """In float32 at least."""
    wide = jnp.result_type(jnp.float32, *values)
    return sum(jnp.asarray(value).astype(wide) for value in values)


def _wide(leaf: Any) -> Any:
    """What gradients are summed in, float32 at least, as a NumPy dtype."""
    return np.dtype(np.float32) if leaf.dtype.itemsize < 4 else leaf.dtype


def _as_it_is(function: Any) -> Any:
    return function
