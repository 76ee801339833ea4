"""Objectives: weights that depend on parameters, auxiliary terms, sums of odd dtypes."""

import jax
import jax.numpy as jnp
import numpy as np

import rrfp_jax as rrfp
from tests.odd_models.odd import Odd, dense, enter, held_against_plain_jax, matrix, rows, squares

stop = jax.lax.stop_gradient
WEIGHT = ("Loss.weight depends on the parameter", "stop_gradient", "total")


def fits(carry, mb):
    return ((carry - mb["y"]) ** 2).sum()


def error(x, mb):
    return ((x - mb["y"]) ** 2).sum()


LOSSES = {  # what they are of: the last carry
    "mean over a mask": lambda c, mb: rrfp.Loss((c * mb["mask"][:, None]).sum(), mb["mask"].sum()),
    "weight of whole numbers": lambda c, mb: rrfp.Loss(fits(c, mb), jnp.sum(mb["mask"] > 0)),
    "weight is a Python number": lambda c, mb: rrfp.Loss(fits(c, mb), 2),
    "weight of the data": lambda c, mb: rrfp.Loss(fits(c, mb), (mb["y"] ** 2).sum()),
    "weight behind stop_gradient": lambda c, mb: rrfp.Loss(fits(c, mb), stop(jax.nn.sigmoid(c)).sum()),
    "weight is a count": lambda c, mb: rrfp.Loss(fits(c, mb), (c > -100).sum()),
    "weight is an argmax": lambda c, mb: rrfp.Loss(fits(c, mb), 1 + (c.argmax(-1) == 0).sum()),
    "bfloat16 total": lambda c, mb: rrfp.Loss(fits(c, mb).astype(jnp.bfloat16), 2),
    "float16 total": lambda c, mb: rrfp.Loss(fits(c, mb).astype(jnp.float16), 2),
    "through bfloat16": lambda c, mb: rrfp.Loss((c.astype(jnp.bfloat16).astype(jnp.float32) ** 2).sum(), 2),
    "logsumexp": lambda c, mb: rrfp.Loss(jax.nn.logsumexp(c, axis=-1).sum(), 2),
    "max": lambda c, mb: rrfp.Loss(c.max(-1).sum(), 2),
    "sort": lambda c, mb: rrfp.Loss((jnp.sort(c, -1) * jnp.arange(3)).sum(), 2),
    "couples rows": lambda c, mb: rrfp.Loss(jax.nn.log_softmax(c @ c.T).trace(), 2),
    "hinge": lambda c, mb: rrfp.Loss(jnp.maximum(0, 1 - c * mb["y"]).sum(), 2),
    "huge": lambda c, mb: rrfp.Loss(fits(c, mb) * 1e20, 2),
    "tiny": lambda c, mb: rrfp.Loss(fits(c, mb) * 1e-20, 2),
    "random": lambda c, mb: rrfp.Loss((c * jax.random.normal(mb.key, c.shape)).sum(), 2),
    "metrics that are not differentiable": lambda c, mb: rrfp.Loss(
        fits(c, mb), 2, {"hits": (c.argmax(-1) == 1).sum(), "root": jnp.sqrt(c - c).sum()}
    ),
    "scan": lambda c, mb: rrfp.Loss(jax.lax.scan(lambda s, row: (s + (row**2).sum(), None), 0.0, c)[0], 2),
    "complex inside": lambda c, mb: rrfp.Loss(jnp.abs(jnp.fft.fft(c) ** 2).sum(), 2),
}

REFUSED = {
    "weight is a gate": (
        lambda c, mb: rrfp.Loss(fits(c, mb), jax.nn.sigmoid(c).sum()),
        ("the loss:", *WEIGHT),
    ),
    "weight is a norm": (lambda c, mb: rrfp.Loss(fits(c, mb), jnp.sqrt((c**2).sum())), WEIGHT),
    "weight in a scan": (
        lambda c, mb: rrfp.Loss(fits(c, mb), jax.lax.scan(lambda s, r: (s + r.sum(), r), 9.0, c)[0]),
        WEIGHT,
    ),
    "complex total": (lambda c, mb: rrfp.Loss((c + 1j).sum(), 2), ("the loss:", "complex", "real")),
    "whole total": (lambda c, mb: rrfp.Loss(c.astype(jnp.int32).sum(), 2), ("the loss:", "int32")),
    "boolean total": (lambda c, mb: rrfp.Loss((c > 0).all(), 2), ("the loss:", "bool")),
    "total is text": (lambda c, mb: rrfp.Loss("much", 2), ("the loss:", "total")),
    "total is None": (lambda c, mb: rrfp.Loss(None, 2), ("the loss:", "total")),
    "a mean of rows": (lambda c, mb: rrfp.Loss(c.sum(0), 2), ("the loss:", "scalar sum")),
    "a number": (fits, ("the loss:", "rrfp.Loss")),
    "raises": (lambda c, mb: rrfp.Loss(int("one"), 2), ("the loss", "invalid literal", "losses.py")),
    "an assertion without a word": (lambda c, mb: raising(), ("the loss", "AssertionError", "losses.py")),
    "a complex weight": (
        lambda c, mb: rrfp.Loss(fits(c, mb), (mb["y"] + 1j).sum()),
        ("the loss:", "complex"),
    ),
}


def raising():
    raise AssertionError


def gated(params, carry, mb):
    """A router whose load, which depends on parameters, is an auxiliary term."""
    gate = jax.nn.softmax(carry @ params["w"])
    return carry * gate, gate


def auxiliary(make):
    def apply(params, carry, mb):
        x, gate = gated(params, carry, mb)
        return x, make(x, gate, mb)

    return apply


AUXILIARY = {
    "load": lambda x, gate, mb: rrfp.Loss((gate.mean(0) ** 2).sum()),
    "load with a weight": lambda x, gate, mb: rrfp.Loss((gate**2).sum(), weight=mb["mask"].sum()),
    "integers in the weight": lambda x, gate, mb: rrfp.Loss((gate**2).sum(), weight=(gate > 0.4).sum()),
    "stopped weight": lambda x, gate, mb: rrfp.Loss((gate**2).sum(), weight=stop(gate).sum()),
    "no gradient at all": lambda x, gate, mb: rrfp.Loss(stop(gate).sum(), weight=1.0),
    "a constant": lambda x, gate, mb: rrfp.Loss(1.0),
    "bfloat16": lambda x, gate, mb: rrfp.Loss((gate.astype(jnp.bfloat16) ** 2).sum()),
    "of the data only": lambda x, gate, mb: rrfp.Loss((mb["y"] ** 2).sum(), weight=1.0),
}

AUXILIARY_REFUSED = {
    "gate as weight": lambda x, gate, mb: rrfp.Loss((gate**2).sum(), weight=gate.sum(0)[0]),
    "carry as weight": lambda x, gate, mb: rrfp.Loss((gate**2).sum(), weight=jnp.abs(x).sum()),
}


def masked(count=3):
    return rows(count, mask=lambda draw: (draw.random(2) + 0.1).astype(np.float32))


def cases():
    layers = [(matrix, enter), (matrix, dense), (matrix, dense), (matrix, dense)]
    loose = {"bfloat16 total": 0.02, "float16 total": 1e-2, "through bfloat16": 1e-3, "bfloat16": 0.02}
    for name, loss in LOSSES.items():
        yield name, Odd(layers=layers, loss=loss, batch=masked(), tolerance=loose.get(name, 5e-5))
    for name, (loss, said) in REFUSED.items():
        yield name, Odd(layers=layers, loss=loss, batch=masked(), refused=said)
    for name, make in AUXILIARY.items():
        middle = [(matrix, enter), (matrix, auxiliary(make)), (matrix, dense), (matrix, auxiliary(make))]
        tolerance = loose.get(name, 5e-5)
        yield f"auxiliary: {name}", Odd(layers=middle, loss=squares, batch=masked(), tolerance=tolerance)
    for name, make in AUXILIARY_REFUSED.items():
        middle = [(matrix, enter), (matrix, dense), (matrix, auxiliary(make)), (matrix, dense)]
        refused = ("layer 2", *WEIGHT)
        yield f"auxiliary: {name}", Odd(layers=middle, loss=squares, batch=masked(), refused=refused)


test_like_plain_jax = held_against_plain_jax(cases())
