"""Modules of flax at random: what they keep, within the transforms of flax that call them, and plain flax."""

import dataclasses
import functools
import itertools
import random
import zlib
from collections.abc import Sequence
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rrfp_jax as rrfp
from tests.odd_models.odd import ROWS, WIDTH, Odd, rows, squares

TABLE = np.linspace(-1, 1, WIDTH, dtype=np.float32)


class Of(nnx.Module):
    """A module of parts that a function makes, called by another function."""

    def __init__(self, make, use, *, rngs):
        self.parts = nnx.Dict(make(rngs))
        self.use = use

    def __call__(self, x):
        return self.use(self.parts, x)


def linear(rngs):
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs)


def stacked(rngs):
    return nnx.vmap(linear)(rngs.fork(split=2)) if hasattr(rngs, "fork") else linear(rngs)


def through(p, x):
    return nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
        x, p["a"]
    )


def shared(rngs):
    one = linear(rngs)
    return {"a": one, "b": one}


NNX_KEEPS = {  # what the parts of a module are, and how they are called
    "linear": (lambda r: {"a": linear(r)}, lambda p, x: jnp.tanh(p["a"](x))),
    "shared": (shared, lambda p, x: p["b"](jnp.tanh(p["a"](x)))),
    "list": (
        lambda r: {"a": nnx.List([linear(r) for _ in range(2)])},
        lambda p, x: p["a"][1](jnp.tanh(p["a"][0](x))),
    ),
    "sequential": (lambda r: {"a": nnx.Sequential(linear(r), jnp.tanh, linear(r))}, lambda p, x: p["a"](x)),
    "NumPy table": (lambda r: {"a": linear(r), "t": TABLE.copy()}, lambda p, x: p["a"](x) * p["t"]),
    "table": (
        lambda r: {"a": linear(r), "t": nnx.data(jnp.ones(WIDTH) * 2)},
        lambda p, x: p["a"](x) * p["t"],
    ),
    "whole numbers": (lambda r: {"a": linear(r), "t": jnp.arange(WIDTH)}, lambda p, x: p["a"](x) + p["t"]),
    "variable": (
        lambda r: {"a": linear(r), "t": nnx.Variable(jnp.arange(WIDTH) / 2)},
        lambda p, x: p["a"](x) * p["t"][...],
    ),
    "statistics": (
        lambda r: {"a": linear(r), "n": nnx.BatchNorm(WIDTH, use_running_average=True, rngs=r)},
        lambda p, x: p["n"](p["a"](x)),
    ),
    "norm": (lambda r: {"n": nnx.LayerNorm(WIDTH, rngs=r), "a": linear(r)}, lambda p, x: p["a"](p["n"](x))),
    "dropout": (
        lambda r: {"a": linear(r), "d": nnx.Dropout(0.5, rngs=r), "e": nnx.Dropout(0.5, rngs=r)},
        lambda p, x: p["e"](p["a"](p["d"](x))),
    ),
    "streams": (
        lambda r: {"a": linear(r), "r": r},
        lambda p, x: p["a"](x) + jax.random.normal(p["r"].noise(), x.shape) + p["r"].uniform(x.shape),
    ),
    "key": (
        lambda r: {"a": linear(r), "k": nnx.Variable(r.params())},
        lambda p, x: p["a"](x) + jax.random.normal(p["k"][...], x.shape),
    ),
    "lora": (
        lambda r: {"a": nnx.LoRA(WIDTH, 2, WIDTH, base_module=linear(r), rngs=r)},
        lambda p, x: p["a"](x),
    ),
    "recurrent": (
        lambda r: {"a": nnx.RNN(nnx.SimpleCell(WIDTH, WIDTH, rngs=r))},
        lambda p, x: p["a"](x[..., None, :])[..., 0, :],
    ),
    "layers in a scan": (lambda r: {"a": stacked(r)}, through),
}


def scanned(f):
    def step(x, m):
        return f(m, x)

    return lambda m, x: nnx.scan(step, in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2)(x, m)


def functional(f):
    def call(m, x):
        graph, state = nnx.split(m)
        return jax.checkpoint(lambda state, x: f(nnx.merge(graph, state), x))(state, x)

    return call


def looked_at(f):
    def call(m, x):
        nnx.while_loop(lambda c: c[1] < 2, lambda c: (c[0], c[1] + 1), (m, 0))
        return f(m, x)

    return call


ROWWISE = nnx.StateAxes({nnx.RngState: 0, ...: None})

NNX_WITHIN = {
    "nothing": lambda f: f,
    "remat": nnx.remat,
    "remat with a policy": lambda f: nnx.remat(f, policy=jax.checkpoint_policies.dots_saveable),
    "jit": nnx.jit,
    "vmap": lambda f: nnx.vmap(f, in_axes=(None, 0)),
    "split_rngs": lambda f: nnx.split_rngs(splits=ROWS)(nnx.vmap(f, in_axes=(ROWWISE, 0))),
    "scan": scanned,
    "fori_loop": lambda f: lambda m, x: nnx.fori_loop(0, 2, lambda i, c: (c[0], f(*c)), (m, x))[1],
    "while_loop": looked_at,
    "cond": lambda f: lambda m, x: nnx.cond(x.sum() > 0, f, lambda m, x: f(m, x) / 2, m, x),
    "switch": lambda f: lambda m, x: nnx.switch(1, [lambda m, x: x, f], m, x),
    "grad": lambda f: lambda m, x: nnx.grad(lambda x, m: jnp.sin(f(m, x)).sum())(x, m),
    "split and merge": functional,
}


class Within(nnx.Module):
    """A module that is called within transforms."""

    def __init__(self, keeps, within, *, rngs):
        self.inner = Of(*NNX_KEEPS[keeps], rngs=rngs)
        self.within = within

    def __call__(self, x):
        f = lambda m, x: m(x)  # noqa: E731
        for name in reversed(self.within):
            f = NNX_WITHIN[name](f)
        return x + f(self.inner, x) / 2


def plain_nnx(keeps, within):
    """The layer in plain flax; each random stream has the key that docs/models.md says."""

    def apply(params, x, mb):
        module = Within(keeps, within, rngs=nnx.Rngs(0))
        state = nnx.state(module, nnx.RngState)
        leaves, structure = jax.tree.flatten(state)
        stream = itertools.count()
        keys = [
            jax.random.fold_in(mb.key, 2 * next(stream) + 1)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jnp.zeros_like(leaf)
            for leaf in leaves
        ]
        nnx.update(module, jax.tree.unflatten(structure, keys))
        if keeps == "key":  # which is kept as numbers
            params = jax.tree.map(
                lambda a: jax.random.wrap_key_data(a) if a.dtype == jnp.uint32 else a, params
            )
        # A NumPy table of an `nnx.Dict` is no part of flax's state: the module has it anyway.
        known = {path for path, _ in nnx.to_flat_state(nnx.state(module))}
        given = [(path, leaf) for path, leaf in nnx.to_flat_state(nnx.State(params)) if path in known]
        nnx.update(module, nnx.from_flat_state(given))
        return module(x)

    return apply


class LinenOf(linen.Module):
    """A module whose call is a function."""

    use: object

    @linen.compact
    def __call__(self, x):
        return self.use(self, x)


def constant(m, x):
    return m.variable("constants", "t", lambda: jnp.arange(WIDTH) / 2).value * linen.Dense(WIDTH)(x)


def sown(m, x):
    m.sow("losses", "total", x.sum())
    m.sow("intermediates", "x", x)
    return linen.Dense(WIDTH)(x)


def twice(m, x):
    dense = linen.Dense(WIDTH)
    return dense(jnp.tanh(dense(x)))


LINEN_KEEPS = {
    "dense": lambda m, x: jnp.tanh(linen.Dense(WIDTH)(x)),
    "shared": twice,
    "NumPy table": lambda m, x: linen.Dense(WIDTH)(x) * TABLE,
    "constants": constant,
    "statistics": lambda m, x: linen.BatchNorm(use_running_average=True)(linen.Dense(WIDTH)(x)),
    "dropout": lambda m, x: linen.Dropout(0.5, deterministic=False)(linen.Dense(WIDTH)(x)),
    "stream": lambda m, x: linen.Dense(WIDTH)(x) + jax.random.normal(m.make_rng("noise"), x.shape),
    "stream if there is one": lambda m, x: (
        linen.Dense(WIDTH)(x) + (jax.random.normal(m.make_rng("noise"), x.shape) if m.has_rng("noise") else 0)
    ),
    "two streams": lambda m, x: (
        linen.Dense(WIDTH)(x)
        + jax.random.normal(m.make_rng("noise"), x.shape)
        + jax.random.normal(m.make_rng("other"), x.shape)
    ),
    "weight norm": lambda m, x: linen.WeightNorm(linen.Dense(WIDTH))(x),
    "spectral norm": lambda m, x: linen.SpectralNorm(linen.Dense(WIDTH))(x, update_stats=False),
    "sown": sown,
    "slash": lambda m, x: x @ m.param("a/b", linen.initializers.normal(), (WIDTH, WIDTH)),
    "norm": lambda m, x: linen.Dense(WIDTH)(linen.LayerNorm()(x)),
    "recurrent": lambda m, x: linen.RNN(linen.SimpleCell(WIDTH))(x[..., None, :])[..., 0, :],
    "dense of any shape": lambda m, x: linen.DenseGeneral(WIDTH)(x),
}

STREAMS = {"params": True, "dropout": True, "noise": True, "other": True}
BROADCAST = ("params", "constants", "batch_stats")


def linen_scan(f):
    def step(m, x, _):
        return f(m, x), None

    lifted = linen.scan(step, variable_broadcast=BROADCAST, split_rngs={**STREAMS, "params": False}, length=2)
    return lambda m, x: lifted(m, x, None)[0]


def linen_layers(f):
    def step(m, x, _):
        return f(m, x), None

    axes = dict.fromkeys(BROADCAST, 0)
    lifted = linen.scan(step, variable_axes=axes, split_rngs=STREAMS, length=2)
    return lambda m, x: lifted(m, x, None)[0]


LINEN_WITHIN = {
    "nothing": lambda f: f,
    "remat": linen.remat,
    "jit": linen.jit,
    "vmap": lambda f: linen.vmap(
        f, in_axes=0, variable_axes=dict.fromkeys(BROADCAST), split_rngs={**STREAMS, "params": False}
    ),
    "scan": linen_scan,
    "scan of layers": linen_layers,
    "cond": lambda f: lambda m, x: linen.cond(x.sum() > 0, f, lambda m, x: f(m, x) / 2, m, x),
    "switch": lambda f: lambda m, x: linen.switch(0, [f, lambda m, x: f(m, x) / 2], m, x),
    "map_variables": lambda f: linen.map_variables(
        f, "params", lambda v: jax.tree.map(lambda a: 2 * a, v), lambda v: v, init=True
    ),
    "fold_rngs": lambda f: linen.fold_rngs(f) if hasattr(linen, "fold_rngs") else f,
}


class LinenWithin(linen.Module):
    """A module that is called within transforms."""

    keeps: str
    within: tuple

    @linen.compact
    def __call__(self, x):
        f = lambda m, x: m(x)  # noqa: E731
        for name in reversed(self.within):
            f = LINEN_WITHIN[name](f)
        return x + f(LinenOf(LINEN_KEEPS[self.keeps], name="inner"), x) / 2


def plain_linen(keeps, within):
    """The layer in plain flax; each random stream has the key that docs/models.md says."""

    def apply(params, x, mb):
        variables = {"params": {k: v for k, v in params.items() if not k.startswith("@")}}
        variables |= {k[1:]: v for k, v in params.items() if k.startswith("@")}
        rngs = {"params": mb.key, "dropout": mb.key}
        rngs |= {name: jax.random.fold_in(mb.key, zlib.crc32(name.encode())) for name in ("noise", "other")}
        return LinenWithin(keeps, within).apply(variables, x, rngs=rngs)

    return apply


def trained_names(kind, keeps, within):
    """What plain flax would train; None for whatever is in Linen's collection of that name."""
    if kind == "linen":
        return None
    module = Within(keeps, within, rngs=nnx.Rngs(0))
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}


KINDS = {"nnx": (NNX_KEEPS, NNX_WITHIN), "linen": (LINEN_KEEPS, LINEN_WITHIN)}


def called(module, x, mb):
    return module(x)


def enter(params, carry, mb):
    return mb["x"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Modules(Odd):
    """A model of such layers.

    Attributes:
        drawn: of each layer kind, what it keeps, within what it is called.
    """

    drawn: Sequence[Any]

    @classmethod
    def of(cls, drawn, **more):
        plain = {"nnx": plain_nnx, "linen": plain_linen}
        layers = [(None, enter), *((None, plain[kind](*how)) for kind, *how in drawn)]
        return cls(layers=layers, loss=squares, batch=rows(), drawn=drawn, **more)

    def pipeline(self):
        classes = {"nnx": Within, "linen": LinenWithin}
        layers = [rrfp.layer(classes[kind], *how, call=called) for kind, *how in self.drawn]
        return rrfp.Pipeline([rrfp.layer(lambda carry, mb: mb["x"]), *layers], self.loss)

    @functools.cached_property
    def trained(self):
        return [trained_names(*one) for one in self.drawn]

    def is_frozen(self, path):
        layer, _, name = path.partition(".")
        names = self.trained[int(layer) - 1]
        return name.startswith("@") if names is None else name not in names


def flax_can(within):
    """Whether flax itself can: what is in a vmap has no choice by its values, nor another vmap."""
    mapped = [name for name in within if name in ("vmap", "split_rngs", "scan")]
    inside = within[within.index(mapped[0]) + 1 :] if mapped else ()
    return not {*inside} & {"cond", "switch", "vmap", "split_rngs"}


def model(number):
    """One whose layers are drawn at random, two of them alike."""
    draw = random.Random(number)
    drawn = []
    for _ in range(2):
        kind = draw.choice(sorted(KINDS))
        keeps, within = (sorted(names) for names in KINDS[kind])
        depth, how = draw.choice((1, 1, 2, 3)), ["vmap"] * 2
        while not flax_can(how):
            how = draw.sample(within, depth)
        drawn.append((kind, draw.choice(keeps), tuple(how)))
    return Modules.of([drawn[0], *drawn])
