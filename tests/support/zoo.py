"""A model with a layer of every kind: NNX with an nnx.List, Linen, functions with lists, frozen and tied."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp

VOCABULARY, WIDTH = 12, 8


class Embed(nnx.Module):
    """Its second table is that of the head."""

    def __init__(self, *, rngs):
        self.tables = nnx.List([nnx.Embed(VOCABULARY, WIDTH, rngs=rngs) for _ in range(2)])
        self.scale = nnx.Param(jnp.full(WIDTH, 0.5, jnp.bfloat16))

    def __call__(self, carry, mb):
        return sum(table(mb["tokens"]) for table in self.tables) * self.scale[...].astype(jnp.float32)


class Dense(linen.Module):
    """Linen's way."""

    @linen.compact
    def __call__(self, carry, mb):
        return carry + linen.tanh(linen.Dense(WIDTH)(carry))


def pair_init(key):
    return [jax.random.normal(key, (WIDTH, 2 * WIDTH)), {"down": jax.random.normal(key, (2 * WIDTH, WIDTH))}]


def pair(params, carry, mb):
    return carry + jnp.tanh(carry @ params[0]) @ params[1]["down"]


def doubled(carry, mb):
    return 2 * carry


def head(table, carry, mb):
    """Its only parameter is no tree."""
    return carry @ table.T


def loss(logits, mb):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    return rrfp.Loss(nll.sum(), weight=nll.size)


def pipeline(**kwargs):
    layers = [
        rrfp.layer(Embed),
        rrfp.layer(Dense, repeat=2),
        rrfp.layer(pair, init=pair_init),
        rrfp.layer(doubled),
        rrfp.layer(head, init=lambda key: jnp.zeros((VOCABULARY, WIDTH))),
    ]
    return rrfp.Pipeline(layers, loss, **kwargs)


FROZEN_AND_TIED = {"frozen": ("1.*", "0.tables.0.*"), "tied": {"0.tables.1.embedding": "-1"}}
SPREAD = {"sharding": {"3.0": P(None, "tp"), "3.1.down": P("tp"), "0.tables.*": P("tp")}}


def microbatches(step, count=2):
    random = np.random.default_rng(step)
    for _ in range(count):
        numbers = random.integers(0, VOCABULARY, (2, 7))
        yield {"tokens": numbers[:, :-1], "labels": numbers[:, 1:]}


TOKENS = np.arange(10, dtype=np.int32).reshape(2, 5)


def plain_logits(states):
    """The logits of exported states, in plain flax alone."""
    embed, mb = Embed(rngs=nnx.Rngs(7)), {"tokens": TOKENS}
    nnx.update(embed, states[0])
    carry = embed(None, mb)
    for variables in states[1:3]:
        carry = Dense().apply(variables, carry, mb)
    carry = doubled(pair(states[3], carry, mb), mb)
    return np.asarray(head(states[5], carry, mb))


def logits_of(modules):
    """The logits of exported modules."""
    carry = None
    for module in modules:
        carry = module(carry, {"tokens": TOKENS})
    return np.asarray(carry)


def digest(states):
    """A hash of all arrays of a tree."""
    content = hashlib.sha256()
    for leaf in jax.tree.leaves(states):
        content.update(np.asarray(leaf).tobytes())
    return content.hexdigest()
