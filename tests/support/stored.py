"""Checkpoints of a small model: its leaves by stage, saved to the end, also in the first form."""

import errno
import json
import os
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.checkpoint.format import RunState, read_leaf
from rrfp_jax.checkpoint.leaves import Parts, file_of, folder_name, keyed, name_of

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


def whole(array):
    """An array in one part."""
    return Parts(array.shape, array.dtype, array.shape, {(0,) * array.ndim: array})


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


ALL = range(LAYERS)


def save(checkpoints, step, own=None, **state):
    checkpoints.save(RunState(step=step, **state), leaves(ALL, step) if own is None else own)
    checkpoints.copied()
    checkpoints.advance(to_the_end=True)


def full_for(name, write):
    """A `write_leaf` that finds no room for a leaf."""

    def full(folder, key, *given):
        if name_of(key) == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / name / "0.0"))
        return write(folder, key, *given)

    return full


def specs_of(leaves):
    return {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in leaves}


def rewrite(folder, step):
    """Give the checkpoint of a step the first form: zarr 2, each array in one file."""
    checkpoint = folder / str(step)
    content = json.loads((checkpoint / "rrfp.json").read_text())["content"]
    for name, leaf in CheckpointFolder(folder).open(step)[1].items():
        array = np.asarray(read_leaf(checkpoint, leaf))
        place = checkpoint / folder_name(name)
        shutil.rmtree(place)
        place.mkdir()
        files = {".zarray": json.dumps(_header(array)).encode()}
        if array.size:
            files[file_of((0,) * array.ndim)] = array.tobytes()
        written = {}
        for file, data in files.items():
            (place / file).write_bytes(data)
            written[f"{folder_name(name)}/{file}"] = [len(data), zlib.crc32(data)]
        del content["leaves"][name]["piece"]
        content["leaves"][name]["files"] = written
    sealed = {"crc32": zlib.crc32(json.dumps(content).encode()), "content": content}
    (checkpoint / "rrfp.json").write_text(json.dumps(sealed))


def _header(array):
    return {
        "chunks": [max(1, n) for n in array.shape],
        "compressor": None,
        "dimension_separator": ".",
        "dtype": array.dtype.name if array.dtype.kind == "V" else array.dtype.str,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(array.shape),
        "zarr_format": 2,
    }
