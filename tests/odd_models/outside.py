"""Beside the composed models: those that must be refused, and those with random streams of their own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import rrfp_jax as rrfp
from tests.odd_models.odd import WIDTH, dense, enter, matrix, squares


def functions(*layers):
    return lambda: rrfp.Pipeline(
        [rrfp.layer(apply, init=matrix) for apply in layers], squares, additive=False
    )


def to(function):
    return lambda params, x, mb: function(x @ params["w"])


def after(params, x, mb):
    return dense(params, jnp.asarray(x, jnp.float32), mb)


class Changing(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jnp.eye(WIDTH))

    def __call__(self, carry, mb):
        self.w[...] = self.w[...] * 0.9
        return carry @ self.w[...]


class Statistics(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, carry, mb):
        return self.norm(carry)


class Quantized(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    @nnx.jit
    def rounded(self, x):
        return jnp.round(4 * self.linear(x))

    def __call__(self, carry, mb):
        return self.rounded(carry) / 4


class LinenQuantized(nn.Module):
    @nn.compact
    def __call__(self, carry, mb):
        return {"code": nn.Dense(WIDTH)(carry).argmax(-1)}


class LinenStatistics(nn.Module):
    @nn.compact
    def __call__(self, carry, mb):
        return nn.BatchNorm(use_running_average=not mb.training)(carry)


def around(layer, last=dense):
    whole = [
        rrfp.layer(enter, init=matrix),
        layer,
        rrfp.layer(last, init=matrix),
        rrfp.layer(dense, init=matrix),
    ]
    return rrfp.Pipeline(whole, squares, additive=False)


def embedded(params, carry, mb):
    return jax.nn.one_hot(carry["code"], WIDTH) @ params["w"]


UNTRAINED = "layers 0-1 would not train"

REFUSED = {  # a Pipeline, and what is said
    "integers": (functions(enter, to(lambda x: x.astype(jnp.int32)), after, dense), [UNTRAINED, "int32"]),
    "small integers": (functions(enter, to(lambda x: x.astype(jnp.int8)), after, dense), [UNTRAINED, "int8"]),
    "truths": (functions(enter, to(lambda x: x > 0), after, dense), [UNTRAINED, "as bool"]),
    "stop_gradient": (
        functions(enter, to(jax.lax.stop_gradient), dense, dense),
        [UNTRAINED, "at stop_gradient"],
    ),
    "stop_gradient before weights": (
        functions(enter, dense, lambda p, x, mb: jax.lax.stop_gradient(x) @ p["w"], dense),
        [UNTRAINED, "layer 2 (<lambda>), at stop_gradient"],
    ),
    "rounding": (functions(enter, to(jnp.round), dense, dense), [UNTRAINED, "at round"]),
    "floor in jit": (functions(enter, to(jax.jit(jnp.floor)), dense, dense), [UNTRAINED, "at floor"]),
    "sign, rematerialised": (
        functions(enter, to(jax.checkpoint(jnp.sign)), dense, dense),
        [UNTRAINED, "at sign"],
    ),
    "argmax": (
        functions(enter, to(lambda x: jax.nn.one_hot(x.argmax(-1), WIDTH)), dense, dense),
        [UNTRAINED, "at argmax, which gives int32"],
    ),
    "a carry that is not used": (
        functions(enter, dense, lambda p, x, mb: mb["x"] @ p["w"], dense),
        [UNTRAINED, "does not use what layer 1 (dense) gives"],
    ),
    "a quantized NNX module": (
        lambda: around(rrfp.layer(Quantized)),
        [UNTRAINED, "layer 1 (Quantized), at round"],
    ),
    "a quantized Linen module": (
        lambda: around(rrfp.layer(LinenQuantized), embedded),
        [UNTRAINED, "layer 1 (LinenQuantized) gives its carry leaf code as int32"],
    ),
    "a loss without gradient": (
        lambda: rrfp.Pipeline(
            [rrfp.layer(enter, init=matrix), rrfp.layer(dense, init=matrix)],
            lambda carry, mb: rrfp.Loss(jnp.round(carry).sum(), 2),
            additive=False,
        ),
        [UNTRAINED, "it ends in the loss, at round"],
    ),
    "a module that changes a parameter": (lambda: around(rrfp.layer(Changing)), ["changes its parameter w"]),
    "running statistics": (lambda: around(rrfp.layer(Statistics)), ["layer 1 (Statistics)", "norm.mean"]),
    "running statistics of Linen": (
        lambda: around(rrfp.layer(LinenStatistics)),
        ["layer 1 (LinenStatistics)"],
    ),
    "a random key as carry": (
        functions(enter, lambda p, x, mb: (x @ p["w"], mb.key), dense, dense),
        ["random keys cannot be sent"],
    ),
}


class Dropping(nnx.Module):
    """Flax's own idiom: the module keeps its stream."""

    def __init__(self, wrapped=lambda method: method, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.wrapped = wrapped

    def __call__(self, carry, mb):
        run = self.wrapped(lambda self, x: self.dropout(jnp.sin(self.linear(x))))
        return carry + run(self, carry)


class OwnStream(nn.Module):
    stream: str

    @nn.compact
    def __call__(self, carry, mb):
        x = nn.Dense(WIDTH)(carry)
        if mb.training:
            x = x + 0.1 * jax.random.normal(self.make_rng(self.stream), x.shape)
        return carry + nn.Dropout(0.5, deterministic=not mb.training)(x)


class Inner(nn.Module):
    stream: str

    @nn.compact
    def __call__(self, x, training):
        x = nn.Dense(WIDTH)(x)
        if training:
            x = x * jax.random.uniform(self.make_rng(self.stream), x.shape)
        return x


class Wrapping(nn.Module):
    stream: str
    wrapped: str

    @nn.compact
    def __call__(self, carry, mb):
        kind = {
            "remat": lambda: nn.remat(Inner, static_argnums=2),
            "jit": lambda: nn.jit(Inner, static_argnums=2),
        }
        return carry + kind[self.wrapped]()(self.stream)(carry, mb.training)


def of_streams(make):
    def pipeline():
        layers = [rrfp.layer(enter, init=matrix), make(), make(), rrfp.layer(dense, init=matrix)]
        return rrfp.Pipeline(layers, squares, additive=False)

    return pipeline


STREAMS = {
    "NNX stream": of_streams(lambda: rrfp.layer(Dropping)),
    "NNX stream, jit": of_streams(lambda: rrfp.layer(Dropping, nnx.jit)),
    "NNX stream, remat": of_streams(lambda: rrfp.layer(Dropping, nnx.remat)),
    "Linen dropout and params": of_streams(lambda: rrfp.layer(OwnStream, "dropout")),
    "Linen stream": of_streams(lambda: rrfp.layer(OwnStream, "noise")),
    "Linen stream, remat": of_streams(lambda: rrfp.layer(Wrapping, "noise", "remat")),
    "Linen stream, jit": of_streams(lambda: rrfp.layer(Wrapping, "noise", "jit")),
}
