"""Tasks whose inputs are foreseen in a run: the same bits, and records that say what happened."""

from contextlib import suppress
from itertools import pairwise
from math import inf

import jax
import numpy as np
import pytest

import rrfp_jax as rrfp
from rrfp_jax.core import foresight
from rrfp_jax.core.events import Room
from rrfp_jax.core.footprint import MOST_EARLY
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import FORWARD, Task
from rrfp_jax.runtime.engine import loop
from rrfp_jax.runtime.engine.device import DeviceQueue, Running
from rrfp_jax.runtime.engine.loop import StepExecution
from rrfp_jax.runtime.stages.memory import memory_of_step
from rrfp_jax.runtime.transport.protocol import LocalTransport
from tests.support import toy

SCHEDULES = ["bf", "bfw", "1f1b", "zb-h1", "ranked:1f1b", "zb-v"]


def foresee_all(monkeypatch, late=0.0):
    """Whatever is on its way is expected in time, from devices that are so late in the mean."""
    monkeypatch.setattr(foresight, "foreseen_from", lambda arrival, *rest: -inf if arrival < inf else inf)
    monkeypatch.setattr(
        DeviceQueue, "late", property(lambda self: late, lambda self, late: None), raising=False
    )


def trained(schedule, dispatch, steps=6, microbatches=8, **more):
    settings = rrfp.Settings(dispatch=dispatch, stall_seconds=20, **more)
    trainer = toy.trainer(4, schedule=schedule, settings=settings)
    reports = [trainer.step(toy.microbatches(microbatches, seed=step)) for step in range(steps)]
    return reports, jax.device_get(trainer.stage_params)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bits_and_records(schedule, monkeypatch):
    foreseen, dispatch = [], StepExecution._dispatch

    def dispatched(self, queue, stage, choice, now):
        foreseen.append(choice.task.input in self._coming[stage])
        dispatch(self, queue, stage, choice, now)

    plain, expected = trained(schedule, "ready")
    monkeypatch.setattr(StepExecution, "_dispatch", dispatched)
    foresee_all(monkeypatch)
    reports, params = trained(schedule, "foreseen")
    assert any(foreseen), "some tasks were dispatched before their input was there"
    assert [r.loss for r in reports] == [r.loss for r in plain]
    assert jax.tree.all(jax.tree.map(np.array_equal, params, expected))
    for report in reports:
        trace = report.trace
        for stage in range(4):
            records = trace.stage_records(stage)
            assert all(a.end <= b.start for a, b in pairwise(records))
            assert all(max(r.dispatched, r.ready) <= r.start <= r.end for r in records)
        assert all(receiver.ready >= sender.end for sender, receiver in trace.transfers())


@pytest.mark.parametrize("schedule", ["bf", "1f1b"])
def test_a_stage_is_not_asked_again_before_anything_has_come(schedule, monkeypatch):
    had_none, handle, begun = set(), StageScheduler.handle, StepExecution.run

    def handled(self, event):
        found = handle(self, event)
        if isinstance(event, Room) and self in running:
            assert event.foreseen or self not in had_none, "it had nothing, and nothing has come since"
            assert schedule == "bf" or len(event.foreseen) <= 1, "a fixed order waits for the next alone"
        (had_none.add if isinstance(event, Room) and found is None else had_none.discard)(self)
        return found

    def ran(self, *given):
        running.update(self._schedulers.values())
        return begun(self, *given)

    running = set()
    monkeypatch.setattr(StepExecution, "run", ran)
    plain, _ = trained(schedule, "ready")
    monkeypatch.setattr(StageScheduler, "handle", handled)
    reports, _ = trained(schedule, "foreseen")
    assert running and had_none and [r.loss for r in reports] == [r.loss for r in plain]


@pytest.mark.parametrize("schedule", ["bf", "bfw"])
def test_what_may_come_late_goes_ahead_of_nothing_that_is_here(schedule, monkeypatch):
    """Sure is what has been computed and is being copied."""
    had_none, handle, sure, dispatched = set(), StageScheduler.handle, set(), []

    def asked(*given, **more):
        found, soonest = foresight.rooms(*given, **more)
        sure.clear()
        sure.update(found[0].foreseen)
        return found, soonest

    def handled(self, event):
        found = handle(self, event)
        if not isinstance(event, Room):
            had_none.discard(self)
        elif sure.issuperset(event.foreseen):
            (had_none.add if found is None else had_none.discard)(self)
        elif found is not None:
            dispatched.append(self in had_none)
            had_none.discard(self)
        return found

    plain, _ = trained(schedule, "ready")
    foresee_all(monkeypatch, late=1.5 * foresight.ROUND_TRIP_SECONDS)
    monkeypatch.setattr(loop, "rooms", asked)
    monkeypatch.setattr(StageScheduler, "handle", handled)
    reports, _ = trained(schedule, "foreseen")
    assert dispatched and all(dispatched)
    assert [r.loss for r in reports] == [r.loss for r in plain]


@pytest.mark.parametrize("schedule", ["bf", "1f1b"])
def test_an_input_that_is_seen_to_come_after_its_task_has_ended_is_of_its_own_step(schedule, monkeypatch):
    """JAX says that an array is there from another thread, after it has run small programs that read it."""
    held, poll, left, run = [], LocalTransport.poll, [], StepExecution.run

    def polled(self):
        held.append(poll(self))
        return held.pop(0) if len(held) > 20 else []

    def ran(self, *given):
        records = run(self, *given)
        left.append(len(self._taken))
        return records

    plain, _ = trained(schedule, "ready")
    monkeypatch.setattr(StepExecution, "run", ran)
    monkeypatch.setattr(LocalTransport, "poll", polled)
    monkeypatch.setattr(LocalTransport, "seconds_until_poll", lambda self: 1e-5)
    foresee_all(monkeypatch)
    reports, _ = trained(schedule, "foreseen")
    assert left == [0] * len(reports)
    assert [r.loss for r in reports] == [r.loss for r in plain]


@pytest.mark.parametrize("schedule", ["bf", "1f1b", "zb-v"])
def test_a_budget_has_room_for_what_is_early(schedule, monkeypatch):
    """As many bytes as are needed for it, and one less: then all waits for its input."""
    early, dispatch = [], StepExecution._dispatch

    def dispatched(self, queue, stage, choice, now):
        dispatch(self, queue, stage, choice, now)
        early.append(sum(key.stage == stage for key in self._taken))

    monkeypatch.setattr(StepExecution, "_dispatch", dispatched)
    foresee_all(monkeypatch)
    plain, _ = trained(schedule, "ready")
    least = least_with_early(schedule)
    for budget, most in ((least, MOST_EARLY), (least - 1, 0)):
        early.clear()
        reports, _ = trained(schedule, "foreseen", activation_budget=budget)
        assert 0 < max(early) <= most if most else max(early) == 0
        assert all(peak <= budget for report in reports for peak in report.peak_bytes)
        assert [r.loss for r in reports] == [r.loss for r in plain]


def least_with_early(schedule):
    """The smallest budget with which tasks may be early."""
    trainer = toy.trainer(4, schedule=schedule, settings=rrfp.Settings(activation_budget="1GiB"))
    ledgers = trainer.start()
    rules, names = trainer._stepper.rules(8, "train"), [*ledgers[0].buckets] * 8
    low, high = 0, 2**30
    while high - low > 1:
        middle = (low + high) // 2
        with suppress(rrfp.UsageError):
            if memory_of_step(middle, ledgers, rules, names).early:
                high = middle
                continue
        low = middle
    return high


@pytest.mark.slow(reason="2 s: 60 steps; test_bits_and_records has what is foreseen")
def test_a_stage_that_a_timer_woke_is_asked_again():
    """With one microbatch, all that a stage runs next follows from what was foreseen."""
    reports, _ = trained("bf", "foreseen", steps=60, microbatches=1)
    assert len(reports) == 60


def test_a_step_begins_with_the_usual_room():
    """An evaluation has no limits in bytes; the step after it may have."""
    queue = DeviceQueue("one", lambda: None)
    for prepare in (lambda: queue.foresee(8, ordered=True), lambda: queue.decide_ahead(1.0)):
        prepare()
        with queue:
            assert (queue._most, queue._ahead, queue._foresees, queue.is_ordered) == (2, 0.0, False, False)


class Token:
    """A result that is there."""

    def __init__(self, error=None):
        self.error = error

    def is_ready(self):
        return True

    def block_until_ready(self):
        if self.error is not None:
            raise self.error


def program(stage, token, dispatched=0.0):
    return Running(0, stage, Task(FORWARD, 0, 0), 0, "F", token, 0.0, dispatched)


@pytest.fixture
def queues():
    return [DeviceQueue(name, lambda: None) for name in "ab"]


def test_an_error_is_told_of_the_program_that_raised_it(queues):
    first, second = program(0, Token(ValueError("own"))), program(1, Token(ValueError("of its input")))
    second.after = first
    for queue, running in zip(queues, (first, second), strict=True):
        queue.submit(running)
    assert queues[1].ended() == []
    assert queues[0].ended() == [first] and str(first.error) == "own"


def test_a_task_begins_when_what_was_foreseen_has_come(queues):
    for queue in queues:
        queue.foresee(8, ordered=False)
    first, second = program(0, Token()), program(1, Token())
    second.after = first
    for queue, running in zip(queues, (first, second), strict=True):
        queue.submit(running)
    assert queues[1].ended() == [second] and queues[0].ended() == [first]
    assert first.end == second.ready == second.start <= second.end and second.after is None


def test_what_is_seen_to_end_ends_what_was_before_it(queues):
    queues[0].foresee(8, ordered=False)
    before, first = program(0, Token()), program(0, Token())
    queues[0].submit(before)
    queues[0].submit(first)
    first.wait()  # as who waits for its output does
    assert queues[0].ended() == [before, first]
    assert before.end == first.start == first.end
