"""What a run leaves of its steps: what is written is read, at most once a second, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import msgpack

from rrfp_jax.core.hints import Hint, Ranked
from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Direction
from rrfp_jax.json_files import Unreadable
from rrfp_jax.report import store
from rrfp_jax.report.explanation import TimedStep, explain
from rrfp_jax.report.look import read_latest
from rrfp_jax.report.run_folder import read_run
from rrfp_jax.report.store import LATEST, STEPS, StepFile, read_lines, read_steps, write_steps
from rrfp_jax.report.what_if import what_ifs
from rrfp_jax.sim.choice import Candidate
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.planned import plan
from rrfp_jax.trace.costs import WorkloadCosts, log_normal
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.records import RECORD, Part, RecordedStep
from rrfp_jax.trace.replayed import replay_of
from tests.support.spoilt import spoilt
from tests.support.watched import latest, step_of, told

OLD = Path(__file__).parent / "earlier-run"
"""The folder of a run, as commit f8d0cee wrote it."""


def step(schedule, room=None, limit=None):
    schedule = by_name(schedule) if isinstance(schedule, str) else schedule
    placement = schedule.placement_for(3, 2)
    rules = StepRules(placement=placement, microbatches=6, schedule=schedule, limit=limit)
    workload = log_normal(3, 6, forward=0.01, sigma=0.3, shared=0.5, seed=0, transfer=0.001)
    budgets = [Budget([[2] * 6] * placement.chunks, 2 * room * placement.chunks)] * 3 if room else None
    trace = simulate(rules, WorkloadCosts(workload, placement), budgets=budgets)
    return RecordedStep(trace=trace, rules=rules, budgets=budgets, buckets=list("abcabc"), lead=1e-3)


class BackwardFirst(Hint):
    """Somebody's own."""

    def choose(self, state, ready):
        found = filter(None, map(ready.first, (Direction.BACKWARD, Direction.FORWARD)))
        return next(((task, state) for task in found), None)


def listed(schedule):
    """A fixed order without its name."""
    placement = by_name(schedule).placement_for(3, 2)
    rows = [tuple(by_name(schedule).order(stage, placement, 6)) for stage in range(3)]
    return ListedOrder(placement, 6, tuple(rows))


def delayed(step, **injected):
    """The step with the same injected into every task of microbatch 1 (s)."""
    records = [r._replace(**injected) if r.task.microbatch == 1 else r for r in step.trace.records]
    return replace(step, trace=replace(step.trace, parts=[Part.of(records)]))


def again(tmp_path, *steps):
    """What is read of steps that were written."""
    write_steps(tmp_path / STEPS, {"run": steps})
    return read_steps(tmp_path / STEPS)["run"]


def test_groups_of_steps_are_read_again(tmp_path):
    written = {"hint": [step("bfw", 3)], "order": [step("zb-v")], "none": []}
    write_steps(tmp_path / STEPS, written)
    read = read_steps(tmp_path / STEPS)
    assert list(read) == ["hint", "order", "none"] and read["none"] == []
    for name in ("hint", "order"):
        (before,), (after,) = written[name], read[name]
        assert replace(after, trace=before.trace, ranks=()) == before and after.ranks == []
        assert after.trace.placement == before.trace.placement
        assert after.trace.records == before.trace.records


def test_what_layers_have_to_do_is_read_again(tmp_path):
    work = Work([LayerWork("Block", 0.5, 7, 3)] * 6, [1] * 6)
    (found,) = again(tmp_path, replace(step("bf"), work=lambda: work))
    assert found.work() == work and again(tmp_path, step("bf"))[0].work() is None


def test_injected_delays_are_read_again(tmp_path):
    written = delayed(step("bf"), delayed=1e-3, late=2e-3)
    assert again(tmp_path, written)[0].trace.records == written.trace.records


def test_replicas_are_read_again(tmp_path):
    busy = [[0.5, 0.25, 0.125], [1.0, 2.0, 3.0]]
    first, second = step("bf"), step("bf")
    second = replace(second, trace=replace(second.trace, step=1, replica=1, busy_by_replica=busy))
    one, two = (own.trace for own in again(tmp_path, first, second))
    assert (one.replica, list(one.busy_by_replica)) == (0, [])
    assert (two.replica, two.busy_by_replica) == (1, busy)


def test_an_order_without_a_name_is_read_as_the_order_in_which_tasks_ran(tmp_path):
    ran = step("zb-v")
    own = plan(Candidate(rules=ran.rules, costs=replay_of(ran.trace).costs), evaluations=1).order
    planned = replace(ran, rules=replace(ran.rules, schedule=own), buckets=list("aaaaaa"))
    planned = replace(planned, trace=simulate(planned.rules, replay_of(ran.trace).costs))
    first, second = again(tmp_path, planned, replace(planned, trace=replace(planned.trace, step=1)))
    assert first.rules == second.rules
    rows = [list(first.rules.schedule.order(stage, ran.rules.placement, 6)) for stage in range(3)]
    assert rows == [planned.trace.order(stage) for stage in range(3)]
    assert what_ifs(first, tried=()).error < 1e-6
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "schedule": "planned"}\n')
    assert read_run(tmp_path).origin == "schedule planned"


@pytest.mark.parametrize("hint", [BackwardFirst(), Ranked(listed("zb-v")), Ranked(listed("zb-h1"), False)])
def test_a_hint_without_a_name_is_read_as_one_that_prefers_the_order_in_which_tasks_ran(tmp_path, hint):
    ran = step(hint, limit=3)
    (found,) = again(tmp_path, ran)
    assert isinstance(found.rules.hint, Ranked) and not found.fixed_order
    timed = [TimedStep(recorded=own, wall_seconds=own.trace.makespan) for own in (ran, found)]
    assert explain(timed[1:]).shares == pytest.approx(explain(timed[:1]).shares)
    tried = what_ifs(found)
    assert tried.error < 1e-6 and "in flight" in [change.kind for change in tried.changes]


def test_the_latest_step_is_read(tmp_path):
    recorded = spoilt("stage")[0]
    found = latest(tmp_path, told(recorded, replicas=2, wide=2))
    assert found.trace.records == recorded.trace.records
    assert (found.trace.start, found.trace.end) == (recorded.trace.start, recorded.trace.end)
    assert (found.trace.step, found.trace.placement) == (recorded.trace.step, recorded.trace.placement)
    assert (found.fixed_order, found.grouped) == (False, False)
    assert (found.trace.replica, len(found.trace.busy_seconds)) == (1, 2) and found.ranks[7] == [14, 15]
    assert [path.name for path in tmp_path.iterdir()] == [LATEST], "nothing else is left"


def test_at_most_once_a_second_and_the_last_one_at_the_end(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(store, "monotonic", lambda: now)
    file, reports = StepFile(tmp_path), [told(step_of(stages)) for stages in (1, 2, 3)]
    file.add(reports[0])
    now += 0.9
    file.add(reports[1])
    assert read_latest(tmp_path / LATEST).trace.stages == 1
    now += 0.2
    file.add(reports[2])
    assert read_latest(tmp_path / LATEST).trace.stages == 3
    file.add(reports[1])
    file.flush()
    assert read_latest(tmp_path / LATEST).trace.stages == 2
    (tmp_path / LATEST).unlink()
    file.flush()
    assert not (tmp_path / LATEST).exists(), "it was written already"


def last(records, wrong, rest=b"\0"):
    """The records, the last of which begins so."""
    return records[: -RECORD.size] + wrong + rest * (RECORD.size - len(wrong))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"form": "<i"}, "records of the form '<i'"),
        ({"records": b""}, "0 bytes are no records"),
        ({"records": lambda own: own[:-1]}, "bytes are no records"),
        ({"records": lambda own: own * 2}, "has a task twice"),
        ({"records": lambda own: own[: RECORD.size]}, "or a virtual stage without tasks"),
        ({"records": lambda own: last(own, b"\xff", b"\xff")}, "is not a valid Kind"),
        ({"records": lambda own: last(own, b"\0" * 4 + b"\xf0")}, "15 is not a cause of waiting"),
        ({"records": lambda own: last(own, b"\1" * 4)}, "a record of stage"),
        ({"more": 1}, "unknown field"),
        ({"step": -1}, "Expected `int` >= 0"),
        ({"busy_by_replica": [[1.0]]}, "times of other than 4 stages"),
        ({"replica": 1}, "replica 1 of 1"),
        ({"replica": 2, "busy_by_replica": [[1.0] * 4] * 2}, "replica 2 of 2"),
        ({"ranks": [[0]]}, "ranks of 1 stages for 1 replicas"),
        ({"stages": 0}, "stages=0"),
        ({"buckets": ["a"]}, "1 buckets for 12 microbatches"),
        ({"budgets": [None]}, "budgets not of 4 stages, 1 chunks, 12 microbatches"),
        ({"layers": [["a", 1.0, 1, 0]], "split": [2]}, "1 layers do not split into [2]"),
        ({"schedule": "no-such"}, "no-such"),
    ],
)
def test_anything_else_is_refused(tmp_path, changes, said):
    path = tmp_path / LATEST
    latest(tmp_path, told(spoilt("stage")[0]))
    tree = msgpack.decode(path.read_bytes())
    (stored,) = tree["run"]
    for name, value in changes.items():
        stored[name] = value(stored[name]) if callable(value) else value
    path.write_bytes(msgpack.encode(tree))
    with pytest.raises(Unreadable, match=f"{LATEST} has no steps of this version") as refused:
        read_latest(path)
    assert said in str(refused.value)


def test_a_delay_longer_than_its_task_is_refused(tmp_path):
    with pytest.raises(Unreadable, match="a record of stage"):
        again(tmp_path, delayed(step("bf"), delayed=1.0))


@pytest.mark.parametrize("content", [b"", b"[", b"{}", b"\x80\x80", b'{"traceEvents": [{"ph": "X"}]}'])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / STEPS).write_bytes(content)
    with pytest.raises(
        Unreadable, match=f"{STEPS} (has no steps of this version of rrfp_jax|is a trace for)"
    ):
        read_steps(tmp_path / STEPS)


def test_no_file(tmp_path):
    with pytest.raises(Unreadable, match="cannot be read: No such file"):
        read_latest(tmp_path / LATEST)
    write_steps(tmp_path / LATEST, {"run": []})
    with pytest.raises(Unreadable, match="has 0 steps, not one"):
        read_latest(tmp_path / LATEST)


def test_a_run_of_an_earlier_version_is_refused_in_words_and_its_lines_are_read():
    with pytest.raises(Unreadable, match=f"has a trace.json, for ui.perfetto.dev, but no {STEPS}. Earlier"):
        read_run(OLD)
    with pytest.raises(Unreadable, match=f"a trace for ui.perfetto.dev; what is read is a run's {STEPS}"):
        read_run(OLD / "trace.json")
    with pytest.raises(Unreadable, match="latest-step has no steps of this version"):
        read_latest(OLD / LATEST)
    lines, wrong = read_lines(OLD / "metrics.jsonl")
    assert [line.step for line, _ in lines] == [0, 1, 2] and not wrong
    assert all(line.loss and line.wall_seconds > line.step_seconds > 0 for line, _ in lines)
