"""What the charts of a report are made of: slowdowns, memory, links, and what changed."""

from dataclasses import replace
from itertools import pairwise

import pytest

from rrfp_jax.core.step_rules import Budget
from rrfp_jax.core.tasks import Direction
from rrfp_jax.report.charts import (
    MOST_DRAWN,
    MOST_POINTS,
    changes,
    drawn_stages,
    heatmap,
    held,
    history,
    links_of,
    memory,
    quantile,
    said_of_memory,
    slowdowns,
    slowest,
    tightest,
    timeline,
)
from rrfp_jax.report.store import StepLine
from rrfp_jax.trace.costs import WorkloadCosts
from rrfp_jax.trace.records import peak_charge
from tests.support.spoilt import EVEN, MICROBATCHES, STAGES, ran, rules, spoilt

COSTS = WorkloadCosts(EVEN, rules().placement)


def test_slowdowns_of_replicas_are_of_the_mean():
    busy = [[1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 1.0, 1.0]]
    trace = replace(spoilt("stage")[0].trace, busy_by_replica=busy)
    what, cells = slowdowns([trace, trace])
    assert what == "replica" and len(cells) == 8
    assert {(c.stage, c.column): c.slowdown for c in cells}[1, 1] == pytest.approx(3 / 1.25)
    assert slowest([trace]) == "Busy longest: stage 1 of replica 1, 2.40 times the mean."
    assert len(heatmap([trace]).rows["heatmap"]) == 8


def test_slowdowns_of_one_replica_are_by_step():
    trace = spoilt("stage")[0].trace
    what, cells = slowdowns([trace, replace(trace, step=1)])
    assert what == "step" and {cell.column for cell in cells} == {0, 1}
    assert slowest([trace]) == "Busy longest: stage 2 in step 0, 1.39 times the mean."  # 1.6 of 1.15


def test_memory_is_what_the_tasks_were_charged():
    costs = [[7 + j for j in range(MICROBATCHES)]]
    step = ran(COSTS, budgets=[Budget(costs, 40)] * STAGES, limit=None)
    for stage, own in enumerate(held(step)):
        assert own.peak == peak_charge(step.trace.order(stage), costs) <= 40 == own.limit
        assert own.since[-1][1] == 0 and own.in_bytes
    rows = memory(step).rows["memory"]
    for stage in range(STAGES):
        own = [row for row in rows if row["s"] == stage]
        assert max(row["x"] for row in own) == pytest.approx(held(step)[stage].peak / 40, abs=1e-4)
        assert own[0]["a"] == 0 and own[-1]["b"] == pytest.approx(step.trace.makespan * 1e3, abs=1e-3)
        assert all(a["b"] == b["a"] for a, b in pairwise(own))
    assert said_of_memory(step).startswith(
        "Closest to its limit: stage "
    ) and "MiB of 0.0 MiB" in said_of_memory(step)


def test_memory_is_of_the_limit_that_is_closest():
    step = ran(COSTS, budgets=[Budget([[10] * MICROBATCHES], 100)] * STAGES, limit=3)
    assert [(own.limit, own.in_bytes) for own in held(step)] == [(3, False)] * STAGES
    assert said_of_memory(step).startswith("Closest to its limit: stage 0, 3 in flight of 3 in flight.")
    fixed = ran(COSTS, "1f1b", budgets=[Budget([[10] * MICROBATCHES], 100)] * STAGES)
    assert all(own.in_bytes and own.limit is None for own in held(fixed))


def test_memory_without_budgets_is_microbatches_in_flight():
    assert said_of_memory(ran(COSTS, limit=3)).startswith(
        "Closest to its limit: stage 0, 3 in flight of 3 in flight."
    )
    assert said_of_memory(ran(COSTS, name="gpipe", limit=None)).startswith(
        f"There is no limit. Stage 0 holds most: {MICROBATCHES} in flight."
    )


def test_every_link_has_what_its_messages_took_and_their_slack():
    found = links_of([spoilt("link")[0].trace])
    assert [(f"{own.sender} to {own.receiver}", own.direction) for own in found] == [
        *((f"{a} to {a + 1}", Direction.FORWARD) for a in range(STAGES - 1)),
        *((f"{a + 1} to {a}", Direction.BACKWARD) for a in range(STAGES - 1)),
    ]
    for own in found:
        assert len(own.took) == MICROBATCHES
        slow = (own.sender, own.receiver) == (1, 2)
        assert own.took == pytest.approx([40e-3 if slow else 1e-3] * MICROBATCHES)
    assert "Least slack: the link from stage 1 to 2, where a message takes 40.00 ms" in tightest(
        [spoilt("link")[0].trace]
    )


@pytest.mark.parametrize(
    ("count", "at", "place"),
    [(1, 0.95, 0), (2, 0.5, 0), (3, 0.5, 1), (20, 0.95, 18), (21, 0.95, 19), (9, 1, 8)],
)
def test_quantiles_are_values(count, at, place):
    assert quantile(range(count), at) == place


def test_what_changed_in_a_run():
    def line(step, **of):
        return StepLine(step, 1.0, schedule="bf", **of)

    rate = "opt_state.learning_rate"
    lines = [
        line(0, hyperparams={rate: 1e-3}),
        line(1, hyperparams={rate: 1.5e-3}),
        replace_line(line(2, hyperparams={rate: 3e-3}), schedule="1f1b"),
        replace_line(line(3, resumed=True, hyperparams={rate: 2.9e-3}), schedule="1f1b"),
        replace_line(line(4, applied=False, hyperparams={rate: None}), schedule="1f1b"),
    ]
    assert [*changes(lines)] == [
        (2, "schedule bf -> 1f1b"),
        (2, "learning rate 0.003"),
        (3, "the run was started again"),
        (4, "the update was left out: not finite"),
    ]
    assert next(changes(lines[3:])) == (3, "the run was started again")
    assert [*changes(lines[4:])] == [(4, "the update was left out: not finite")]
    rows = history(lines).rows
    assert {row["what"] for row in rows["history"]} == {"whole step", "its tasks"}
    assert "the run was started again" in {row["what"] for row in rows["changes"]}


def replace_line(line, **of):
    return StepLine(**{name: getattr(line, name) for name in line.__struct_fields__} | of)


def test_long_runs_are_thinned_and_their_longest_steps_kept():
    lines = [StepLine(step, 9.0 if step == 4321 else 1.0, 0.5) for step in range(10_000)]
    rows = history(lines).rows["history"]
    assert len(rows) <= 3 * MOST_POINTS
    assert max(row["ms"] for row in rows) == 9000 and {"whole step", "its tasks", "the longest of 17"} == {
        row["what"] for row in rows
    }


def test_a_large_step_is_drawn_in_part(monkeypatch):
    step, _ = spoilt("stage")
    assert drawn_stages(step) == list(range(STAGES)) and len(step.trace.records) < MOST_DRAWN
    monkeypatch.setattr("rrfp_jax.report.charts.MOST_DRAWN", 3 * 2 * MICROBATCHES)
    assert drawn_stages(step) == [0, 2, 3]  # the first, the busiest, the last
    plot = timeline(step)
    for name in ("tasks", "idle", "critical"):
        assert {row["s"] for row in plot.rows[name]} <= {0, 2, 3}
    assert len(plot.rows["tasks"]) == 3 * 2 * MICROBATCHES
