"""Operations of a transformer layer by the project's cost analysis; nothing is computed, only traced.

A layer has products with its weights, whose operations grow with the number of tokens, and attention's own
two products, which grow with its square. Two counts, at two lengths, tell them apart. Masked products count
in full. A backward repeats each product of weights twice, once for the input (I) and once for the weights
(W), and each of attention's products twice, both in I.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp

from benchmarks.studies.paper.published import Tower
from rrfp_jax.forecast.cost_analysis import program_cost

LENGTHS = (256, 512)
"""Tokens at which a layer is counted."""


def _layer(tower: Tower) -> Callable[..., jax.Array]:
    def forward(x: jax.Array, *weights: jax.Array) -> jax.Array:
        query, key, value, out, up, down, *gate = weights
        group = tower.heads // tower.kv_heads
        q = (x @ query).reshape(-1, tower.kv_heads, group, tower.head_width)
        k, v = ((x @ w).reshape(-1, tower.kv_heads, tower.head_width) for w in (key, value))
        scores = jnp.einsum("tkgh,skh->kgts", q, k) / math.sqrt(tower.head_width)
        mixed = jnp.einsum("kgts,skh->tkgh", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(len(x), -1) @ out
        hidden = jax.nn.silu(x @ gate[0]) * (x @ up) if gate else jax.nn.gelu(x @ up)
        return x + hidden @ down

    return forward


def _weights(tower: Tower) -> list[tuple[int, int]]:
    """Shapes, in the order in which the layer takes them."""
    width, hidden = tower.width, tower.hidden
    queries, keys = tower.heads * tower.head_width, tower.kv_heads * tower.head_width
    gate = [(width, hidden)] if tower.gated else []
    return [
        *((width, queries), (width, keys), (width, keys), (queries, width)),
        *((width, hidden), (hidden, width), *gate),
    ]


@cache
def per_token(tower: Tower) -> tuple[float, float]:
    """(a, b): the forward of one layer on n tokens has a n + b n^2 operations."""
    counts = []
    for tokens in LENGTHS:
        shapes = [(tokens, tower.width), *_weights(tower)]
        specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        closed = jax.make_jaxpr(_layer(tower))(*specs)
        counts.append(sum(program_cost(closed).flops.values()))
    short, long = LENGTHS
    square = (counts[1] / long - counts[0] / short) / (long - short)
    return counts[0] / short - square * short, square
