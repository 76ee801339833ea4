"""Adding a gradient to its sum inside the program that computes it.

A program that computes gradients takes the sums, whose memory it may use, and gives the new ones. A gradient
that is out of turn goes through *the same program*, with zeros for sums; it is parked and added later by a
program of its own. So XLA compiles, fuses and tunes one program for both ways, and a gradient has the same
bits in both. What is left is that `sum + gradient` must be rounded as if the gradient had been stored before.
XLA does not see to that by itself, on CPU with jax 0.10.2:

- a product and the addition become one multiply-add, which rounds once (an outer product, a bias of one row);
- a scatter adds to the sum itself, row by row, instead of to zeros;
- the rounding of a bfloat16 gradient is left out if float32 is what follows.

`jax.lax.optimization_barrier` stops the last two only: it is taken away before operations are fused. What
stops all three is a selection that no compiler can see through without knowing the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Flat = Callable[..., Sequence[Any]]
"""A program of flat arguments and results."""

TOKEN = jax.ShapeDtypeStruct((), jnp.bool_)
"""What an adding program gives last: it is ready when the program has ended, and nobody takes its memory."""


def adding(program: Flat, count: int) -> Flat:
    """A program whose last `count` results are gradients, as one that adds them to sums.

    It takes the sums before the program's own arguments, and gives them in the gradients' places, then a
    token.
    """

    def sums_and_rest(*args: Any) -> list[Any]:
        results = program(*args[count:])
        own = len(results) - count
        sums = map(added, args[:count], results[own:])
        return [*results[:own], *sums, jnp.zeros(TOKEN.shape, TOKEN.dtype)]

    return sums_and_rest


def added(total: Any, gradient: Any) -> Any:
    """Their sum, rounded as if the gradient had been stored in its own dtype before.

    A zero of either sign counts as +0. That changes no sum: sums begin at +0, and so none is ever -0.
    """
    if gradient.dtype != total.dtype:
        gradient = jax.lax.optimization_barrier(gradient).astype(total.dtype)
    return total + jnp.where(gradient != 0, gradient, jnp.zeros((), total.dtype))
