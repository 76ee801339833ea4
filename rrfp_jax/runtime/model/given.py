"""What layers and losses may give."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.model.layers import Loss
from rrfp_jax.runtime.model.metrics import numbers_of


def check_carry(carry: Any) -> None:
    """Refuse leaves of a carry that cannot be sent.

    Raises:
        UsageError: one is neither an array nor a number, or it is a random key.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
        where = f"carry{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise UsageError(
                f"gives {where} = {_short(leaf)}, of type {type(leaf).__name__}; a carry is a tree of arrays "
                f"and numbers: register a class of yours with jax.tree_util.register_dataclass, and keep "
                f"what is no number in the layer"
            )
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise UsageError(
                f"gives {where} of dtype {leaf.dtype}, but random keys cannot be sent: read mb.key where it "
                f"is used"
            )


def check_sums(loss: Loss) -> None:
    """Refuse a `Loss` whose numbers are no scalar sums, or whose total has no gradient.

    Raises:
        UsageError: naming the number.
    """
    numbers = {"total": loss.total, "weight": loss.weight}
    for name, metric in loss.metrics.items():
        numbers |= {f"{name}.{of}" if of else name: value for of, value in numbers_of(metric).items()}
    for name, value in numbers.items():
        if not isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise UsageError(f"Loss {name} is {_short(value)}; it must be a number, a scalar sum")
        if jnp.shape(value) != ():
            raise UsageError(f"Loss {name} has shape {jnp.shape(value)}; it must be a scalar sum: add .sum()")
        if jnp.iscomplexobj(value):
            raise UsageError(f"Loss {name} is complex; it must be real: take its .real, or jnp.abs of it")
    if isinstance(loss.total, jax.Array) and not jnp.issubdtype(loss.total.dtype, jnp.floating):
        raise UsageError(
            f"Loss total is {loss.total.dtype}, which has no gradient; sum floating point numbers, and give "
            f"counts as metrics"
        )


def describe(tree: Any) -> str:
    """A tree of specs as short text, such as `{'x': float32[2, 16]}`."""
    if tree is None:
        return "None"
    return str(jax.tree.map(lambda leaf: _Bare(f"{leaf.dtype}{list(leaf.shape)}"), tree))


def _short(value: Any) -> str:
    text = repr(value).splitlines()[0]
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Bare(str):
    """Text that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
