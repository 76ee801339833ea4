"""Injected delays on real devices: what they delay, and what they must not."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from benchmarks.paced_queue import paced
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Placement, Task
from rrfp_jax.runtime.engine.device import Running
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.transport.protocol import Arrival, Key
from rrfp_jax.trace.costs import TableCosts, WorkloadCosts, constant

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
    settings = rrfp.Settings(delays=Delays(**delays))
    return rrfp.Trainer(
        pipe, optax.sgd(1e-3), data=data, mesh=rrfp.Mesh(pp=2), schedule="gpipe", settings=settings
    )


@pytest.fixture(scope="module")
def late():
    """The second step of a run in which every arrival is noticed late."""
    return list(trainer(late_readiness=LATE).steps(2))[1].trace


def test_what_was_injected_into_arrivals_is_told(late):
    for record in late.records:
        arrived = (record.stage, record.task.kind) in ((0, BACKWARD), (1, FORWARD))
        assert record.late == pytest.approx(LATE if arrived else 0.0) and record.delayed == 0.0


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
    delays = [record.delayed for record in trace.records if record.delayed]
    assert 0 < len(delays) < len(trace.records) and min(delays) > 0.011  # 0.5 x 1.5 x 15 ms at least
    assert all(record.computed > record.start for record in trace.records)


def test_a_paced_device_tells_what_of_a_task_was_injected():
    costs = WorkloadCosts(constant(2, 20, 0.001), Placement(2))
    tasks = [Running(0, 0, Task(FORWARD, 0, j), 0, None, None, 0.0, 0.0) for j in range(20)]
    with paced(Delays(jitter="J3", seed=1), costs)("device", lambda: None) as queue:
        for running in tasks:
            queue.submit(running)
        ended = queue.ended()  # all, since they are due in the past
    assert ended == tasks
    assert {running.delayed > 0 for running in tasks} == {True, False}
    for running in ended:
        own = costs.duration(0, running.task)
        assert running.end - running.start == pytest.approx(own + running.delayed)


def test_a_transfer_by_the_costs_is_not_injected():
    costs = TableCosts({}, {(0, Task(FORWARD, 0, 0)): 0.25})
    delays = Delays(late_readiness=1.0, link_delay=0.5, link_bandwidth=8.0).arrivals(Placement(2), costs)
    arrival = Arrival(Key(1, 1, Task(FORWARD, 0, 0).input), [jnp.zeros(4, jnp.uint8)], produced=10.0)
    assert delays._release(arrival, now=9.0) == (12.25, 2.0)
    assert delays._release(arrival, now=20.0) == (21.0, 1.0)  # the real transfer took longer than all else


@pytest.mark.parametrize("wrong", [{"jitter": "J4"}, {"link_delay": -1.0}, {"late_readiness": float("nan")}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(rrfp.UsageError, match=next(iter(wrong))):
        Delays(**wrong)
