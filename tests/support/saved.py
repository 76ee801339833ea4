"""Checkpoints of the small model in `stored.py`, saved to the end."""

import errno
import os

import jax

from rrfp_jax.checkpoint.format import RunState
from rrfp_jax.checkpoint.leaves import name_of
from tests.support import stored

ALL = range(stored.LAYERS)


def save(checkpoints, step, leaves=None, **state):
    leaves = stored.leaves(ALL, step) if leaves is None else leaves
    checkpoints.save(RunState(step=step, **state), leaves)
    checkpoints.copied()
    checkpoints.advance(to_the_end=True)


def full_for(name, write):
    """A `write_leaf` that finds no room for a leaf."""

    def full(folder, key, *given):
        if name_of(key) == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / name / "0.0"))
        return write(folder, key, *given)

    return full


def specs(leaves):
    return {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in leaves}
