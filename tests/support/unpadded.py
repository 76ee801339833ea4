"""Training on documents of several lengths, and its reference: each document alone, unpadded, unpipelined."""

import jax
import numpy as np

import rrfp_jax as rrfp
from tests.support import toy


def layers():
    """The toy model with two blocks."""
    block = rrfp.layer(toy.block, init=toy.block_init, repeat=2)
    return [rrfp.layer(toy.embed, init=toy.embed_init), block, rrfp.layer(toy.head, init=toy.head_init)]


def run(params, mb):
    """The same by hand."""
    carry = toy.embed(params["0"], None, mb)
    for i in (1, 2):
        carry = toy.block(params[str(i)], carry, mb)
    return toy.head(params["3"], carry, mb)


def documents(**settings):
    """Of 2, 4, 7, 8, or 8 and 4 predictions: few shapes to compile."""
    random = np.random.default_rng(1)
    texts = [random.integers(0, toy.VOCABULARY, n) for n in [3, 5, 8, 9, 13] * 4]
    source = rrfp.data.Examples(texts, field="")
    corpus = rrfp.data.Corpus(source=source, tokenizer=None, vocabulary=toy.VOCABULARY)
    given = {"corpus": corpus, "lengths": (4, 8), "tokens": 16, "microbatches": 5} | settings
    return rrfp.data.Documents(**given)


def alone(run, params, data, plan):
    """Loss and gradient of all documents of a plan, each by itself in one row without any padding."""

    @jax.jit
    @jax.value_and_grad
    def step(params, tokens):
        mb = {"tokens": tokens[None, :-1], "labels": tokens[None, 1:], "mask": np.float32(1)}
        return toy.sums(run(params, mb), mb)[0]

    plain, pieces = jax.device_get(params), data.pieces
    total, gradient, weight = 0.0, jax.tree.map(np.zeros_like, plain), 0
    for row in (row for mb in plan for row in mb.source[2:]):
        for piece in data.rows_of_split.pieces(row):
            begin, size = int(pieces.begin[piece]), int(pieces.size[piece])
            tokens = data.corpus.tokens(int(pieces.document[piece]), begin, begin + size + 1)
            value, own = step(plain, tokens.astype(np.int32))
            total, weight = total + float(value), weight + size
            gradient = jax.tree.map(lambda a, b: a + np.asarray(b), gradient, own)
    return total / weight, jax.tree.map(lambda g: g / weight, gradient)


def differences(trainer, run, data, expected=None):
    """Of the loss and of this process's worst leaf, relative; and what they were held against."""
    plan = data.plan(0)
    loss, gradient = trainer.value_and_grad([data.load(mb, mb.fields) for mb in plan])
    expected = expected or alone(run, toy.initial_params(trainer), data, plan)
    worst = toy.worst_leaf(gradient, {layer: expected[1][layer] for layer in gradient})
    return abs(loss - expected[0]) / expected[0], worst, expected
