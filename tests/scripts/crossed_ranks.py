"""A rank of stages that share devices, and of whose replicas others are on the other rank; prints losses."""

import jax
import numpy as np
import optax

import rrfp_jax as rrfp


def data(step):
    draw = np.random.default_rng(step)
    return [{"x": draw.normal(size=(2, 8)).astype(np.float32)} for _ in range(8)]


def trainer(mesh):
    layers = [
        rrfp.layer(lambda _, mb: mb["x"]),
        rrfp.layer(
            lambda params, x, mb: x + jax.nn.gelu(x @ params["w"]),
            init=lambda key: {"w": jax.random.normal(key, (8, 8)) / 8},
            repeat=3,
        ),
    ]
    pipe = rrfp.Pipeline(layers, lambda x, mb: rrfp.Loss((x**2).sum(), weight=x.size))
    return rrfp.Trainer(pipe, optax.adam(3e-3), data=data, mesh=mesh)


def main():
    """Two steps."""
    own = trainer(rrfp.Mesh(pp=3, dp=2, share_devices=True))
    losses = [report.loss for report in own.steps(2)]
    if own.is_main:
        print(f"losses {losses}", flush=True)


if __name__ == "__main__":
    main()
