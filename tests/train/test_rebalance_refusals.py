"""Which `rebalance=` a run cannot have."""

import pytest

import rrfp_jax as rrfp
from tests.support import toy


def test_what_cannot_be_is_refused():
    with pytest.raises(rrfp.UsageError, match="rebalance='always': choose 'off', 'suggest' or 'auto'"):
        toy.trainer(2, rebalance="always")
    with pytest.raises(rrfp.UsageError, match="rebalance='auto' with stages of 1, 2 devices"):
        toy.trainer(2, rebalance="auto", mesh=rrfp.Mesh(pp=2, tp=(1, 2)))
