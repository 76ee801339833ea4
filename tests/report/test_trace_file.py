"""Trace files: what is written is read again."""

import json
from dataclasses import replace

import pytest

from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.report.perfetto import DELAY, write_trace
from rrfp_jax.report.trace_reading import read_trace
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.planned import plan
from rrfp_jax.sim.what_if import what_ifs
from rrfp_jax.trace.costs import WorkloadCosts, log_normal
from rrfp_jax.trace.records import Part, RecordedStep
from rrfp_jax.trace.replayed import replay_of


def step(schedule, limit=None):
    placement = by_name(schedule).placement_for(3, 2)
    rules = StepRules(placement=placement, microbatches=6, schedule=by_name(schedule))
    workload = log_normal(3, 6, forward=0.01, sigma=0.3, shared=0.5, seed=0, transfer=0.001)
    budgets = [Budget([[2] * 6] * placement.chunks, 2 * limit * placement.chunks)] * 3 if limit else None
    trace = simulate(rules, WorkloadCosts(workload, placement), budgets=budgets)
    return RecordedStep(trace=trace, rules=rules, budgets=budgets, buckets=list("abcabc"), lead=1e-3)


def test_groups_of_steps_are_read_again(tmp_path):
    written = {"hint": [step("bfw", 3)], "order": [step("zb-v")], "none": []}
    write_trace(tmp_path / "trace.json", written)
    read = read_trace(tmp_path / "trace.json")
    assert list(read) == ["hint", "order", "none"] and read["none"] == []
    for name in ("hint", "order"):
        (before,), (after,) = written[name], read[name]
        assert replace(after, trace=before.trace) == before
        assert after.trace.placement == before.trace.placement
        assert after.trace.makespan == pytest.approx(before.trace.makespan, abs=1e-8)
        for one, other in zip(before.trace.records, after.trace.records, strict=True):
            assert one[:3] == other[:3]
            assert other[3:] == pytest.approx(one[3:], abs=2e-9)


def delayed(step, **injected):
    """The step with the same injected into every task of microbatch 1 (s)."""
    records = [r._replace(**injected) if r.task.microbatch == 1 else r for r in step.trace.records]
    return replace(step, trace=replace(step.trace, parts=[Part.of(records)]))


def test_injected_delays_are_read_again_and_seen(tmp_path):
    written = delayed(step("bf"), delayed=1e-3, late=2e-3)
    write_trace(tmp_path / "trace.json", {"run": [written]})
    (read,) = read_trace(tmp_path / "trace.json")["run"]
    for before, after in zip(written.trace.records, read.trace.records, strict=True):
        assert after[-2:] == pytest.approx(before[-2:])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tasks = {(e["tid"], e["name"]): e for e in events if e["ph"] == "X"}
    delays = [e for e in events if e["name"] == DELAY]
    assert len(delays) == 12  # of 3 stages, 2 chunks, F and B
    for event in delays:
        task = tasks[event["tid"], event["args"]["of"]]
        assert event["dur"] == 1000 and event["ts"] + 1000 == pytest.approx(
            task["ts"] + task["dur"], abs=2e-3
        )
    assert all("delayed" not in e["args"] for e in tasks.values() if e["args"].get("microbatch") != 1)


def test_replicas_are_read_again(tmp_path):
    busy = [[0.5, 0.25, 0.125], [1.0, 2.0, 3.0]]
    first, second = step("bf"), step("bf")
    second = replace(second, trace=replace(second.trace, step=1, replica=1, busy_by_replica=busy))
    write_trace(tmp_path / "trace.json", {"run": [first, second]})
    one, two = (own.trace for own in read_trace(tmp_path / "trace.json")["run"])
    assert (one.replica, list(one.busy_by_replica)) == (0, [])
    assert (two.replica, two.busy_by_replica) == (1, busy)


@pytest.mark.parametrize("wrong", [{"replica": 2}, {"busy_by_replica": [[1.0], [2.0]]}])
def test_replicas_that_are_not_there_are_refused(tmp_path, wrong):
    right = {"busy_by_replica": [[1.0, 1.0, 1.0]] * 2}
    written = step("bf")
    written = replace(written, trace=replace(written.trace, **(right | wrong)))
    write_trace(tmp_path / "trace.json", {"run": [written]})
    with pytest.raises(ValueError, match="lacks the busy times of its replica's 3 stages"):
        read_trace(tmp_path / "trace.json")


def test_a_delay_longer_than_its_task_is_refused(tmp_path):
    write_trace(tmp_path / "trace.json", {"run": [delayed(step("bf"), delayed=1.0)]})
    with pytest.raises(ValueError, match=r"F1 took .* us, of which 1e\+06 us were injected"):
        read_trace(tmp_path / "trace.json")


def test_an_order_without_a_name_is_read_as_the_order_in_which_tasks_ran(tmp_path):
    ran = step("zb-v")
    own = plan(ran.rules, replay_of(ran.trace).costs, evaluations=1).order
    planned = replace(ran, rules=replace(ran.rules, schedule=own), buckets=list("aaaaaa"))
    planned = replace(planned, trace=simulate(planned.rules, replay_of(ran.trace).costs))
    write_trace(tmp_path / "trace.json", {"run": [planned, planned_again(planned)]})
    first, second = read_trace(tmp_path / "trace.json")["run"]
    assert first.rules == second.rules
    rows = [list(first.rules.schedule.order(stage, ran.rules.placement, 6)) for stage in range(3)]
    assert rows == [planned.trace.order(stage) for stage in range(3)]
    assert what_ifs(first, schedules=()).error < 1e-6


def planned_again(step):
    return replace(step, trace=replace(step.trace, step=1))


@pytest.mark.parametrize("text", ["[", "{}", '{"traceEvents": [{"ph": "X", "cat": "task"}]}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=r"trace.json is not a trace.json of rrfp-train or rrfp-sim"):
        read_trace(tmp_path / "trace.json")
