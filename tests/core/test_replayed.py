"""Steps run again in virtual time: with what the driver's own moments do to its choices."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core.tasks import BACKWARD, FORWARD, Kind, Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import TableCosts
from rrfp_jax.trace.records import Part, StepTrace
from rrfp_jax.trace.replayed import replay_of
from tests.support.spoilt import rules
from tests.support.steps import steps

EARLY = 0.3
"""So long before a task's end the next one may be chosen; tasks take about 1."""


def again(trace, own, lead=0.0):
    replay = replay_of(trace)
    return simulate(own, replay.costs, lead=lead, leads=replay.leads)


@given(steps(), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_the_next_task_is_chosen_as_early_as_it_was(drawn, seed):
    own, costs = drawn
    draw, stages = random.Random(seed), range(own.placement.stages)
    tasks = [
        Task(k, c, j) for k in Kind for c in range(own.placement.chunks) for j in range(own.microbatches)
    ]
    leads = {(stage, task): draw.uniform(0, EARLY) for stage in stages for task in tasks}
    trace = simulate(own, costs, lead=EARLY, leads=leads)
    found = again(trace, own, lead=EARLY)
    assert found.makespan == pytest.approx(trace.makespan, rel=0.05)


def test_arrivals_that_were_looked_at_together():
    """Two forwards arrive 50 us apart; the driver saw both, and took the one that came last."""
    costs = {(s, Task(k, 0, j)): 0.5 for s in range(2) for k in (FORWARD, BACKWARD) for j in range(2)}
    transfers = {(0, Task(FORWARD, 0, j)): 1.0 - 0.5 * j for j in range(2)}
    own = replace(rules(microbatches=2, limit=None), placement=replace(rules().placement, stages=2))
    trace = simulate(own, TableCosts(costs, transfers))
    seen = {0: {"ready": 1.50005, "dispatched": 1.50006, "start": 1.50006}, 1: {"ready": 1.5}}
    records = [
        record._replace(**seen[record.task.microbatch])
        if (record.stage, record.task.kind) == (1, FORWARD)
        else record
        for record in trace.records
    ]
    assert trace.stage_records(1)[0].task == Task(FORWARD, 0, 0)
    sent = replay_of(StepTrace(0, trace.placement, [Part.of(records)])).costs.transfers
    arrivals = [0.5 * (j + 1) + sent[0, Task(FORWARD, 0, j)] for j in range(2)]
    assert 0 < arrivals[1] - arrivals[0] < 1e-6, "the one that was chosen arrives first"


def test_the_host_sees_an_end_late():
    """The stage was free at 1.0, and chose 2 ms later among what was there."""
    own = replace(rules(microbatches=3, limit=None), placement=replace(rules().placement, stages=1))
    durations = {(0, Task(k, 0, j)): 1.0 for k in (FORWARD, BACKWARD) for j in range(3)}
    costs = TableCosts(durations, {})
    leads = dict.fromkeys(durations, -0.002)
    trace = simulate(own, costs, leads=leads)
    assert trace.makespan == pytest.approx(6.0 + 5 * 2e-3)
    replay = replay_of(trace)
    assert all(lead == pytest.approx(-2e-3) for lead in replay.leads.values()) and len(replay.leads) == 5
    assert replay.costs.durations == pytest.approx(durations)
    assert again(trace, own).makespan == pytest.approx(trace.makespan)
