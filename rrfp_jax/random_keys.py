"""Typed random keys as plain numbers, which devices and messages take, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def plain(array: jax.Array) -> jax.Array:
    """The numbers of typed keys; any other array as it is."""
    return jax.random.key_data(array) if is_key(array) else array


def plain_spec(spec: Any) -> Any:
    """The same of specs, which are then as wide; a key lies whole on every device."""
    if not is_key(spec):
        return spec
    numbers = jax.eval_shape(jax.random.key_data, spec)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=getattr(spec, "sharding", None))


def as_key(spec: Any, array: jax.Array) -> jax.Array:
    """The inverse of `plain`, for an array like `spec`."""
    if not is_key(spec):
        return array
    kinds: list[Any] = []  # only a value, or a tracer, tells its kind
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), spec)
    return jax.random.wrap_key_data(array, impl=kinds[0])  # type: ignore[no-any-return]


def is_key(array: Any) -> bool:
    """Whether an array or spec is of typed keys."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))
