"""Carries, microbatches and parameters of odd structure, shape and dtype."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from tests.odd_models.odd import ROWS, WIDTH, Odd, dense, enter, held_against_plain_jax, matrix, rows, squares

Pair = collections.namedtuple("Pair", "x extra")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Held:
    x: jax.Array
    extra: jax.Array


class Unregistered:
    pass


CARRIES = {  # what a stage sends besides x
    "nothing": lambda x, mb: {},
    "none": lambda x, mb: None,
    "a Python number": lambda x, mb: 2.5,
    "a whole Python number": lambda x, mb: 3,
    "a Python truth": lambda x, mb: True,
    "a NumPy number": lambda x, mb: np.float32(2),
    "a NumPy array": lambda x, mb: np.arange(3),
    "a list": lambda x, mb: [x, x + 1],
    "a tuple": lambda x, mb: (x.sum(), (x, ())),
    "a namedtuple": lambda x, mb: Pair(x, mb["y"]),
    "a dataclass": lambda x, mb: Held(x, x.sum()),
    "the same twice": lambda x, mb: (x, x),
    "int8": lambda x, mb: (x * 10).astype(jnp.int8),
    "int4": lambda x, mb: (x * 2).astype(jnp.int4),
    "uint4": lambda x, mb: jnp.abs(x).astype(jnp.uint4),
    "uint2": lambda x, mb: jnp.abs(x).astype(jnp.uint2),
    "bool": lambda x, mb: x > 0,
    "bfloat16": lambda x, mb: x.astype(jnp.bfloat16),
    "float16": lambda x, mb: x.astype(jnp.float16),
    "float8": lambda x, mb: x.astype(jnp.float8_e4m3fn),
    "float8_e5m2": lambda x, mb: x.astype(jnp.float8_e5m2),
    "complex64": lambda x, mb: x * (1 + 2j),
    "empty": lambda x, mb: jnp.zeros((0, 3)),
    "empty, of x": lambda x, mb: x[:0],
    "a scalar": lambda x, mb: x.sum(),
    "many dimensions": lambda x, mb: x.reshape(1, ROWS, 1, WIDTH, 1),
    "data": lambda x, mb: mb["y"],
    "key data": lambda x, mb: jax.random.key_data(mb.key),
}

REFUSED = {
    "a random key": (lambda x, mb: mb.key, ("layer 1", "random keys cannot be sent", "mb.key")),
    "text": (lambda x, mb: "text", ("layer 1", "'text'", "arrays")),
    "an object": (lambda x, mb: Unregistered(), ("layer 1", "Unregistered", "arrays")),
    "a type": (lambda x, mb: jnp.float32, ("layer 1", "arrays")),
}


def sending(make):
    return lambda params, x, mb: {"x": jnp.tanh(x @ params["w"]), "extra": make(x, mb)}


def through(params, carry, mb):
    return {**carry, "x": jnp.sin(carry["x"] @ params["w"])}


def taken(params, carry, mb):
    x = carry["x"] @ params["w"]
    for leaf in jax.tree.leaves(carry["extra"]):
        leaf = jnp.asarray(leaf)  # noqa: PLW2901
        if jnp.iscomplexobj(leaf):
            leaf = jnp.abs(leaf)  # noqa: PLW2901
        x = x + 0.1 * leaf.astype(jnp.float32).sum()
    return x


def typed(dtype):
    def init(key):
        return {"w": matrix(key)["w"].astype(dtype), "b": jnp.zeros(WIDTH)}

    return init


def mixed(params, x, mb):
    return jnp.tanh(x @ params["w"].astype(jnp.float32) + params["b"])


@jax.custom_jvp
def scaled(x, by):
    """Its rule multiplies by what may be weakly typed."""
    return x * by


scaled.defjvps(lambda tangent, out, x, by: tangent * by, None)

WEAK = {  # leaves whose type is that of a Python number
    "a mask": lambda x, mb: jnp.where(x > 0, 0.0, -1e9),
    "a number": lambda x, mb: 0.5,
    "an array": lambda x, mb: jnp.asarray(0.5),
    "whole numbers": lambda x, mb: jnp.where(x > 0, 1, 0),
}

BESIDE = {  # what takes them beside bfloat16, which it must stay
    "softmax": lambda x, by: jax.nn.softmax(x + by),
    "logaddexp": jnp.logaddexp,
    "a rule of its own": scaled,
    "a scan": lambda x, by: jax.lax.scan(lambda c, _: (jnp.tanh(c + by), None), x, length=2)[0],
}


def narrow(use):
    def apply(params, carry, mb):
        x = use(carry["x"] @ params["w"].astype(jnp.bfloat16), carry["extra"])
        assert x.dtype == jnp.bfloat16
        return {"x": x, "extra": carry["extra"]}

    return apply


def widened(params, carry, mb):
    return carry["x"].astype(jnp.float32) @ params["w"]


def head(params, x, mb):
    return mixed(params, mb["x"], mb)


def field(name, use=jnp.sum):
    """A layer that reads a field of any shape."""
    return lambda params, x, mb: jnp.tanh(x @ params["w"]) + 0.1 * use(mb[name].astype(jnp.float32))


FIELDS = {
    "empty": lambda draw: np.zeros((0, 4), np.float32),
    "rows of nothing": lambda draw: np.zeros((ROWS, 0), np.int32),
    "a scalar": lambda draw: np.float32(draw.random()),
    "int8": lambda draw: draw.integers(-9, 9, (ROWS, 2)).astype(np.int8),
    "int4": lambda draw: draw.integers(-8, 7, (ROWS, 2)).astype(jnp.int4),
    "bfloat16": lambda draw: draw.random((ROWS, 2)).astype(jnp.bfloat16),
    "float8": lambda draw: draw.random((ROWS, 2)).astype(jnp.float8_e4m3fn),
    "bool": lambda draw: draw.random((ROWS, 2)) > 0.5,
    "uint16": lambda draw: draw.integers(0, 9, (ROWS, 2)).astype(np.uint16),
    "complex64": lambda draw: draw.random((ROWS, 2)).astype(np.complex64),
    "float16": lambda draw: draw.random((ROWS, 2)).astype(np.float16),
    "other rows": lambda draw: draw.random((7,)).astype(np.float32),
}

FLOATS = {
    "bfloat16": (jnp.bfloat16, 0.02),
    "float16": (jnp.float16, 0.01),
    "float8_e4m3fn": (jnp.float8_e4m3fn, 0.2),
    "float8_e5m2": (jnp.float8_e5m2, 0.3),
}


def no_rows(count=2):
    return [{name: array[:0] for name, array in mb.items()} for mb in rows(count)]


def counted(carry, mb):
    return rrfp.Loss(((carry - mb["y"]) ** 2).sum(), weight=1.0)


def cases():
    for name, make in CARRIES.items():
        layers = [(matrix, enter), (matrix, sending(make)), (matrix, through), (matrix, taken)]
        tolerance = 0.1 if "float8" in name else 0.01 if "float16" in name else 5e-5
        yield f"carry: {name}", Odd(layers=layers, loss=squares, batch=rows(), tolerance=tolerance)
    for name, (make, said) in REFUSED.items():
        layers = [(matrix, enter), (matrix, sending(make)), (matrix, through), (matrix, taken)]
        yield f"carry: {name}", Odd(layers=layers, loss=squares, batch=rows(), refused=said)
    for name, make in WEAK.items():
        for where, use in BESIDE.items():
            sent = sending(make)
            layers = [
                (matrix, enter),
                (matrix, lambda p, x, mb, f=sent: f(p, x, mb) | {"x": x.astype(jnp.bfloat16)}),
                (matrix, narrow(use)),
                (matrix, widened),
            ]
            case = Odd(layers=layers, loss=squares, batch=rows(), tolerance=0.05)
            yield f"weak types: {name}, {where}", case
    for name, make in FIELDS.items():
        layers = [(matrix, enter), (matrix, dense), (matrix, field("more")), (matrix, dense)]
        yield f"field: {name}", Odd(layers=layers, loss=squares, batch=rows(more=make), additive=True)
    for name, (dtype, tolerance) in FLOATS.items():
        init = typed(dtype)
        layers = [(init, head), (init, mixed), (typed(jnp.float32), mixed), (init, mixed)]
        settings = {"loss": squares, "batch": rows(), "tolerance": tolerance}
        yield f"parameters: {name}", Odd(layers=layers, **settings, optimizer=optax.sgd(0.1), steps=2)
        clipped = {"clip_norm": 0.5}
        yield f"parameters: {name}, clipped", Odd(layers=layers, **settings, settings=clipped)
    for name, settings in {"float64": {}, "float64, scaled": {"loss_scale": 0.3, "clip_norm": 0.5}}.items():
        wide = [(matrix, lambda p, x, mb: mb["x"].astype(jnp.float64) @ p["w"]), *[(matrix, dense)] * 3]
        more = {"optimizer": optax.adam(0.01), "steps": 0 if settings else 3, "settings": settings}
        yield name, Odd(layers=wide, loss=squares, batch=rows(), tolerance=1e-12, x64=True, **more)
    layers = [(matrix, enter), (matrix, dense), (matrix, dense), (matrix, dense)]
    yield "float32 beside float64", Odd(layers=layers, loss=squares, batch=rows(), x64=True, steps=2)
    yield "no rows", Odd(layers=layers, loss=counted, batch=no_rows(), additive=True)
    yield (
        "no parameters but one",
        Odd(
            layers=[
                (None, lambda p, c, mb: mb["x"]),
                (None, lambda p, x, mb: x * 2),
                (matrix, dense),
                (None, lambda p, x, mb: x + 1),
            ],
            loss=squares,
            batch=rows(),
        ),
    )
    yield "frozen below", Odd(layers=layers, loss=squares, batch=rows(), frozen=("0.*", "1.*"))
    yield "frozen above", Odd(layers=layers, loss=squares, batch=rows(), frozen=("3.*", "2.*"))
    yield "tied", Odd(layers=layers, loss=squares, batch=rows(), tied_to={"3.w": "1.w"}, steps=2)


test_like_plain_jax = held_against_plain_jax(cases())
