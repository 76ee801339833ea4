"""What tests of refusals share: a batch, one trainer for all of them, and what a refusal looks like."""

from contextlib import contextmanager

import jax
import numpy as np
import pytest

import rrfp_jax as rrfp
from tests.support import toy

BATCH = [
    {name: array.astype(np.float32 if name == "mask" else np.int32) for name, array in mb.items()}
    for mb in toy.microbatches(3)
]


def make(stages=2, **kwargs):
    return toy.trainer(stages, **{"data": BATCH, **kwargs})


@contextmanager
def refused(*said, error=rrfp.UsageError):
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    for text in said:
        assert text in message
    assert "\n" not in message


def copied(trainer):
    return jax.device_get((trainer.stage_params, [own.tree for own in trainer._engine.optimizers]))


def same(trainer, before):
    pairs = zip(jax.tree.leaves(copied(trainer)), jax.tree.leaves(before), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)
