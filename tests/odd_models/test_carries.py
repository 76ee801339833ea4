"""Carry leaves that the loss does not depend on, with a derivative that is infinite or not a number.

A zero cotangent times an infinite derivative is not a number, so a leaf without a cotangent must have none.
"""

import jax
import jax.numpy as jnp

import rrfp_jax as rrfp
from tests.odd_models.odd import Odd, enter, held_against_plain_jax, matrix, rows, squares

INFINITE = {  # functions of values some of which are exactly 0, with an infinite derivative there
    "sqrt": jnp.sqrt,
    "log": jnp.log,
    "entropy": lambda z: z * jnp.log(z),
    "norm": lambda z: jnp.linalg.norm(z, axis=-1, keepdims=True) + z,
    "power": lambda z: z**0.3,
    "reciprocal": lambda z: 1 / z,
    "arccos": lambda z: jnp.arccos(1 - z),
    "cbrt": jnp.cbrt,
    "rsqrt": jax.lax.rsqrt,
    "scanned": lambda z: jax.lax.scan(lambda c, row: (c, jnp.sqrt(row)), 0.0, z)[1],
    "jitted": jax.jit(jnp.sqrt),
}

DEAD = {  # uses of a leaf through which nothing is differentiated
    "metric": lambda z: 0.0,
    "stop_gradient": lambda z: jax.lax.stop_gradient(jnp.nan_to_num(z, posinf=0.0, neginf=0.0)),
    "round": lambda z: (
        jnp.round(jnp.clip(jax.lax.stop_gradient(z), -9, 9)) + jnp.round(jnp.minimum(z, 3.0)) * 0
    ),
    "floor": lambda z: jnp.floor(z) > 2,
    "comparison": lambda z: (z > 0.5).astype(jnp.float32),
    "sign": jnp.sign,
    "argmax": lambda z: jax.nn.one_hot(z.argmax(-1), z.shape[-1]),
    "integers": lambda z: jnp.clip(z, 0, 5).astype(jnp.int32).astype(jnp.float32),
    "unused": lambda z: None,
}


def risky(function):
    def apply(params, carry, mb):
        x = carry @ params["w"]
        return {"x": x, "risky": function(x - x)}

    return apply


def kept(params, carry, mb):
    """A stage through which the leaf only passes."""
    return {"x": jnp.tanh(carry["x"] @ params["w"]), "risky": carry["risky"]}


def ended(use):
    def apply(params, carry, mb):
        used = use(carry["risky"])
        x = carry["x"] @ params["w"]
        return x if used is None else x + jnp.where(jnp.isfinite(used), used, 0.0)

    return apply


def seen_by_a_metric(carry, mb):
    metrics = {"seen": carry["risky"].sum()}
    return rrfp.Loss(((carry["x"] - mb["y"]) ** 2).sum(), weight=carry["x"].shape[0], metrics=metrics)


def cases():
    for what, function in INFINITE.items():
        for how, use in DEAD.items():
            if how == "metric":
                layers = [(matrix, enter), (matrix, risky(function)), (matrix, kept), (matrix, kept)]
                yield f"{what}, {how}", Odd(layers=layers, loss=seen_by_a_metric, batch=rows())
            else:
                layers = [(matrix, enter), (matrix, risky(function)), (matrix, kept), (matrix, ended(use))]
                yield f"{what}, {how}", Odd(layers=layers, loss=squares, batch=rows())


test_like_plain_jax = held_against_plain_jax(cases())
