"""Injected delays on real devices: what they delay, and what they must not."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.runtime.driver.delays import Delays

LATE = 0.3


def trainer(**delays):
    """Two stages whose tasks take some 10 ms."""

    def layer(weight, carry, mb):
        x = mb["x"] if carry is None else carry
        for _ in range(8):
            x = jnp.tanh(x @ weight)
        return x

    layers = [rrfp.layer(layer, init=lambda key: jnp.eye(256), repeat=2)]
    pipe = rrfp.Pipeline(layers, lambda x, mb: rrfp.Loss(x.sum(), weight=x.shape[0]))
    data = [{"x": np.full((256, 256), 0.1, np.float32)} for _ in range(4)]
    return rrfp.Trainer(
        pipe, optax.sgd(1e-3), data=data, mesh=rrfp.Mesh(pp=2), schedule="gpipe", delays=Delays(**delays)
    )


@pytest.fixture(scope="module")
def late():
    """The second step of a run in which every arrival is noticed late."""
    return list(trainer(late_readiness=LATE).steps(2))[1].trace


def test_arrivals_are_noticed_late(late):
    sent = {r.task.microbatch: r.end for r in late.stage_records(0) if r.task.kind == 0}
    noticed = {r.task.microbatch: r.ready for r in late.stage_records(1) if r.task.kind == 0}
    assert all(noticed[j] - sent[j] >= LATE for j in sent)


def test_ends_are_noticed_in_time_while_arrivals_are_held(late):
    assert max(r.end - r.start for r in late.records) < LATE / 2


def test_jitter_keeps_the_device_busy_and_changes_no_number():
    plain, jittered = trainer(), trainer(jitter="J3", seed=1)
    assert [r.loss for r in plain.steps(2)] == [r.loss for r in jittered.steps(2)]
    trace = next(iter(jittered.steps(1))).trace
    for stage in range(2):
        records = trace.stage_records(stage)
        assert all(b.start >= a.end for a, b in itertools.pairwise(records))
    assert max(r.end - r.start for r in trace.records) > 0.011  # 0.5 x 1.5 x 15 ms at least, where it hits


@pytest.mark.parametrize("wrong", [{"jitter": "J4"}, {"link_delay": -1.0}, {"late_readiness": float("nan")}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(rrfp.UsageError, match=next(iter(wrong))):
        Delays(**wrong)
