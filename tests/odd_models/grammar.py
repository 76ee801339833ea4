"""Models drawn at random: layers that compute expressions of the leaves that arrive, and pass some on.

An expression is a nested tuple, so that a model that fails can be read, and drawn again from its number.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp

import rrfp_jax as rrfp
from tests.odd_models.odd import WIDTH, Odd, rows

LAYERS, MATRICES, DEPTH = 4, 2, 3


@jax.custom_vjp
def doubled(x):
    """Its derivative is said to be twice what it is."""
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (2 * cotangent * jnp.cos(x),))


@jax.custom_jvp
def straight_through(x):
    """Rounded, with the derivative of the identity."""
    return jnp.round(2 * x) / 2


straight_through.defjvps(lambda tangent, out, x: tangent)

UNARY = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "relu": jax.nn.relu,
    "square": jnp.square,
    "softmax": jax.nn.softmax,
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "sort": lambda x: jnp.sort(x, -1),
    "flip": lambda x: x[::-1, ::-1],
    "root": lambda x: jnp.sqrt(jnp.abs(x)),
    "root of nothing": lambda x: jnp.sqrt(x - x),
    "logarithm": lambda x: jnp.log1p(jnp.abs(x)),
    "entropy": lambda x: jax.scipy.special.entr(jax.nn.relu(x)),
    "round": jnp.round,
    "sign": jnp.sign,
    "stop": jax.lax.stop_gradient,
    "bfloat16": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "integers": lambda x: jnp.clip(4 * x, -99, 99).astype(jnp.int32).astype(jnp.float32) / 4,
    "norm": lambda x: x / jnp.sqrt(1 + (x * x).sum(-1, keepdims=True)),
    "max": lambda x: x.max(-1, keepdims=True) + 0 * x,
    "doubled": doubled,
    "straight through": straight_through,
    "greater": lambda x: (x > 0.1).astype(jnp.float32),
}

BINARY = {
    "add": jnp.add,
    "multiply": jnp.multiply,
    "minimum": jnp.minimum,
    "where": lambda a, b: jnp.where(a > 0, a, b),
    "divide": lambda a, b: a / (1 + b * b),
    "mix": lambda a, b: jax.nn.softmax(a @ b.T) @ a,
    "take": lambda a, b: jnp.take_along_axis(a, jnp.argsort(b, -1), -1),
    "gate": lambda a, b: a * jax.nn.sigmoid(b),
}

OF_WEIGHTS = {
    "product": lambda w, x: x @ w,
    "product with a function": lambda w, x: x @ jnp.sin(w),
    "scale": lambda w, x: x * w[0],
    "bias": lambda w, x: x + w[1],
    "symmetric": lambda w, x: x @ (w @ w.T),
}

WRAPPED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "twice": lambda f: lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(f(c)), c.sum()), x, length=2)[0],
    "either": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: 2 * x, x),
    "by row": lambda f: jax.vmap(lambda row: f(row[None])[0]),
}


def drawn(draw, depth, leaves):
    """An expression over so many leaves."""
    kind = draw.choice(["unary", "unary", "binary", "weights", "wrapped", "leaf"]) if depth else "leaf"
    if kind == "leaf":
        return ("leaf", draw.randrange(leaves + 1))
    inner = drawn(draw, depth - 1, leaves)
    if kind == "unary":
        return ("unary", draw.choice(sorted(UNARY)), inner)
    if kind == "binary":
        return ("binary", draw.choice(sorted(BINARY)), inner, drawn(draw, depth - 1, leaves))
    if kind == "weights":
        return ("weights", draw.choice(sorted(OF_WEIGHTS)), draw.randrange(MATRICES), inner)
    return (
        "wrapped",
        draw.choice(sorted(WRAPPED)),
        draw.choice(sorted(UNARY)),
        draw.randrange(MATRICES),
        inner,
    )


def value(expression, params, leaves):
    """Of an expression; the last leaf is the data."""
    kind, *rest = expression
    if kind == "leaf":
        return leaves[rest[0] % len(leaves)]
    if kind == "unary":
        return UNARY[rest[0]](value(rest[1], params, leaves))
    if kind == "binary":
        return BINARY[rest[0]](value(rest[1], params, leaves), value(rest[2], params, leaves))
    if kind == "weights":
        return OF_WEIGHTS[rest[0]](params["w"][rest[1]], value(rest[2], params, leaves))
    wrap, unary, matrix, inner = rest
    function = WRAPPED[wrap](lambda x: UNARY[unary](x @ params["w"][matrix]))
    return function(value(inner, params, leaves))


def init(key):
    return {"w": jax.random.normal(key, (MATRICES, WIDTH, WIDTH)) / WIDTH**0.5}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Expressions, one for each leaf that it gives; leaves that only pass are ("leaf", i)."""

    gives: tuple

    def __call__(self, params, carry, mb):
        leaves = [*(carry or []), mb["x"]]
        return [value(own, params, leaves) for own in self.gives]


def model(number):
    """The model of a number."""
    draw = random.Random(number)
    layers, leaves = [], 0
    for _ in range(LAYERS):
        count = draw.randint(1, 3)
        layers.append(Layer(tuple(drawn(draw, DEPTH, leaves) for _ in range(count))))
        leaves = count
    learned, seen = drawn(draw, 1, leaves - 1), draw.randrange(leaves)

    def loss(carry, mb):
        first = carry[0] @ jnp.eye(WIDTH) + value(learned, {"w": jnp.ones((2, WIDTH, WIDTH))}, carry)
        metrics = {"seen": jnp.nan_to_num(carry[seen]).sum()}
        return rrfp.Loss(jnp.sin(first - mb["y"]).sum(), carry[0].shape[0], metrics)

    return Odd(
        layers=[(init, layer) for layer in layers],
        loss=loss,
        batch=rows(2),
        tolerance=2e-3,
        may_not_train=True,
    )
