"""Parameters and optimizer state of a small model, by stage, for tests of checkpoints."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.checkpoint.leaves import keyed

LAYERS = 4
KINDS = [
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "int4",
    "uint4",
    "int64",
    "uint32",
    "bool",
    "complex64",
]
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 100)),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda a: a.ndim > 1, p)),
        optax.sgd(1e-2, momentum=0.9),
    ),
    "two": lambda: optax.multi_transform(
        {"matrix": optax.adafactor(1e-2, min_dim_size_to_factor=4), "rest": optax.adam(1e-2)},
        lambda p: jax.tree.map(lambda a: "matrix" if a.ndim == 2 else "rest", p),
    ),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.lion(1e-3)),
}


def specs(layers, optimizer="adamw"):
    """Parameters and optimizer state of a stage: matrices, vectors in bfloat16, scalars, and empty arrays."""
    params = {
        str(i): {
            "up": jax.ShapeDtypeStruct((8, 5), jnp.float32),
            "norm": {"scale": jax.ShapeDtypeStruct((5,), jnp.bfloat16)},
            "gate": jax.ShapeDtypeStruct((), jnp.float32),
            "none": jax.ShapeDtypeStruct((0, 3), jnp.float32),
        }
        for i in layers
    }
    return {"params": params, "optimizer": jax.eval_shape(OPTIMIZERS[optimizer]().init, params)}


def leaves(layers, step, optimizer="adamw"):
    """Their leaves with keys; values follow from the key and the step. Nothing is compiled for it."""
    return [(key, _values(key, step, spec)) for key, spec in keyed(specs(layers, optimizer))]


def _values(key, step, spec):
    random = np.random.default_rng([zlib.crc32(repr(key).encode()), step])
    return jax.device_put((100 * random.random(spec.shape)).astype(spec.dtype))
