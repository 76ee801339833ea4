"""Small stages to differentiate: fixed ones, and ones put together from recipes."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from benchmarks.backward import Halved
from rrfp_jax.runtime.autodiff.differentiate import differentiate
from rrfp_jax.runtime.autodiff.traced import BARRIER, REPEATABLE, inline

ROWS, WIDTH, DEPTH = 4, 8, 3


def halved(stage, params, carry, inputs=(), **chosen):
    """A stage with random values: specs are arrays of small numbers, or shapes of float32 ones."""
    draw = np.random.default_rng(0)

    def value(thing):
        if isinstance(thing, tuple):
            return jnp.asarray(draw.normal(size=thing) / thing[-1] ** 0.5, jnp.float32)
        return jnp.asarray(thing)

    values = [list(map(value, things)) for things in (params, carry, inputs)]
    specs = [[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in part] for part in values]
    return Halved(differentiate(stage, *specs, **chosen), values[0], [*values[1], *values[2]])


def outputs_equal(fused, halves, tolerance=0.0):
    """Same leaves, each within `tolerance` of its largest value."""
    assert len(fused) == len(halves)
    for a, b in zip(*([np.asarray(x, np.float64) for x in part] for part in (fused, halves)), strict=True):
        assert np.isfinite(a).all() and a.shape == b.shape
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.abs(a).max(initial=0.0))


def tallies(program):
    """How often each primitive that is not cheap is applied; loops count every iteration."""
    closed = getattr(program, "closed", program)
    if not isinstance(closed, ClosedJaxpr):
        closed = ClosedJaxpr(closed, [])
    found = Counter()
    for equation in inline(closed).jaxpr.eqns:
        name, bodies = equation.primitive.name, list(jaxprs_in_params(equation.params))
        times = equation.params["length"] if name == "scan" else 1
        for body in bodies:
            for inner, count in tallies(body).items():
                found[inner] += times * count
        if not bodies and name not in REPEATABLE | {BARRIER}:
            found[name] += 1
    return found


def norm(scale, x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale


def dense(matrix, x):
    return jnp.tanh(x @ matrix)


@jax.custom_vjp
def doubled(matrix, x):
    """Its own rule gives twice the gradient, so that it shows whether the rule is followed."""
    return jnp.sin(x @ matrix)


def _doubled_backward(saved, cotangent):
    matrix, x = saved
    inner = 2 * cotangent * jnp.cos(x @ matrix)
    return x.T @ inner, inner @ matrix.T


doubled.defvjp(lambda matrix, x: (doubled(matrix, x), (matrix, x)), _doubled_backward)


def through_weights(matrix, x):
    """The gradient of a product of `matrix` is needed on the way to that of x."""
    return x @ (matrix * jnp.mean(x * x))


def scanned(stacked, scale, x, remat):
    """DEPTH layers in a loop with a matrix each and one scale for all."""

    def body(x, matrix):
        return x + dense(matrix, norm(scale, x)), x.sum()

    body = jax.checkpoint(body) if remat else body
    x, sums = jax.lax.scan(body, x, stacked)
    return x + sums.mean()


def nested(stacked, matrix, x):
    """A loop in a loop; the inner one uses the same matrix each time."""

    def outer(x, own):
        inner, _ = jax.lax.scan(lambda y, _: (dense(matrix, y) + y, None), x @ own, length=2)
        return inner, None

    return jax.lax.scan(outer, x, stacked)[0]


def branching(matrix, x):
    return jax.lax.cond(x.sum() > 0, lambda x: dense(matrix, x), lambda x: x * 2, x)


UNARY = {  # name: (shapes of its parameters, function of them and x)
    "dense": ([(WIDTH, WIDTH)], dense),
    "norm": ([(WIDTH,)], norm),
    "bias": ([(WIDTH,)], lambda b, x: x + b),
    "tanh": ([], jnp.tanh),
    "softmax": ([], jax.nn.softmax),
    "jit": ([(WIDTH, WIDTH)], jax.jit(lambda m, x: jax.nn.silu(x @ m))),
    "remat": ([(WIDTH, WIDTH), (WIDTH,)], jax.checkpoint(lambda m, s, x: x + dense(m, norm(s, x)))),
    "custom": ([(WIDTH, WIDTH)], doubled),
    "through": ([(WIDTH, WIDTH)], through_weights),
    "scan": ([(DEPTH, WIDTH, WIDTH), (WIDTH,)], lambda m, s, x: scanned(m, s, x, False)),
    "rematscan": ([(DEPTH, WIDTH, WIDTH), (WIDTH,)], lambda m, s, x: scanned(m, s, x, True)),
    "scanremat": (
        [(DEPTH, WIDTH, WIDTH), (WIDTH,)],
        jax.checkpoint(lambda m, s, x: scanned(m, s, x, False)),
    ),
    "nested": ([(DEPTH, WIDTH, WIDTH), (WIDTH, WIDTH)], nested),
    "cond": ([(WIDTH, WIDTH)], branching),
}


def from_recipe(steps, loss):
    """(stage, shapes of its parameters) of a graph; every step adds a value to those at hand."""
    shapes, places = [], []
    for i, (name, _, _, shared) in enumerate(steps):
        before = [places[k] for k in range(i) if steps[k][0] == name]
        if shared and before:
            places.append(before[-1])
        else:
            places.append(range(len(shapes), len(shapes) + len(UNARY[name][0])))
            shapes += UNARY[name][0]

    def stage(params, carry, inputs):
        x, rows = carry
        values = [x]
        for (name, read, add, _), place in zip(steps, places, strict=True):
            made = UNARY[name][1](*(params[i] for i in place), values[read % len(values)])
            values.append(made + 0.5 * values[add % len(values)][rows])
        if loss:
            total = (values[-1] ** 2).sum()
            return [], total, total[None]
        return [values[-1], rows + 1], None, None

    return stage, shapes
