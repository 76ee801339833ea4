"""Models drawn at random: what layers compute, how they hold parameters, what wraps them, what they send.

Plain JAX has the same mathematics without modules and transforms, over the same parameters.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rrfp_jax as rrfp
from tests.odd_models import plain
from tests.odd_models.odd import ROWS, WIDTH, rows
from tests.odd_models.test_layers import noisy, straight_through

LAYERS, SHARE = 4, 0.5
TABLE = np.random.default_rng(5).standard_normal((WIDTH, WIDTH)).astype(np.float32)
ARRAY = jnp.asarray(TABLE[::-1].copy())


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a body sees of a microbatch."""

    fields: Any
    key: Any
    training: bool

    @classmethod
    def of(cls, mb):
        return cls({name: mb[name] for name in ("y", "mask", "ids")}, mb.key, mb.training)

    @property
    def mask(self):
        """Additive and weakly typed."""
        return jnp.where(self.fields["mask"] > 0, 0.0, -1e9)


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, SHARE, x.shape), x / SHARE, 0.0)


def normalised(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def narrow(w, b, x):
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) + b


BODIES = {  # of a matrix, a vector, what arrives, and the microbatch
    "dense": lambda w, b, x, mb: jnp.tanh(x @ w + b),
    "residual": lambda w, b, x, mb: x + jnp.tanh(x @ w) * b,
    "attention": lambda w, b, x, mb: jax.nn.softmax(x @ x.T + mb.mask) @ (x @ w) + b,
    "NumPy table": lambda w, b, x, mb: (x + TABLE[:ROWS]) @ w + b,
    "array": lambda w, b, x, mb: jnp.sin(x @ (w + ARRAY)) + b,
    "noise": lambda w, b, x, mb: x @ w + b + mb.training * 0.1 * jax.random.normal(mb.key, x.shape),
    "dropout": lambda w, b, x, mb: x @ w + b + (dropped(x, mb.key) if mb.training else x),
    "key as residual": lambda w, b, x, mb: noisy(x @ w, mb.key) + b,
    "key of data": lambda w, b, x, mb: noisy(x @ w + b, jax.random.key(mb.fields["ids"][0])),
    "straight through": lambda w, b, x, mb: straight_through(3 * (x @ w)) / 3 + b,
    "expm": lambda w, b, x, mb: x @ jax.scipy.linalg.expm(w / 3) + b,
    "whole numbers": lambda w, b, x, mb: jnp.tanh(x @ w + b) + jax.nn.one_hot(mb.fields["ids"], WIDTH),
    "norm": lambda w, b, x, mb: normalised(x) * b + x @ w,
    "bfloat16": lambda w, b, x, mb: narrow(w, b, x),
    "softplus": lambda w, b, x, mb: jax.nn.softplus(x @ w) + jnp.logaddexp(x, b),
    "scan": lambda w, b, x, mb: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) + b, None), x, length=2)[0],
    "cond": lambda w, b, x, mb: jax.lax.cond(x.sum() > 0, lambda x: x @ w + b, lambda x: x - b, x),
    "sort": lambda w, b, x, mb: jnp.sort(x @ w, -1) + b,
    "solve": lambda w, b, x, mb: jnp.linalg.solve(w @ w.T + 3 * jnp.eye(WIDTH), x.T).T + b,
    "grad": lambda w, b, x, mb: jax.grad(lambda x: (jnp.sin(x @ w) @ b).sum())(x) + x,
}

# How parameters are held, and what wraps the body: a layer of a body and of how carries are packed.


def matrix(key, shape):
    return jax.random.normal(key, shape) / WIDTH**0.5


def vector(key, shape):
    return 0.5 + 0.1 * jax.random.normal(key, shape)


def of_function(wrapped):
    def make(body, carries):
        def init(key):
            return {"w": matrix(key, (WIDTH, WIDTH)), "b": vector(key, (WIDTH,))}

        def apply(params, carry, mb):
            def inner(params, x, fields, key):
                return body(params["w"], params["b"], x, Seen(fields, key, mb.training))

            seen = Seen.of(mb)
            return carries.pack(wrapped(inner)(params, carries.unpack(carry, mb), seen.fields, seen.key))

        return rrfp.layer(apply, init=init)

    return make


def with_a_rule(function):
    """Behind a derivative of its own, which is that of JAX."""
    ruled = jax.custom_vjp(function)
    ruled.defvjp(
        lambda params, x, *rest: jax.vjp(lambda p, x: function(p, x, *rest), params, x),
        lambda pulled, g: (*pulled(g), None, None),
    )
    return ruled


def in_a_branch(function):
    return lambda *args: jax.lax.cond(args[1].sum() < 1e9, function, lambda p, x, *rest: 0 * x, *args)


def in_nnx(wrapped, inside=False):
    """A module whose method is wrapped; or one that holds such a module."""

    def make(body, carries):
        class Block(nnx.Module):
            def __init__(self, *, rngs):
                self.w = nnx.Param(matrix(rngs.params(), (WIDTH, WIDTH)))
                self.b = nnx.Param(vector(rngs.params(), (WIDTH,)))
                self.name = "block"

            def inner(self, x, fields, key, training):
                return body(self.w[...], self.b[...], x, Seen(fields, key, training))

            def __call__(self, carry, mb):
                seen = Seen.of(mb)

                def run(block, x, fields, key):
                    return block.inner(x, fields, key, mb.training)

                x = carries.unpack(carry, mb)
                return carries.pack(wrapped(run)(self, x, seen.fields, seen.key))

        class Holder(nnx.Module):
            def __init__(self, *, rngs):
                self.blocks = nnx.List([Block(rngs=rngs)])

            def __call__(self, carry, mb):
                return self.blocks[0](carry, mb)

        return rrfp.layer(Holder if inside else Block)

    return make


def nnx_cond(function):
    return lambda block, x, fields, key: nnx.cond(
        x.sum() < 1e9, function, lambda block, x, fields, key: 0 * x, block, x, fields, key
    )


def nnx_scanned(body, carries):
    """Two blocks in a row, whose parameters are stacked."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(matrix(rngs.params(), (WIDTH, WIDTH)))
            self.b = nnx.Param(vector(rngs.params(), (WIDTH,)))

    class Stack(nnx.Module):
        def __init__(self, *, rngs):
            self.blocks = nnx.vmap(Block)(rngs.fork(split=2))

        def __call__(self, carry, mb):
            seen = Seen.of(mb)

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, block):
                return body(block.w[...], block.b[...], x, seen)

            return carries.pack(run(carries.unpack(carry, mb), self.blocks))

    return rrfp.layer(Stack)


def in_linen(wrapped, inside=False):
    def make(body, carries):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, fields, key):
                w = self.param("w", matrix, (WIDTH, WIDTH))
                b = self.param("b", vector, (WIDTH,))
                return body(w, b, x, Seen(fields, key, True))

        class Evaluating(Block):
            @nn.compact
            def __call__(self, x, fields, key):
                w = self.param("w", matrix, (WIDTH, WIDTH))
                b = self.param("b", vector, (WIDTH,))
                return body(w, b, x, Seen(fields, key, False))

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, carry, mb):
                seen = Seen.of(mb)
                kind = wrapped(Block if mb.training else Evaluating)
                return carries.pack(kind(name="block")(carries.unpack(carry, mb), seen.fields, seen.key))

        class Holder(nn.Module):
            @nn.compact
            def __call__(self, carry, mb):
                return Layer(name="layer")(carry, mb)

        return rrfp.layer(Holder if inside else Layer)

    return make


def linen_scanned(body, carries):
    class Block(nn.Module):
        training: bool

        @nn.compact
        def __call__(self, x, fields, key):
            w = self.param("w", matrix, (WIDTH, WIDTH))
            b = self.param("b", vector, (WIDTH,))
            return body(w, b, x, Seen(fields, key, self.training)), None

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, carry, mb):
            seen = Seen.of(mb)
            scanned = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=2,
            )
            x, _ = scanned(mb.training, name="block")(carries.unpack(carry, mb), seen.fields, seen.key)
            return carries.pack(x)

    return rrfp.layer(Layer)


FRAMES = {  # and the path of its parameters in the layer
    "function": (of_function(lambda f: f), ""),
    "function, jit": (of_function(jax.jit), ""),
    "function, checkpoint": (of_function(jax.checkpoint), ""),
    "function, checkpoint in jit": (of_function(lambda f: jax.jit(jax.checkpoint(f))), ""),
    "function, custom_vjp": (of_function(with_a_rule), ""),
    "function, cond": (of_function(in_a_branch), ""),
    "NNX": (in_nnx(lambda f: f), ""),
    "NNX, inside": (in_nnx(lambda f: f, inside=True), "blocks.0."),
    "NNX, jit": (in_nnx(nnx.jit), ""),
    "NNX, remat": (in_nnx(nnx.remat), ""),
    "NNX, remat inside": (in_nnx(nnx.remat, inside=True), "blocks.0."),
    "NNX, jit of remat": (in_nnx(lambda f: nnx.jit(nnx.remat(f))), ""),
    "NNX, cond": (in_nnx(nnx_cond), ""),
    "NNX, scan": (nnx_scanned, "blocks."),
    "Linen": (in_linen(lambda kind: kind), "block."),
    "Linen, inside": (in_linen(lambda kind: kind, inside=True), "layer.block."),
    "Linen, jit": (in_linen(nn.jit), "block."),
    "Linen, remat": (in_linen(nn.remat), "block."),
    "Linen, remat of jit": (in_linen(lambda kind: nn.remat(nn.jit(kind))), "block."),
    "Linen, scan": (linen_scanned, "block."),
}

ALONE = {"function, custom_vjp": ("key as residual", "key of data", "noise", "dropout", "attention")}
"""Bodies that a frame cannot have: closures of what it is given."""


@dataclasses.dataclass(frozen=True)
class Carries:
    """How a layer sends x, and what it makes of what arrives."""

    pack: Callable[[Any], Any]
    unpack_some: Callable[[Any], Any]

    def unpack(self, carry, mb):
        return mb["x"] if carry is None else self.unpack_some(carry)


def beside(x):
    return {"x": x, "ids": x.argmax(-1), "large": x > 0, "mask": jnp.where(x > 0, 0.0, -1.0), "n": 2.5}


def biased(carry):
    """With a weakly typed mask, in the dtype of x."""
    x = jnp.logaddexp(carry["x"], carry["mask"])
    assert x.dtype == carry["x"].dtype
    return x.astype(jnp.float32)


CARRIES = {
    "x": Carries(lambda x: x, lambda carry: carry),
    "a tuple": Carries(lambda x: (x, (x.sum(), x[:0])), lambda carry: carry[0] + 0.1 * carry[1][0]),
    "integers beside": Carries(
        beside, lambda c: jnp.where(c["large"], c["x"], c["n"] * c["x"]) + 0.1 * c["ids"][:, None]
    ),
    "weak types": Carries(beside, biased),
    "weak types beside bfloat16": Carries(lambda x: beside(x.astype(jnp.bfloat16)), biased),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and what tells it from others.

    Attributes:
        number: draws it.
        layers: a body and a frame for each.
        carry: how they send.
        frozen: whether the first layer is.
        tied: names of an owner and its alias, or none.
        remat: of the Trainer.
    """

    number: int
    layers: Any
    carry: str
    frozen: bool
    tied: Any
    remat: str

    @property
    def tolerance(self):
        narrow = self.carry.endswith("bfloat16") or any(body == "bfloat16" for body, _ in self.layers)
        return 0.05 if narrow else 2e-4

    def pipeline(self):
        layers = [FRAMES[frame][0](BODIES[body], CARRIES[self.carry]) for body, frame in self.layers]
        return rrfp.Pipeline(
            layers,
            self.loss,
            frozen=["0.*"] if self.frozen else (),
            tied=dict([self.tied]) if self.tied else None,
            additive=False,
        )

    def loss(self, carry, mb):
        error = CARRIES[self.carry].unpack(carry, mb) - mb["y"]
        return rrfp.Loss((error**2).sum(), error.shape[0], {"largest": rrfp.Max(jnp.abs(error).max())})

    def expected(self, params, batch, training=True):
        """The mean loss of a step in plain JAX, and its gradient by path; tied ones have their sum."""
        paths, leaves, _ = plain.flat(params)
        owner = {path: path for path in paths}
        if self.tied:
            owner[self.tied[1]] = self.tied[0]
        known = dict(zip(paths, leaves, strict=True))
        trained = {p: known[p] for p in paths if owner[p] == p and not (self.frozen and p.startswith("0."))}

        def mean(trained):
            values = {path: {**known, **trained}[owner[path]] for path in paths}
            total = weight = 0
            for j, fields in enumerate(batch):
                carry = None
                for i, (body, frame) in enumerate(self.layers):
                    view = plain.View(fields, 0, j, i)
                    view.training = training
                    carries, (_, prefix) = CARRIES[self.carry], FRAMES[frame]
                    w, b = (values[f"{i}.{prefix}{name}"] for name in "wb")
                    x, seen = carries.unpack(carry, view), Seen.of(view)
                    for n in range(2) if w.ndim == 3 else [...]:
                        x = BODIES[body](w[n], b[n], x, seen)
                    carry = carries.pack(x)
                own = self.loss(carry, plain.View(fields, 0, j, LAYERS))
                total, weight = total + own.total, weight + own.weight
            return total / weight

        return jax.jit(jax.value_and_grad(mean))(trained)


def model(number):
    """The model of a number. The first ones have each frame with many bodies, in turn."""
    draw = random.Random(number)
    frames, bodies = sorted(FRAMES), sorted(BODIES)
    layers = []
    for i in range(LAYERS):
        frame = frames[number % len(frames)] if i == 1 else draw.choice(frames)
        possible = [body for body in bodies if body not in ALONE.get(frame, ())]
        body = possible[(number // len(frames)) % len(possible)] if i == 1 else draw.choice(possible)
        layers.append((body, frame))
    tied = None
    if layers[2][1] != layers[3][1] and draw.random() < 0.3:
        owner, alias = (f"{i}.{FRAMES[layers[i][1]][1]}w" for i in (2, 3))
        tied = None if "scan" in layers[2][1] + layers[3][1] else (owner, alias)
    return Model(
        number=number,
        layers=tuple(layers),
        carry=draw.choice(sorted(CARRIES)),
        frozen=draw.random() < 0.2,
        tied=tied,
        remat=draw.choice(["none", "none", "full", "dots_saveable"]),
    )


def batch(count=2):
    more = {
        "mask": lambda draw: (draw.random(ROWS) + np.eye(1, ROWS)[0] > 0.5).astype(np.float32),
        "ids": lambda draw: draw.integers(0, WIDTH, ROWS).astype(np.int32),
    }
    return rows(count, **more)
