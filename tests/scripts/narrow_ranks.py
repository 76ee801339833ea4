"""A run whose stages send whole numbers of 4 bits and less; prints its losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp

NARROW = ("int4", "uint4", "int2", "uint2")


def init(key):
    return {"w": jax.random.normal(key, (4, 4))}


def first(params, _, mb):
    x = jnp.tanh(mb["x"] @ params["w"])
    return {"x": x, "narrow": [(2 * jnp.abs(x)).astype(name) for name in NARROW]}


def last(params, carry, mb):
    x = carry["x"] @ params["w"]
    for leaf in [*carry["narrow"], *(mb[name] for name in NARROW)]:
        x = x + 0.1 * leaf.astype(jnp.float32)
    return x


def loss(x, mb):
    return rrfp.Loss((x**2).sum(), weight=float(x.shape[0]))


def data(step):
    draw = np.random.default_rng(step)
    numbers = [
        {name: draw.integers(0, 2, (2, 4)).astype(getattr(jnp, name)) for name in NARROW} for _ in range(3)
    ]
    return [{"x": draw.normal(size=(2, 4)).astype(np.float32), **own} for own in numbers]


def main():
    """Three steps."""
    pipe = rrfp.Pipeline([rrfp.layer(first, init=init), rrfp.layer(last, init=init)], loss)
    trainer = rrfp.Trainer(pipe, optax.sgd(0.1), data=data, mesh=rrfp.Mesh(pp=2))
    print("losses", [report.loss for report in trainer.steps(3)], flush=True)


if __name__ == "__main__":
    main()
