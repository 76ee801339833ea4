"""What a stage keeps of its latest events: quoted by errors, told to a new scheduler."""

import pytest

from rrfp_jax.core.events import ROOM, Arrived, Chosen, IllegalEvent, Room, ScheduleError
from rrfp_jax.core.hints import BF, Hint
from rrfp_jax.core.scheduler import QUOTED, StageScheduler
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from tests.support.replay import ReplayError, replay
from tests.support.small_step import B, F


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
    again = replay(scheduler)
    assert (again.key(), again.in_flight, list(again.log)) == (
        scheduler.key(), scheduler.in_flight, list(scheduler.log)
    )  # fmt: skip
    scheduler.log.entries[-1] = B(2)
    with pytest.raises(ReplayError, match="stage 1, event 6, room: B2 before, F0 now"):
        replay(scheduler)
