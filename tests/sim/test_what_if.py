"""What a step would have taken: replays of simulated steps, and of such that were spoilt in a known way."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from rrfp_jax.core.step_rules import Budget
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.what_if import what_ifs
from rrfp_jax.trace.costs import WorkloadCosts
from rrfp_jax.trace.records import Part, RecordedStep, StepTrace
from tests.support.spoilt import EVEN, MICROBATCHES, STAGES, ran, rows, rules, spoilt
from tests.support.steps import steps


@pytest.mark.parametrize(
    ("name", "kind", "subject"),
    [
        ("stage", "stage", 2),
        ("jitter", "jitter", None),
        ("lengths", "lengths", None),
        ("link", "link", (1, 2)),
    ],
)
def test_undoing_what_is_wrong_saves_most(name, kind, subject):
    step, undone = spoilt(name)
    found = what_ifs(step, schedules=())
    assert found.error < 1e-9
    one = next(change for change in found.changes if (change.kind, change.subject) == (kind, subject))
    assert one.seconds == pytest.approx(undone, rel=0.03)
    rivals = {"stages", "links"} - {kind}  # which undo the same, and more
    assert next(change for change in found.changes if change.kind not in rivals) == one


def test_a_limit_that_is_too_small():
    slow_link = replace(
        EVEN, transfer_forward=rows([20e-3] * STAGES), transfer_backward=rows([20e-3] * STAGES)
    )
    costs = WorkloadCosts(slow_link, rules().placement)
    by_number = what_ifs(ran(costs, limit=3))
    more = next(change for change in by_number.changes if (change.kind, change.subject) == ("in flight", 1))
    assert more.seconds == pytest.approx(simulate(rules(limit=4), costs).makespan)
    costs_in_bytes = [[10] * MICROBATCHES]
    by_bytes = what_ifs(ran(costs, limit=None, budgets=[Budget(costs_in_bytes, 30)] * STAGES))
    wider = next(change for change in by_bytes.changes if change.kind == "bytes")
    assert wider.seconds == pytest.approx(simulate(rules(limit=4), costs).makespan)
    assert not [change for change in what_ifs(ran(costs, limit=None)).changes if change.kind == "bytes"]


def test_another_schedule_takes_what_it_takes():
    costs = WorkloadCosts(EVEN, rules().placement)
    found = what_ifs(ran(costs, "1f1b"), schedules=["1f1b", "bf", "bfw", "zb-v"])
    tried = {change.subject: change.seconds for change in found.changes if change.kind == "schedule"}
    assert set(tried) == {"bf", "bfw"}, "its own is not tried, nor one for another placement"
    for name, seconds in tried.items():  # with as much as 1F1B holds
        assert seconds == pytest.approx(simulate(rules(name, limit=STAGES), costs).makespan)


def test_another_schedule_holds_no_more():
    costs = WorkloadCosts(EVEN, rules().placement)
    budgets = [Budget([[10] * MICROBATCHES], 40)] * STAGES

    def tried(step):
        found = what_ifs(step, schedules=["gpipe", "zb-h1", "zb-h2"])
        return {change.subject for change in found.changes if change.kind == "schedule"}

    assert tried(ran(costs)) == tried(ran(costs, "1f1b")) == {"zb-h1"}
    assert tried(ran(costs, limit=None, budgets=budgets)) == {"zb-h1"}
    assert tried(ran(costs, limit=None)) == {"gpipe", "zb-h1", "zb-h2"}


@given(steps())
@settings(max_examples=100, deadline=None)
def test_a_replay_takes_as_long_as_the_step(drawn):
    own, costs = drawn
    trace = simulate(own, costs)
    step = RecordedStep(trace=trace, rules=own, buckets=[""] * own.microbatches)
    assert what_ifs(step, schedules=()).error < 1e-9


def test_the_hosts_time_is_replayed_and_can_be_taken_out():
    host, own = 3e-3, rules()
    slow = replace(EVEN, **{part: rows([11.5e-3] * STAGES) for part in ("backward_input", "backward_weight")})
    trace = simulate(own, WorkloadCosts(replace(slow, forward=rows([13e-3] * STAGES)), own.placement))
    records = [record._replace(start=record.start + host) for record in trace.records]
    step = RecordedStep(
        trace=StepTrace(0, trace.placement, [Part.of(records)]), rules=own, buckets=[""] * MICROBATCHES
    )
    found = what_ifs(step, schedules=())
    assert found.error < 0.01
    without = next(change for change in found.changes if change.kind == "host")
    assert without.seconds == pytest.approx(simulate(own, WorkloadCosts(EVEN, own.placement)).makespan)
