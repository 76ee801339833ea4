"""How models of each framework are run whole, as their authors' documentation does it."""

import jax
import numpy as np
from flax import linen, nnx

from tests.other_models.held import Batch, Whole, shaken


def nnx_whole(make, output, parts):
    """An NNX model, made by `make(rngs)`; `output(model, mb)` calls it."""
    with nnx.use_eager_sharding(False):  # there is no mesh
        graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)

    def run(params, mb):
        model = nnx.merge(graph, params, rest)
        model.train() if mb.training else model.eval()
        return output(model, mb)

    def by_layer(params):
        model = nnx.merge(graph, params, rest)
        return [nnx.to_pure_dict(nnx.state(part, nnx.Param)) for part in parts(model)]

    return Whole(params=shaken(params), output=run, parts=by_layer)


def linen_whole(module, data, output, parts):
    """A Linen module; `output(module, mb)` calls it once it is bound to its variables."""
    key = jax.random.key(0)
    example = Batch(data(np.random.default_rng(0)), key, training=False)
    params = linen.init(output, module)(key, example)["params"]

    def run(params, mb):
        return linen.apply(output, module)({"params": params}, mb, rngs={"dropout": mb.key})

    return Whole(params=shaken(params), output=run, parts=parts)


def equinox_whole(make, output, parts):
    """An Equinox model, made by `make(key)`; `output(model, mb)` calls it."""
    import equinox as eqx

    params, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)

    def by_layer(params):
        return [eqx.filter(part, eqx.is_inexact_array) for part in parts(eqx.combine(params, static))]

    def run(params, mb):
        return output(eqx.combine(params, static), mb)

    return Whole(params=shaken(params), output=run, parts=by_layer)
