"""Why stages were idle, and what made a step as long as it was: traces written by hand, and drawn ones."""

from itertools import chain, pairwise

import pytest
from hypothesis import given, settings

from rrfp_jax.core.events import Wait, WaitCause
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Task
from rrfp_jax.report.critical_path import critical_path
from rrfp_jax.report.legend import CAUSES
from rrfp_jax.report.timeline import reason
from rrfp_jax.sim.engine import simulate
from rrfp_jax.studies.compare import COLUMNS
from rrfp_jax.trace.costs import WorkloadCosts, log_normal
from rrfp_jax.trace.idleness import Cause, Idle, idleness, shares, stage_times
from tests.support.drain import Drain
from tests.support.small_step import all_foreseen, record, simulated, trace_of
from tests.support.steps import steps

F0, F1, B0, B1 = (Task(kind, 0, j) for kind in (FORWARD, BACKWARD) for j in (0, 1))

TWO_STAGES = trace_of(
    record(F0, 0, 0, 0, 1),
    record(F1, 0, 1, 1, 2),
    record(B0, 9, 10, 11, 12),  # its gradient: the other stage has it at 8, the link takes until 9
    record(B1, 12, 12, 12, 13),
    record(F0, 2, 2, 3, 4, stage=1),
    record(B0, 2, 4, 4, 8, stage=1),
    record(F1, 4, 8, 8, 9, stage=1),
    record(B1, 8, 9, 9, 11, stage=1),
    stages=2,
)


def causes(trace, stage, **kinds):
    found = [idle for idle in idleness(trace, **{"fixed_order": False} | kinds) if idle.stage == stage]
    return [(idle.cause, idle.start, idle.end) for idle in found]


def test_every_part_of_a_gap_has_its_cause():
    assert causes(TWO_STAGES, 0) == [
        (Cause.STAGE, 2, 8),
        (Cause.LINK, 8, 9),
        (Cause.HOST, 9, 11),
    ]
    assert causes(TWO_STAGES, 1) == [
        (Cause.BEGIN, 0, 1),
        (Cause.BEGIN, 1, 2),
        (Cause.HOST, 2, 3),
        (Cause.END, 11, 13),
    ]


def test_a_task_queued_for_an_input_that_came_late_is_a_wrong_estimate():
    trace = trace_of(
        record(F0, 0, 0, 0, 1),
        record(F1, 3, 0.5, 4, 5),  # expected at 1, came at 3, and was noticed at 4
        record(B0, 1.5, 4, 5, 6),  # ready all the time
        stages=1,
    )
    assert causes(trace, 0) == [(Cause.STAGE, 1, 1.5), (Cause.ESTIMATE, 1.5, 3), (Cause.HOST, 3, 4)]
    (gap,) = (idle for idle in idleness(trace, False) if idle.cause is Cause.ESTIMATE)
    assert reason(gap) == (
        "another task is ready, but F1 was queued first, as its input was expected earlier"
    )
    assert causes(trace, 0, fixed_order=True)[1] == (Cause.ORDER, 1.5, 3), "which had no choice"


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_what_follows_from_a_task_that_waits_for_its_input_is_not_ready_before(name):
    trace, _, fixed = simulated(name, "log-normal")
    assert idleness(all_foreseen(trace), fixed) == idleness(trace, fixed)


@pytest.mark.parametrize(
    "held, cause", [(WaitCause.ROOM, Cause.MEMORY), (WaitCause.INPUT, Cause.ESTIMATE), (None, Cause.ESTIMATE)]
)
def test_only_what_follows_the_dispatch_is_a_wrong_estimate_and_only_if_nothing_else_held(held, cause):
    trace = trace_of(
        record(F0, 0, 0, 0, 1),
        record(B0, 3, 2, 3, 4)._replace(held=held),
        record(F1, 0, 4, 4, 5),  # ready all the time
        stages=1,
    )
    first = [(Cause.MEMORY, 1, 2), (cause, 2, 3)]
    assert causes(trace, 0) == ([(Cause.MEMORY, 1, 3)] if cause is Cause.MEMORY else first)


def test_injected_delays_are_neither_computing_nor_a_slow_link():
    trace = trace_of(
        record(F0, 0, 0, 0, 3)._replace(delayed=2),
        record(B0, 10, 10, 10, 11)._replace(late=4),
        record(F0, 4, 4, 4, 5, stage=1)._replace(late=0.5),
        record(B0, 4, 5, 5, 5.5, stage=1),
        stages=2,
    )
    assert causes(trace, 0) == [(Cause.STAGE, 3, 5.5), (Cause.LINK, 5.5, 6), (Cause.INJECTED, 6, 10)]
    assert causes(trace, 1)[:3] == [(Cause.BEGIN, 0, 3), (Cause.BEGIN, 3, 3.5), (Cause.INJECTED, 3.5, 4)]
    first, second = stage_times(trace, False)
    assert (first["compute"], first["delayed"], sum(first.values())) == (2, 2, 11)
    found = shares([first, second])
    assert found["delayed"] == pytest.approx(1 / 11) and found["compute"] == pytest.approx(3.5 / 22)
    assert sum(found.values()) == pytest.approx(1.0)


def test_whose_task_and_link_was_awaited():
    stalls = [idle for idle in idleness(TWO_STAGES, False) if idle.cause in (Cause.STAGE, Cause.LINK)]
    assert stalls == [
        Idle(0, 2, 8, Cause.STAGE, B0, (1, B0)),
        Idle(0, 8, 9, Cause.LINK, B0, (1, B0)),
    ]


def test_processes_of_a_stage_agree_before_the_dispatch():
    assert (Cause.GROUP, 9, 10) in causes(TWO_STAGES, 0, grouped=True)
    assert (Cause.HOST, 10, 11) in causes(TWO_STAGES, 0, grouped=True)


@pytest.mark.parametrize(
    ("waits", "fixed", "cause"),
    [(F1, False, Cause.MEMORY), (B1, False, Cause.TURN), (F1, True, Cause.ORDER), (B1, True, Cause.ORDER)],
)
def test_what_is_ready_and_does_not_run_is_held(waits, fixed, cause):
    ran = [record(F0, 0, 0, 0, 1), record(B0, 4, 4, 5, 6), record(waits, 3, 6, 6, 8)]
    assert causes(trace_of(*ran), 0, fixed_order=fixed) == [
        (Cause.STAGE, 1, 3),
        (cause, 3, 4),
        (Cause.HOST, 4, 5),
    ]


def test_a_fixed_order_names_the_task_that_it_waited_for():
    trace = trace_of(
        record(F0, 0, 0, 0, 1),
        record(B0, 6, 6, 6, 7),
        record(F1, 0, 7, 7, 8),
        record(F0, 1, 1, 1, 3, stage=1),
        record(B0, 1, 3, 3, 6, stage=1),
        stages=2,
    )
    (idle,) = [idle for idle in idleness(trace, fixed_order=True) if idle.cause is Cause.ORDER]
    assert idle == Idle(0, 1, 6, Cause.ORDER, B0, (1, B0))


def test_a_task_queued_ahead_leaves_no_gap():
    assert not idleness(trace_of(record(F0, 0, 0, 0, 1), record(F1, 0, 0.9, 1, 2)), fixed_order=False)


def test_the_critical_path_crosses_to_the_stage_that_was_waited_for():
    found = [(s.stage, str(s.task), s.start, s.end, s.cause) for s in critical_path(TWO_STAGES)]
    assert found == [
        (0, "F0", 0, 1, None),
        (1, "F0", 1, 2, Cause.LINK),
        (1, "F0", 2, 3, Cause.HOST),
        (1, "F0", 3, 4, None),
        (1, "B0", 4, 8, None),
        (0, "B0", 8, 9, Cause.LINK),
        (0, "B0", 9, 11, Cause.HOST),
        (0, "B0", 11, 12, None),
        (0, "B1", 12, 13, None),
    ]


@given(steps())
@settings(max_examples=150, deadline=None)
def test_all_seconds_of_a_step_have_one_cause(drawn):
    rules, costs = drawn
    trace = simulate(rules, costs)
    fixed = isinstance(rules.schedule, FixedOrder)
    for time in stage_times(trace, fixed):
        assert sum(time.values()) == pytest.approx(trace.makespan)
        assert min(time[cause] for cause in Cause) >= 0 and time[Cause.HOST] == time[Cause.GROUP] == 0
        assert not (time[Cause.MEMORY] + time[Cause.TURN] if fixed else time[Cause.ORDER])
        if rules.limit is None and rules.accumulation == "arrival" and not isinstance(rules.schedule, Drain):
            assert time[Cause.MEMORY] == time[Cause.TURN] == 0
    assert sum(shares(stage_times(trace, fixed)).values()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["bf", "bfw", "1f1b", "ranked:zb-v"])
def test_they_add_up_on_64_stages(name):
    """The same at the size of a large run, with tasks queued ahead, jitter and slow links."""
    drawn = log_normal(64, 128, forward=0.01, sigma=0.4, shared=0.3, seed=3, transfer=2e-3)
    placement = by_name(name).placement_for(64)
    rules = StepRules(placement=placement, microbatches=128, schedule=by_name(name), limit=128)
    trace = simulate(rules, WorkloadCosts(drawn, placement), lead=1e-3)
    times = stage_times(trace, isinstance(rules.schedule, FixedOrder))
    assert [sum(time.values()) for time in times] == pytest.approx([trace.makespan] * 64, rel=1e-9)
    assert sum(shares(times).values()) == pytest.approx(1.0)


@given(steps())
@settings(max_examples=150, deadline=None)
def test_the_critical_path_is_a_chain_over_the_whole_step(drawn):
    trace = simulate(*drawn)
    path = critical_path(trace)
    assert sum(segment.end - segment.start for segment in path) == pytest.approx(trace.makespan)
    for before, after in pairwise(path):
        assert before.end == after.start
    waits = {segment.cause for segment in path} - {None}
    assert waits <= {Cause.LINK}, "nothing but work and transfers makes a simulated step long"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (WaitCause.ROOM, Cause.MEMORY),
        (WaitCause.RESERVED, Cause.MEMORY),
        (WaitCause.TURN, Cause.TURN),
        (WaitCause.ORDER, Cause.ORDER),
        (WaitCause.PROPOSALS, Cause.GROUP),
        (WaitCause.INPUT, Cause.TURN),  # nothing was ready then: the kind of the first ready task tells
    ],
)
def test_what_the_core_said_is_kept_in_the_records_and_goes_before_what_would_be_inferred(said, cause):
    ran = [record(F0, 0, 0, 0, 1), record(B0, 4, 4, 5, 6)._replace(held=said), record(B1, 3, 6, 6, 8)]
    trace = trace_of(*ran)
    assert [r.held for r in trace.records] == [None, said, None]
    assert (cause, 3, 4) in causes(trace, 0)


def test_every_cause_of_waiting_has_words_and_fits_a_packed_record():
    said = [str(Wait(cause, (F0,), members=(1,))) for cause in WaitCause]
    assert len(set(said)) == len(WaitCause) < 16


def test_every_cause_of_idleness_has_a_row_with_names_of_its_own():
    assert list(CAUSES) == list(Cause)
    for name in ("title", "share", "letter"):
        assert len({getattr(row, name) for row in CAUSES.values()}) == len(Cause)
    assert sorted(chain(*COLUMNS.values())) == sorted(Cause), "each in one column of a table of schedules"


def test_the_task_named_is_one_that_the_cause_holds_back():
    """A backward out of turn was ready first, and the core spoke of the forward at its limit."""
    waited = record(B0, 4, 4, 4, 6)._replace(held=WaitCause.ROOM)
    trace = trace_of(record(F0, 0, 0, 0, 1), waited, record(B1, 1, 6, 6, 8), record(F1, 2, 8, 8, 9))
    (idle,) = (one for one in idleness(trace, False) if one.cause is Cause.MEMORY)
    assert (idle.start, idle.end, idle.awaited) == (1, 4, F1)
