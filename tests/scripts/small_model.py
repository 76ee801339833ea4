"""The model of `failing.py` and `hanging.py`, but for its block: that is where they do what they are for."""

import jax
import numpy as np
import optax

import rrfp_jax as rrfp

WIDTH, BLOCKS = 8, 4


def embed(params, carry, mb):
    return params["table"][mb["tokens"]]


def head(params, carry, mb):
    return carry @ params["weight"]


def matrix(key):
    return {"weight": 0.1 * jax.random.normal(key, (WIDTH, WIDTH))}


def loss(logits, mb):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["tokens"])
    return rrfp.Loss(nll.sum(), weight=nll.size)


def pipeline(block):
    """Six layers; a block has one (WIDTH, WIDTH) matrix."""
    table = rrfp.layer(embed, init=lambda key: {"table": jax.random.normal(key, (WIDTH, WIDTH))})
    blocks = rrfp.layer(block, init=matrix, repeat=BLOCKS)
    return rrfp.Pipeline([table, blocks, rrfp.layer(head, init=matrix)], loss)


def microbatches(step, count, length=8):
    """Two rows of tokens each."""
    random = np.random.default_rng(step)
    return [{"tokens": random.integers(0, WIDTH, (2, length))} for _ in range(count)]
