"""Checkpoints of the small model in `stored.py`, saved to the end."""

import jax

from rrfp_jax.checkpoint.manifest import RunState
from tests.support import stored

ALL = range(stored.LAYERS)


def save(checkpoints, step, leaves=None, **state):
    leaves = stored.leaves(ALL, step) if leaves is None else leaves
    checkpoints.save(RunState(step=step, **state), leaves)
    checkpoints.copied()
    checkpoints.advance(to_the_end=True)


def specs(leaves):
    return {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in leaves}
