"""Readiness first, seen from outside: random delays, and the trace they leave."""

import dataclasses
import random
import time
from itertools import pairwise

import chex
import jax
import pytest

from rrfp_jax.core.events import WaitCause
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.tasks import BACKWARD, FORWARD
from rrfp_jax.runtime.transport.protocol import LocalTransport
from rrfp_jax.trace.records import Part
from tests.support import toy
from tests.support.interleave import ReplayError, replay

MICROBATCHES = 12


class DelayedTransport(LocalTransport):
    """Arrivals are held back for random times, so that they come in other orders."""

    def __init__(self, devices, seed, mean=3e-3):
        super().__init__(devices)
        self.random, self.mean, self.held = random.Random(seed), mean, []

    def poll(self):
        now = time.perf_counter()
        self.held += [(now + self.random.expovariate(1 / self.mean), arrival) for arrival in super().poll()]
        due = [arrival for at, arrival in self.held if at <= now]
        self.held = [item for item in self.held if item[0] > now]
        return due

    def seconds_until_poll(self):
        return 2e-5 if self.held else super().seconds_until_poll()


@pytest.fixture(scope="module")
def trainer():
    trainer = toy.trainer(4, max_in_flight=MICROBATCHES, spare_gradients=MICROBATCHES, dispatch="ready")
    trainer.start()
    return trainer


def run(trainer, transport, *arguments):
    """One step's trace and gradients."""
    engine = trainer._engine
    engine.driver.local = transport(engine.driver.devices, *arguments)
    sums = trainer._stepper.run("train", trainer._data, 0).sums
    gradients = jax.device_get([stage.gradients for stage in engine.stages.values()])
    engine.reset_gradients()
    return sums.recorded.trace, gradients


@pytest.mark.parametrize("schedule", ["bf", "f-priority", "1f1b"])
def test_a_real_run_replays_to_the_same_instructions(trainer, schedule, monkeypatch):
    schedulers = []

    def keep(stage, rules, budget):
        rules = dataclasses.replace(rules, schedule=by_name(schedule))
        schedulers.append(StageScheduler(stage, rules, budget))
        return schedulers[-1]

    monkeypatch.setattr(trainer._engine.driver, "scheduler", keep)
    trace, _ = run(trainer, DelayedTransport, 4)
    assert len(schedulers) == 4
    held = {record.held for record in trace.records} - {None}
    possible = {WaitCause.ORDER} if schedule == "1f1b" else {WaitCause.INPUT, WaitCause.ROOM, WaitCause.TURN}
    assert held and held <= possible
    for scheduler in schedulers:
        assert replay(scheduler).finished
        ran = [task for _, task in scheduler.log if task is not None]
        assert ran == trace.order(scheduler.stage)
    log = schedulers[2].log
    at, (event, task) = next((at, entry) for at, entry in enumerate(log) if entry[1] is not None)
    log[at] = event, task._replace(microbatch=99)
    with pytest.raises(ReplayError, match=rf"stage 2, event {at}, room"):
        replay(schedulers[2])


def skipped_although_ready(trace):
    """Tasks that BF ranks above the one dispatched, and that the trace says were ready then."""
    wrong = []
    for stage in range(trace.stages):
        records = sorted(trace.stage_records(stage), key=lambda r: r.dispatched)
        turn = BACKWARD
        for position, chosen in enumerate(records):
            rank = lambda r, turn=turn: (r.task.kind != turn, r.task.microbatch)  # noqa: E731
            better = [r for r in records[position + 1 :] if rank(r) < rank(chosen)]
            wrong += [(stage, r.task, chosen.task) for r in better if r.ready <= chosen.dispatched]
            turn = FORWARD if chosen.task.kind is BACKWARD else BACKWARD
    return wrong


@pytest.fixture(scope="module", autouse=True)
def twelve_microbatches(trainer):
    trainer._data = type(trainer._data)(toy.microbatches(MICROBATCHES))


def test_other_delays_other_orders_same_gradients(trainer):
    traces, gradients = zip(*[run(trainer, DelayedTransport, seed) for seed in (1, 2)], strict=True)
    orders = [[trace.order(stage) for stage in range(4)] for trace in traces]
    assert orders[0] != orders[1]
    for trace in traces:
        assert skipped_although_ready(trace) == []
    chex.assert_trees_all_equal(*gradients)


def test_the_trace_check_can_fail(trainer):
    trace, _ = run(trainer, DelayedTransport, 3)
    late = [r._replace(ready=0.0) for r in trace.records]
    assert skipped_although_ready(type(trace)(trace.step, trace.placement, [Part.of(late)]))


def test_tasks_of_a_stage_do_not_overlap_and_start_after_dispatch(trainer):
    trace, _ = run(trainer, LocalTransport)
    for stage in range(4):
        records = trace.stage_records(stage)
        assert all(r.ready <= r.dispatched <= r.start <= r.end for r in records)
        assert all(a.end <= b.start for a, b in pairwise(records))
    assert all(0 <= share < 1 for share in trace.bubble())


def test_stages_overlap(trainer):
    trace, _ = run(trainer, LocalTransport)
    spans = [(r.start, r.end, r.stage) for r in trace.records]
    assert any(a[0] < b[0] < a[1] for a in spans for b in spans if a[2] != b[2])
