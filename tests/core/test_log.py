"""What a stage keeps of its latest events: quoted by errors, told to a new scheduler."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core.events import ROOM, Arrived, Chosen, IllegalEvent, Room, ScheduleError
from rrfp_jax.core.hints import BF, Hint
from rrfp_jax.core.scheduler import QUOTED, StageScheduler
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Kind, Placement, Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import TableCosts, recorded
from rrfp_jax.trace.records import Part, StepTrace
from rrfp_jax.trace.replayed import replay_of
from tests.support.interleave import ReplayError, replay
from tests.support.small_step import B, F, all_foreseen, simulated
from tests.support.spoilt import rules
from tests.support.steps import steps
from tests.verification.exploration.keys import key_of


def stage(number=1, schedule=None, budget=None, kind=StageScheduler, microbatches=30):
    rules = StepRules(placement=Placement(2), microbatches=microbatches, schedule=schedule or BF())
    return kind(number, rules, budget)


def told(scheduler, *events):
    for event in events:
        scheduler.handle(event)
    return scheduler


def test_holds_what_changed_something():
    first, second, late = Arrived(F(1).input), Arrived(F(0).input), Room({F(0)})
    scheduler = told(stage(), ROOM, first, late, ROOM, second, ROOM, Chosen(B(0)), ROOM)
    assert list(scheduler.log) == [
        (first, None), (late, F(1)), (ROOM, B(1)), (second, None), (ROOM, F(0)), (Chosen(B(0)), B(0))
    ]  # fmt: skip


def test_is_bounded():
    class Short(StageScheduler):
        kept = 5

    scheduler = stage(0, kind=Short)
    told(scheduler, *[ROOM] * 9)
    assert [task for _, task in scheduler.log] == [F(j) for j in range(4, 9)]
    with pytest.raises(ValueError, match="only the latest 5 entries"):
        replay(scheduler)


def test_an_error_tells_a_microbatch_s_story_and_the_latest_events():
    scheduler = told(stage(0), ROOM, Arrived(B(0).input), *[ROOM] * 20)
    with pytest.raises(IllegalEvent) as caught:
        scheduler.handle(Arrived(B(0).input))
    said = str(caught.value)
    assert "'arrived B0' is illegal: expected each input once; of microbatch 0 so far: " in said
    assert "dispatched F0, arrived B0, dispatched B0; recently: " in said
    latest = said.split("recently: ")[1].split(", ")
    assert len(latest) == QUOTED
    assert latest[-1] == "dispatched F19"


def test_a_hint_s_error_quotes_them_too():
    class Wayward(Hint):
        def choose(self, state, ready):
            return F(7), state

    scheduler = told(stage(schedule=Wayward()), Arrived(F(0).input))
    with pytest.raises(ScheduleError, match=r"chose F7 .* cannot run now; recently: arrived F0"):
        scheduler.handle(ROOM)


def test_replays_to_the_same_state():
    scheduler = stage(budget=Budget([[1] * 30], 3))
    told(scheduler, *[Arrived(F(j).input) for j in (2, 0, 1)], Room({F(0)}), ROOM, Chosen(F(2)), ROOM)
    told(scheduler, Room(foreseen=frozenset([F(3).input, F(4).input])), Arrived(F(4).input), ROOM)
    again = replay(scheduler)
    assert (key_of(again), again.in_flight, list(again.log)) == (
        key_of(scheduler), scheduler.in_flight, list(scheduler.log)
    )  # fmt: skip
    scheduler.log[-1] = ROOM, B(2)
    with pytest.raises(ReplayError, match="stage 1, event 9, room: B2 before, F4 now"):
        replay(scheduler)


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


@pytest.mark.parametrize(("name", "speedup"), [("1f1b", 3), ("zb-v", 3), ("bfw", 1)])
def test_a_task_dispatched_before_its_input_came_runs_once_it_is_there(name, speedup):
    trace, _, _ = simulated(name, "log-normal")
    own = StepRules(placement=trace.placement, microbatches=8, schedule=by_name(name), limit=5)
    costs, found = recorded(trace), replay_of(all_foreseen(trace))
    assert found.costs.durations == pytest.approx(costs.durations)
    faster = {place: seconds / speedup for place, seconds in costs.durations.items()}
    true = simulate(own, replace(costs, durations=faster)).makespan
    replayed = simulate(own, replace(found.costs, durations=faster), lead=EARLY, leads=found.leads)
    assert replayed.makespan == pytest.approx(true)
