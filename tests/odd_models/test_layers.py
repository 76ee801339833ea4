"""Layers of all kinds: control flow, rules of their own, randomness, functions on the host, references."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental.ode import odeint

import rrfp_jax as rrfp
from rrfp_jax.runtime.model.roles import covering
from tests.odd_models.odd import ROWS, WIDTH, Odd, dense, enter, held_against_plain_jax, matrix, rows, squares

TABLE = np.random.default_rng(5).standard_normal((WIDTH, WIDTH)).astype(np.float32)


@jax.custom_vjp
def twice(x):
    """Its derivative is said to be 2."""
    return jnp.sin(x)


twice.defvjp(lambda x: (jnp.sin(x), None), lambda _, cotangent: (2 * cotangent,))


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvps(lambda tangent, out, x: tangent)


@jax.custom_vjp
def without_gradient(x):
    return jnp.sin(x)


without_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (jnp.zeros_like(x),))


@jax.custom_vjp
def zero_gradient(x):
    return jnp.sin(x)


zero_gradient.defvjp(lambda x: (jnp.sin(x), None), lambda _, cotangent: (jnp.zeros_like(cotangent),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def powered(n, x):
    return x**n


powered.defvjp(lambda n, x: (x**n, x), lambda n, x, cotangent: (cotangent * n * x ** (n - 1),))


def looped(w, x):
    return jax.lax.scan(lambda c, row: (jnp.tanh(c @ w) + row, c.sum()), x, jnp.ones((3, ROWS, WIDTH)))[0]


def dropped(mb, x):
    return jnp.where(jax.random.bernoulli(mb.key, 0.5, x.shape), 2 * x, 0)


def hosted(x):
    """A pure function on the host, with its derivative."""

    @jax.custom_vjp
    def sine(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    sine.defvjp(
        lambda x: (sine(x), x),
        lambda x, cotangent: (
            cotangent * jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        ),
    )
    return sine(x)


@jax.custom_vjp
def noisy(x, key):
    """Its derivative is random, so that the key is a residual."""
    return jnp.sin(x)


noisy.defvjp(
    lambda x, key: (jnp.sin(x), key), lambda key, g: (g * jax.random.uniform(key, g.shape, minval=0.5), None)
)

CONSTANT_KEY, ARRAY = jax.random.key(7), jnp.asarray(TABLE)


def key_of(values):
    """A key from a row of floats."""
    return jax.random.wrap_key_data(jax.lax.bitcast_convert_type(values[0, :2], jnp.uint32))


def keys_in_a_scan(w, x, mb, rematerialised=lambda f: f):
    def body(carry, _):
        x, key = carry
        key, own = jax.random.split(key)
        return (noisy(jnp.tanh(x @ w), own) * jax.random.uniform(key, x.shape), key), None

    return jax.lax.scan(rematerialised(body), (x, mb.key), length=3)[0][0]


KEYS = {  # which the backward of `noisy` reads
    "of the microbatch": lambda w, x, mb: mb.key,
    "of data": lambda w, x, mb: key_of(mb["y"]),
    "of the carry": lambda w, x, mb: key_of(jax.lax.stop_gradient(x)),
    "of a moving carry": lambda w, x, mb: key_of(x),
    "of weights": lambda w, x, mb: jax.random.fold_in(key_of(w), 3),
    "constant": lambda w, x, mb: CONSTANT_KEY,
    "constant, folded": lambda w, x, mb: jax.random.fold_in(CONSTANT_KEY, jnp.argmax(mb["y"])),
    "picked": lambda w, x, mb: jax.random.split(mb.key, 5)[jnp.argmax(x[0])],
    "of a branch": lambda w, x, mb: jax.lax.cond(
        x.sum() > 0, lambda: jax.random.fold_in(mb.key, 1), lambda: mb.key
    ),
    "of another generator": lambda w, x, mb: jax.random.key(jnp.argmax(x[0]), impl="rbg"),
}

LAYERS = {  # of their matrix, what arrives and the microbatch
    "scan": lambda w, x, mb: looped(w, x),
    "reversed scan": lambda w, x, mb: jax.lax.scan(
        lambda c, row: (c + row @ w, c), jnp.zeros(WIDTH), x, reverse=True
    )[1],
    "scan that is unrolled": lambda w, x, mb: jax.lax.scan(
        lambda c, _: (jnp.sin(c @ w), None), x, length=4, unroll=2
    )[0],
    "scan of nothing": lambda w, x, mb: jax.lax.scan(lambda c, _: (c @ w, None), x, length=0)[0] @ w,
    "scan in scan": lambda w, x, mb: jax.lax.scan(
        lambda c, _: (jax.lax.scan(lambda d, _: (jnp.tanh(d @ w), None), c, length=2)[0], None), x, length=2
    )[0],
    "rematerialised scan": lambda w, x, mb: jax.checkpoint(looped)(w, x),
    "remat with a policy": lambda w, x, mb: jax.checkpoint(
        lambda w, x: jnp.sin(x @ w) @ w, policy=jax.checkpoint_policies.dots_saveable
    )(w, x),
    "fori_loop": lambda w, x, mb: jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x),
    "associative_scan": lambda w, x, mb: jax.lax.associative_scan(jnp.multiply, 1 + 0.1 * x) @ w,
    "cond": lambda w, x, mb: jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x - x @ w, x),
    "cond on the data": lambda w, x, mb: jax.lax.cond(mb["y"].sum() > 0, lambda: x @ w, lambda: x),
    "switch": lambda w, x, mb: jax.lax.switch(1, [lambda x: x, lambda x: x @ w, lambda x: jnp.sin(x) @ w], x),
    "while on what has no gradient": lambda w, x, mb: (
        x
        @ w
        * jax.lax.while_loop(lambda c: c < 5, lambda c: c * 2, jax.lax.stop_gradient(jnp.abs(x).max()) + 1)
    ),
    "while of counts": lambda w, x, mb: x @ w + jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0),
    "jit": lambda w, x, mb: jax.jit(lambda w, x: jnp.tanh(x @ w))(w, x),
    "jit in jit": lambda w, x, mb: jax.jit(lambda x: jax.jit(jnp.sin)(x) @ w)(x),
    "vmap": lambda w, x, mb: jax.vmap(lambda row: jnp.tanh(row @ w))(x),
    "grad in the layer": lambda w, x, mb: jax.grad(lambda x: jnp.sin(x @ w).sum())(x),
    "jvp in the layer": lambda w, x, mb: jax.jvp(lambda x: jnp.sin(x @ w), (x,), (x,))[1],
    "hessian in the layer": lambda w, x, mb: x @ jax.hessian(lambda v: (jnp.sin(v) @ w).sum())(x[0]),
    "custom_vjp": lambda w, x, mb: twice(x @ w),
    "custom_vjp of weights": lambda w, x, mb: x @ twice(w),
    "custom_jvp straight through": lambda w, x, mb: straight_through(3 * (x @ w)),
    "custom_vjp without gradient": lambda w, x, mb: without_gradient(x @ w) + x,
    "custom_vjp with a number": lambda w, x, mb: powered(3, x @ w),
    "stop_gradient on weights": lambda w, x, mb: x @ jax.lax.stop_gradient(w) + x,
    "stop_gradient on a part": lambda w, x, mb: x @ w - jax.lax.stop_gradient(x),
    "no parameter used": lambda w, x, mb: jnp.sin(x),
    "weights alone": lambda w, x, mb: x + jnp.linalg.inv(w @ w.T + 3 * jnp.eye(WIDTH)).sum(),
    "cholesky": lambda w, x, mb: x @ jnp.linalg.cholesky(w @ w.T + 3 * jnp.eye(WIDTH)),
    "solve": lambda w, x, mb: jnp.linalg.solve(w @ w.T + 3 * jnp.eye(WIDTH), x.T).T,
    "eigh": lambda w, x, mb: x * jnp.linalg.eigh(w @ w.T)[0],
    "svd": lambda w, x, mb: x * jnp.linalg.svd(w, compute_uv=False),
    "fft": lambda w, x, mb: jnp.fft.irfft(jnp.fft.rfft(x @ w), WIDTH),
    "complex weights": lambda w, x, mb: jnp.abs(x @ (w + 1j * w.T)),
    "sort": lambda w, x, mb: jnp.sort(x @ w, -1),
    "top_k": lambda w, x, mb: jnp.repeat(jax.lax.top_k(x @ w, 1)[0], WIDTH, -1),
    "argsort picks": lambda w, x, mb: jnp.take_along_axis(x @ w, jnp.argsort(x, -1), -1),
    "gather": lambda w, x, mb: x + w[jnp.array([2, 0])],
    "scatter add": lambda w, x, mb: x @ w.at[jnp.array([0, 0])].add(x),
    "scatter set": lambda w, x, mb: (x @ w).at[:, 1].set(x[:, 0]),
    "dynamic_slice": lambda w, x, mb: x + jax.lax.dynamic_slice(w, (jnp.argmax(x[0]) % 2, 0), (ROWS, WIDTH)),
    "cumulative": lambda w, x, mb: jnp.cumsum(x @ w, -1) + jnp.cumprod(1 + 0.1 * x, -1),
    "cumlogsumexp": lambda w, x, mb: jax.lax.cumlogsumexp(x @ w, axis=1),
    "convolution": lambda w, x, mb: jax.lax.conv_general_dilated(
        x[:, None], w[:, None, :], (1,), "SAME"
    ).mean(1),
    "einsum": lambda w, x, mb: jnp.einsum("bi,ij,bj->bi", x, w, x),
    "softmax": lambda w, x, mb: jax.nn.softmax(x @ w) * x,
    "gelu, softplus": lambda w, x, mb: jax.nn.gelu(x) + jax.nn.softplus(x @ w),
    "logsumexp at infinity": lambda w, x, mb: (
        jax.nn.logsumexp(jnp.where(jnp.eye(WIDTH, dtype=bool)[:ROWS], -jnp.inf, x @ w), -1, keepdims=True) + x
    ),
    "where of a root": lambda w, x, mb: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), x) @ w,
    "norm": lambda w, x, mb: x @ w / jnp.linalg.norm(x @ w, axis=-1, keepdims=True),
    "erf, lgamma": lambda w, x, mb: jax.lax.erf(x @ w) + jax.lax.lgamma(1 + x**2),
    "expm": lambda w, x, mb: x @ jax.scipy.linalg.expm(w),
    "expm of the carry": lambda w, x, mb: jax.vmap(lambda row: jax.scipy.linalg.expm(row[None] * w)[0])(x),
    "expm in jit": lambda w, x, mb: jax.jit(lambda x: x @ jax.scipy.linalg.expm(w))(x),
    "ode": lambda w, x, mb: odeint(lambda y, t: jnp.tanh(y @ w), x, jnp.array([0.0, 0.5]))[1],
    "arrays of nested programs": lambda w, x, mb: jax.checkpoint(
        lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ (w + ARRAY), lambda x: jnp.sin(x @ TABLE), x)
    )(jax.lax.scan(lambda c, _: (c @ (w + ARRAY), None), x, length=2)[0]),
    "table": lambda w, x, mb: x @ (w + TABLE),
    "reshapes": lambda w, x, mb: (x @ w).reshape(-1)[::-1].reshape(x.shape).T.T,
    "dropout": lambda w, x, mb: dropped(mb, x @ w),
    "dropout, rematerialised": lambda w, x, mb: jax.checkpoint(lambda x: dropped(mb, jnp.sin(x @ w)))(x),
    "random split": lambda w, x, mb: (
        x @ w + sum(jax.random.normal(key, x.shape) for key in jax.random.split(mb.key, 3))
    ),
    "random in a scan": lambda w, x, mb: jax.lax.scan(
        lambda c, key: (c * jax.random.uniform(key, c.shape), None), x @ w, jax.random.split(mb.key, 3)
    )[0],
    "random with another generator": lambda w, x, mb: (
        x @ w
        + jax.random.normal(jax.random.wrap_key_data(jnp.arange(4, dtype=jnp.uint32), impl="rbg"), x.shape)
    ),
    "random by rejection": lambda w, x, mb: x @ w * jax.random.gamma(mb.key, 2.0, x.shape),
    **{f"key {name}": lambda w, x, mb, f=f: noisy(x @ w, f(w, x, mb)) for name, f in KEYS.items()},
    **{
        f"key {name}, rematerialised": lambda w, x, mb, f=f: jax.checkpoint(
            lambda w, x: noisy(jnp.sin(x) @ w, f(w, x, mb))
        )(w, x)
        for name, f in KEYS.items()
    },
    "keys in a scan": keys_in_a_scan,
    "keys in a rematerialised scan": functools.partial(keys_in_a_scan, rematerialised=jax.checkpoint),
    "keys scanned": lambda w, x, mb: jax.lax.scan(
        lambda c, key: (noisy(c @ w, key), None), x, jax.random.split(mb.key, 2)
    )[0],
    "keys by row": lambda w, x, mb: jax.vmap(lambda row, key: noisy(row[None] @ w, key)[0])(
        x, jax.random.split(mb.key, ROWS)
    ),
    "bfloat16 product": lambda w, x, mb: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(
        jnp.float32
    ),
    "float16 product": lambda w, x, mb: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32),
    "reduced precision": lambda w, x, mb: jax.lax.reduce_precision(x @ w, 8, 10),
    "barrier": lambda w, x, mb: jax.lax.optimization_barrier((x @ w, x))[0],
    "a print": lambda w, x, mb: printed(x @ w),
    "a function on the host": lambda w, x, mb: hosted(x @ w),
    "a function on the host, of the data": lambda w, x, mb: (
        x @ w + jax.pure_callback(np.sin, jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32), mb["y"])
    ),
    "a function on the host, of nothing": lambda w, x, mb: (
        x @ w + jax.pure_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), np.float32))
    ),
    "named": lambda w, x, mb: checkpoint_name(jnp.sin(x @ w), "sine") @ w,
}


def printed(x):
    jax.debug.callback(lambda value: None, x.sum())
    return x


def referenced(w, x):
    ref = jax.new_ref(x @ w)
    ref[...] = jnp.sin(ref[...])
    return ref[...]


OUTSIDE = []


def outside(w, x):
    """A reference that lives on between calls."""
    if not OUTSIDE:
        OUTSIDE.append(jax.new_ref(jnp.zeros(())))
    OUTSIDE[0][...] = OUTSIDE[0][...] + 1
    return x @ w + OUTSIDE[0][...]


def draw(*args):
    return np.random.standard_normal((ROWS, WIDTH)).astype(np.float32)


DRAWN = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
REFERENCE = ("layer 2", "mutable reference", "at[index].set")

REFUSED = {
    "rng_uniform": (
        lambda w, x, mb: x @ w * jax.lax.rng_uniform(0.0, 1.0, x.shape),
        ("layer 2", "lax.rng_uniform", "mb.key"),
    ),
    "rng_uniform in jit": (
        lambda w, x, mb: jax.jit(lambda x: x * jax.lax.rng_uniform(0.0, 1.0, x.shape))(x @ w),
        ("layer 2", "lax.rng_uniform", "mb.key"),
    ),
    "rng_uniform in a scan": (
        lambda w, x, mb: jax.lax.scan(
            lambda c, _: (c * jax.lax.rng_uniform(0.0, 1.0, ()), None), x @ w, length=2
        )[0],
        ("layer 2", "lax.rng_uniform", "mb.key"),
    ),
    "draws on the host": (
        lambda w, x, mb: x @ w * io_callback(draw, DRAWN),
        ("layer 2", "io_callback", "mb.key"),
    ),
    "reads on the host, in order": (
        lambda w, x, mb: x @ w * io_callback(draw, DRAWN, jax.lax.stop_gradient(x), ordered=True),
        ("layer 2", "io_callback", "mb.key"),
    ),
    "reference": (lambda w, x, mb: referenced(w, x), REFERENCE),
    "reference in jit": (lambda w, x, mb: jax.jit(referenced)(w, x), REFERENCE),
    "reference outside": (lambda w, x, mb: outside(w, x), REFERENCE),
    "while": (
        lambda w, x, mb: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.abs(c) + 1, x @ w),
        ("layer 2", "cannot be differentiated", "static start/stop. For a loop, take jax.lax.scan or"),
    ),
    "fori_loop of unknown length": (
        lambda w, x, mb: jax.lax.fori_loop(0, jnp.argmax(x[0]), lambda i, c: jnp.sin(c), x @ w),
        ("layer 2", "cannot be differentiated", "jax.lax.scan"),
    ),
    "a function on the host without derivative": (
        lambda w, x, mb: jax.pure_callback(np.sin, DRAWN, x @ w),
        ("layer 2", "cannot be differentiated", "Give the callback a derivative (jax.custom_jvp)"),
    ),
    **{
        name: (lambda w, x, mb, f=function: f(x @ w), ("layers 0-2 would not train, for", "0.w", said))
        for name, function, said in [
            (
                "stop_gradient",
                jax.lax.stop_gradient,
                "it ends in layer 2 (<lambda>), at stop_gradient (test_",
            ),
            (
                "integers",
                lambda x: (4 * x).astype(jnp.int32),
                "layer 2 (<lambda>) gives its carry as int32 (test_",
            ),
            ("truths", lambda x: x > 0, "layer 2 (<lambda>) gives its carry as bool (test_layers.py, line"),
            ("rounding", jnp.round, "it ends in layer 2 (<lambda>), at round (test_layers.py, line"),
            (
                "jitted sign",
                jax.jit(jnp.sign),
                "it ends in layer 2 (<lambda>), at sign (test_layers.py, line",
            ),
            (
                "rounding to integers",
                lambda x: x.astype(int) * 0.5,
                "at a cast to int32 (test_layers.py, line",
            ),
            ("a comparison", lambda x: (x > 0) * 2.0, "at gt, which gives bool (test_layers.py, line"),
            ("argmax", lambda x: jax.nn.one_hot(x.argmax(-1), WIDTH), "at argmax, which gives int32"),
            (
                "a derivative of zero",
                zero_gradient,
                "it ends in layer 2 (<lambda>), whose derivative is zero",
            ),
        ]
    },
    "carry not used": (
        lambda w, x, mb: mb["x"] @ w,
        ("layers 0-1 would not train", "layer 2 (<lambda>) does not use what layer 1 (dense) gives"),
    ),
    "stop_gradient before weights": (
        lambda w, x, mb: jax.lax.stop_gradient(x) @ w,
        ("layers 0-1 would not train", "layer 2 (<lambda>), at stop_gradient", "frozen=['0.*', '1.*']"),
    ),
    "raises": (lambda w, x, mb: x @ w[:2], ("layer 2", "dot_general")),
    "asks for values": (lambda w, x, mb: x @ w if x.sum() > 0 else x, ("layer 2", "TracerBoolConversion")),
    "raises its own error": (lambda w, x, mb: {}["missing"], ("layer 2", "KeyError", "missing")),
}


def of_matrix(function):
    return matrix, lambda params, carry, mb: function(params["w"], carry, mb)


WHOLE = [(matrix, enter), of_matrix(lambda w, x, mb: (4 * (x @ w)).astype(jnp.int32))]
ITS_OWN = of_matrix(
    lambda w, x, mb: (jax.lax.stop_gradient(y := x @ w), rrfp.Loss(((y - mb["y"]) ** 2).sum()))
)
TRAINED_ELSEWHERE = {  # layers without a gradient from the loss that are taken all the same
    "integers below, frozen": ([*WHOLE, (matrix, dense), (matrix, dense)], {"frozen": ("0.*", "1.*")}),
    "integers below, tied to layers above": (
        [*WHOLE, (matrix, dense), (matrix, dense)],
        {"tied_to": {"0.w": "2.w", "1.w": "3.w"}},
    ),
    "each layer with a loss of its own": (
        [of_matrix(lambda w, _, mb: ITS_OWN[1]({"w": w}, mb["x"], mb)), ITS_OWN, ITS_OWN, (matrix, dense)],
        {},
    ),
    "not used by a layer whose carry is not used": (
        [of_matrix(lambda w, _, mb: mb["x"]), (matrix, enter), (matrix, dense)],
        {},
    ),
    "a head that only evaluates": (
        [
            (matrix, enter),
            (matrix, dense),
            of_matrix(lambda w, x, mb: {"x": x, "probe": jnp.sign(x @ w)}),
            of_matrix(lambda w, c, mb: c["x"] @ w if mb.training else c["probe"] @ w),
        ],
        {},
    ),
    "integers beside": (
        [
            (matrix, enter),
            of_matrix(lambda w, x, mb: {"x": x @ w, "ids": x.argmax(-1)}),
            of_matrix(lambda w, c, mb: jnp.tanh(c["x"] @ w) + c["ids"][:, None]),
            (matrix, dense),
        ],
        {},
    ),
}


def cases():
    for name, function in LAYERS.items():
        layer = (matrix, lambda params, carry, mb, f=function: f(params["w"], carry, mb))
        layers = [(matrix, enter), (matrix, dense), layer, layer]
        tolerance = 0.02 if "float16" in name or "reduced" in name else 5e-5
        yield name, Odd(layers=layers, loss=squares, batch=rows(), tolerance=tolerance)
    for name, (function, said) in REFUSED.items():
        layer = (matrix, lambda params, carry, mb, f=function: f(params["w"], carry, mb))
        after = (matrix, lambda params, x, mb: dense(params, x.astype(jnp.float32), mb))
        layers = [(matrix, enter), (matrix, dense), layer, after]
        yield name, Odd(layers=layers, loss=squares, batch=rows(), refused=said)
    for name, (layers, settings) in TRAINED_ELSEWHERE.items():
        yield name, Odd(layers=layers, loss=squares, batch=rows(), steps=2, **settings)


def quantized(optimizer, batch, between=lambda x, mb: x.astype(jnp.int32)):
    """A Trainer of a model whose carry is cast to integers."""
    cast = (matrix, lambda p, x, mb: between(x @ p["w"], mb))
    after = (matrix, lambda p, x, mb: x.astype(jnp.float32) @ p["w"])
    pipeline = Odd(layers=[(matrix, enter), cast, after], loss=squares).pipeline()
    return rrfp.Trainer(pipeline, optimizer, data=batch, mesh=rrfp.Mesh(pp=2))


def test_a_check_refuses_layers_that_would_not_train():
    with pytest.raises(
        rrfp.UsageError, match=r"layers 0-1 would not train.*int32 \(test_layers.py, line \d+\)"
    ):
        quantized(optax.sgd(0.1), rows()).check()


def test_a_rule_that_gives_a_wrong_shape_is_not_taken_for_a_loop():
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (g[0],))
    pipeline = Odd(layers=[(matrix, enter), of_matrix(lambda w, x, mb: rule(x @ w))], loss=squares).pipeline()
    with pytest.raises(rrfp.UsageError, match=r"layer 1 .* cannot be differentiated: .* bwd rule") as caught:
        rrfp.Trainer(pipeline, optax.sgd(0.1), data=rows(), mesh=rrfp.Mesh(pp=2)).start()
    assert "loop" not in str(caught.value)


def test_a_model_that_is_only_evaluated_may_have_them():
    assert quantized(None, rows()).evaluate(rows()).loss > 0


def test_layers_that_another_bucket_of_the_step_trains_are_taken():
    batch = [*rows(1), *rows(1, seed=1, exact=lambda draw: np.float32(1))]
    trainer = quantized(optax.sgd(0.1), batch, lambda x, mb: x if "exact" in mb else x.astype(jnp.int32))
    trainer.start()
    before = jax.device_get(trainer.stage_params["0"]["w"])
    trainer.step(batch)
    assert not np.array_equal(before, trainer.stage_params["0"]["w"])


def routed(p, x, mb):
    return (x @ p["w"]) * (1.0 + jnp.argmax(x @ p["router"], -1, keepdims=True))


def of_router(key):
    return {"w": jnp.eye(WIDTH), "router": jax.random.normal(key, (WIDTH, 2))}


LOST = r"no gradient reaches 1.router: it ends in layer 1 \(routed\), at argmax.*\(test_layers.py, line \d+\)"


def test_parameters_of_a_layer_that_would_not_train_though_others_do_are_told_once(capfd):
    pipeline = Odd(layers=[(matrix, enter), (of_router, routed)], loss=squares).pipeline()
    trainer = rrfp.Trainer(pipeline, optax.sgd(0.1), data=rows(), mesh=rrfp.Mesh(pp=2))
    report = trainer.check()
    assert re.fullmatch(rf"warning: {LOST}.*frozen=\['1.router'\]\)\n", capfd.readouterr().err)
    assert report.ok and [*report.lost] == ["1.router"] and re.search(LOST, report.text)


@pytest.mark.parametrize(
    ("lost", "others", "patterns"),
    [
        ("1.router", "1.w 0.w", ["1.router"]),
        ("1.r.bias 1.r.kernel", "1.w", ["1.r.*"]),
        ("0.w 0.b", "1.w", ["0.*"]),
        ("0.r.w 1.r.w 2.r.w", "0.w 1.w 2.w 2.r.b", ["*.r.w"]),
        ("0.r.w 1.r.w 1.x", "0.w 1.w", ["*.r.w", "1.x"]),
    ],
)
def test_the_remedy_names_patterns_that_match_no_other_parameter(lost, others, patterns):
    assert covering(lost.split(), others.split()) == patterns


def test_a_gradient_without_an_optimizer_and_a_check_tell_of_it(capfd):
    trainer = quantized(None, rows())
    assert capfd.readouterr().err == ""
    trainer.value_and_grad(rows()), trainer.value_and_grad(rows())
    assert re.findall("no gradient reaches ([^:]*):", capfd.readouterr().err) == ["0.w, 1.w"]
    assert [*trainer.check().lost] == ["0.w", "1.w"]


test_like_plain_jax = held_against_plain_jax(cases())
