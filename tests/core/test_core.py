"""The scheduling core: events in, instructions out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core.admission import Accumulator
from rrfp_jax.core.events import ROOM, Arrived, IllegalEvent, Room, ScheduleError, WaitCause
from rrfp_jax.core.hints import BF, Hint, Ranked
from rrfp_jax.core.orders import FixedOrder, GPipe, OneFOneB
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget
from rrfp_jax.core.tasks import Direction, Placement
from tests.support.interleave import World, check_invariants
from tests.support.small_step import B, Dispatch, F, rules
from tests.verification.exploration.keys import key_of


def names(tasks):
    return " ".join(map(str, tasks))


def fixed_order(schedule, stage, stages, microbatches):
    return names(schedule.order(stage, Placement(stages), microbatches))


class TestOrders:
    def test_1f1b(self):
        assert [fixed_order(OneFOneB(), s, 4, 5) for s in range(4)] == [
            "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
            "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
            "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
            "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
        ]

    def test_1f1b_with_fewer_microbatches_than_stages(self):
        assert fixed_order(OneFOneB(), 0, 4, 2) == "F0 F1 B0 B1"

    def test_gpipe(self):
        assert fixed_order(GPipe(), 1, 4, 3) == "F0 F1 F2 B0 B1 B2"

    @pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()])
    def test_refuse_several_chunks(self, schedule):
        with pytest.raises(ValueError, match="one chunk"):
            schedule.order(0, Placement(2, 2), 4)

    def test_incomplete_order_is_named(self):
        class Lossy(FixedOrder):
            def order(self, stage, placement, microbatches):
                return [F(0), B(0), F(1)]

        with pytest.raises(ValueError, match="B1 is missing"):
            StageScheduler(0, rules(microbatches=2, schedule=Lossy()))


class TestBF:
    """Stage 1 of 2 is the last: its own forwards make its backwards ready."""

    def run(self, *events, stage=1, **kwargs):
        scheduler, ran = StageScheduler(stage, rules(**kwargs)), []
        for event in events:
            dispatch = scheduler.handle(event)
            ran += [dispatch.task] if dispatch else []
            check_invariants(scheduler)
        return names(ran)

    def test_rounds_of_backward_then_forward(self):
        events = [Arrived(F(0).input), Arrived(F(1).input), Arrived(F(2).input), *[ROOM] * 6]
        assert self.run(*events) == "F0 B0 F1 B1 F2 B2"

    def test_runs_what_is_ready_whatever_its_index(self):
        assert self.run(Arrived(F(2).input), ROOM, ROOM, Arrived(F(0).input), ROOM, ROOM) == "F2 B2 F0 B0"

    def test_a_skipped_direction_keeps_no_credit(self):
        first_stage = [ROOM] * 3 + [Arrived(B(0).input), Arrived(B(1).input), ROOM, ROOM, ROOM]
        assert self.run(*first_stage, stage=0, microbatches=5) == "F0 F1 F2 B0 F3 B1"

    def test_room_without_work_is_not_kept(self):
        scheduler = StageScheduler(1, rules())
        assert scheduler.handle(ROOM) is None
        assert scheduler.handle(Arrived(F(0).input)) is None
        assert scheduler.handle(ROOM) == Dispatch(F(0))

    def test_tie_order_with_chunks(self):
        scheduler = StageScheduler(0, rules(stages=2, microbatches=2, chunks=2))
        for _ in range(2):
            scheduler.handle(ROOM)
        scheduler.handle(Arrived(F(1, 1).input))
        scheduler.handle(Arrived(F(0, 1).input))
        scheduler.handle(ROOM)
        scheduler.handle(ROOM)
        for task in (B(1, 1), B(0, 1)):
            scheduler.handle(Arrived(task.input))
        assert names(scheduler.ready_tasks()) == "B0.1 B1.1"


class TestHint:
    def test_twenty_lines_suffice(self):
        class BackwardFirst(Hint):
            def choose(self, state, ready):
                for way in (Direction.BACKWARD, Direction.FORWARD):
                    if (task := ready.first(way)) is not None:
                        assert task in ready
                        return task, state
                return None

        world = World(rules(stages=3, microbatches=4, schedule=BackwardFirst()), seed=0).run()
        assert sorted(world.orders[0]) == sorted([F(j) for j in range(4)] + [B(j) for j in range(4)])

    def test_what_it_chooses_must_be_runnable_now(self):
        class Stubborn(Hint):
            def choose(self, state, ready):
                task = state or ready.first(Direction.FORWARD)
                return task, task

        scheduler = StageScheduler(0, rules(schedule=Stubborn()))
        assert scheduler.handle(ROOM) == Dispatch(F(0))
        with pytest.raises(ScheduleError, match="chose F0 on stage 0, which cannot run now"):
            scheduler.handle(ROOM)

    @pytest.mark.parametrize("wrong", [F(0), (F(99), None), ("F0", None)])
    def test_what_it_returns_must_be_a_task_and_a_state(self, wrong):
        class Slip(Hint):
            def choose(self, state, ready):
                return wrong

        with pytest.raises(ScheduleError, match="a hint returns a task of this step, and its state"):
            StageScheduler(0, rules(schedule=Slip())).handle(ROOM)

    @pytest.mark.parametrize("wrong", [(0, 99), (0, -1), (1, 0)])
    def test_what_it_splits_must_be_there(self, wrong):
        class Some(BF):
            def split(self, stage, placement, microbatches):
                return [wrong]

        chunk, microbatch = wrong
        with pytest.raises(ValueError, match=rf"split\(\) has chunk {chunk} of microbatch {microbatch}"):
            StageScheduler(0, rules(schedule=Some()))

    def test_a_chunk_may_split_some_of_its_backwards(self):
        """B1 has no place for its gradient before that of 0; I2 needs none."""

        class Some(BF):
            def split(self, stage, placement, microbatches):
                return [(0, 2)]

        scheduler = StageScheduler(1, rules(schedule=Some(), spare_gradients=0))
        for j in (1, 2):
            scheduler.handle(Arrived(F(j).input))
        ran = [dispatch.task for _ in range(4) if (dispatch := scheduler.handle(ROOM))]
        assert names(ran) == "F1 F2 I2"
        assert scheduler.tasks == 7


class TestAccumulation:
    def test_parks_ahead_of_turn_and_drains_in_order(self):
        scheduler = StageScheduler(1, rules(microbatches=4))
        added = []
        for j in (2, 1, 0, 3):
            scheduler.handle(Arrived(F(j).input))
            for _ in range(2):
                added.append(scheduler.handle(ROOM).additions)
        assert added == [(), (), (), (), (), (0, 1, 2), (), (3,)]

    def test_a_backward_without_a_spare_buffer_waits(self):
        scheduler = StageScheduler(1, rules(microbatches=3, spare_gradients=0))
        scheduler.handle(Arrived(F(1).input))
        assert scheduler.handle(ROOM) == Dispatch(F(1))
        assert scheduler.handle(ROOM) is None
        assert str(scheduler.awaited()) == "the gradients before that of B1, which has no place"
        assert scheduler.awaited(named=False).cause is WaitCause.TURN

    def test_arrival_adds_as_they_come(self):
        scheduler = StageScheduler(1, rules(microbatches=2, accumulation="arrival"))
        scheduler.handle(Arrived(F(1).input))
        scheduler.handle(ROOM)
        assert scheduler.handle(ROOM) == Dispatch(B(1), additions=(1,))

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="'index' or 'arrival'"):
            Accumulator(1, "random", 2)


class TestIllegalEvents:
    @pytest.mark.parametrize(
        ("stage", "task", "expected"),
        [
            (0, F(0), "comes from another"),
            (2, B(0), "comes from another"),
            (1, F(9), "microbatch < 3"),
            (1, F(0, 3), "chunk < 1"),
            (1, B(0), "after the microbatch's own forward"),
        ],
    )
    def test_named_and_without_effect(self, stage, task, expected):
        scheduler = StageScheduler(stage, rules(stages=3))
        before = names(scheduler.ready_tasks())
        with pytest.raises(IllegalEvent, match=expected):
            scheduler.handle(Arrived(task.input))
        assert names(scheduler.ready_tasks()) == before
        check_invariants(scheduler)

    def test_twice(self):
        scheduler = StageScheduler(1, rules())
        scheduler.handle(Arrived(F(0).input))
        scheduler.handle(Arrived(F(2).input))
        said = "each input once; of microbatch 0 so far: arrived F0; recently: arrived F0, arrived F2"
        with pytest.raises(IllegalEvent, match=said):
            scheduler.handle(Arrived(F(0).input))


worlds = st.fixed_dictionaries(
    {
        "stages": st.integers(1, 5),
        "microbatches": st.integers(1, 8),
        "limit": st.none() | st.integers(1, 4),
        "accumulation": st.sampled_from(["index", "arrival"]),
        "spare_gradients": st.integers(0, 3),
        "forward_only": st.booleans(),
    }
)


class TestForesight:
    """BF on the last stage; F0 and F1 are on their way."""

    @pytest.fixture
    def scheduler(self):
        return StageScheduler(1, rules(stages=2, microbatches=3))

    def test_of_the_chosen_task_the_input_has_arrived_of_others_it_has_not(self, scheduler):
        assert scheduler.handle(Room(foreseen=[F(1).input, F(0).input])).task == F(0)
        assert scheduler.ready_tasks() == [B(0)]
        with pytest.raises(IllegalEvent, match="each input once"):
            scheduler.handle(Arrived(F(0).input))
        assert scheduler.handle(Arrived(F(1).input)) is None
        assert names(scheduler.ready_tasks()) == names([F(1), B(0)])

    def test_without_a_choice_nothing_has_arrived(self):
        scheduler = StageScheduler(1, rules(stages=2, microbatches=3, schedule=OneFOneB()))
        key = key_of(scheduler)
        assert scheduler.handle(Room(foreseen=[F(1).input])) is None and key_of(scheduler) == key
        assert scheduler.handle(Room(foreseen=[F(1).input, F(0).input])).task == F(0)

    def test_what_is_foreseen_and_held_back_holds_back_nothing_that_is_here(self):
        """F1 leaves no room for the warm-up. F2 costs nothing, and is behind it only once it is there."""
        ranking = rules(stages=3, microbatches=4, schedule=Ranked(OneFOneB()))
        scheduler = StageScheduler(1, ranking, Budget([[0, 1, 0, 1]], 1))
        scheduler.handle(Arrived(F(2).input))
        assert scheduler.handle(Room(foreseen=[F(1).input])).task == F(2)
        assert scheduler.handle(Arrived(F(1).input)) is None, "it is yet to come"

    @pytest.mark.parametrize("wrong", [B(0).input, F(3).input, F(1).input])
    def test_what_cannot_come_cannot_be_foreseen(self, scheduler, wrong):
        scheduler.handle(Arrived(F(1).input))
        key = key_of(scheduler)
        with pytest.raises(IllegalEvent):
            scheduler.handle(Room(foreseen=[F(0).input, wrong]))
        assert key_of(scheduler) == key


class TestAnyInterleaving:
    """No deadlock, each task once, dependencies and limit kept: checked by `World` after every event."""

    @settings(max_examples=300, deadline=None)
    @given(worlds, st.sampled_from([BF(), GPipe(), OneFOneB()]), st.integers(0, 2**20))
    def test_one_chunk(self, world, schedule, seed):
        done = World(rules(schedule=schedule, **world), seed).run()
        if world["forward_only"]:
            assert not any(done.added)
            return
        for stage in range(world["stages"]):
            added = [j for _, j in done.added[stage]]
            assert sorted(added) == list(range(world["microbatches"]))
            if world["accumulation"] == "index":
                assert added == sorted(added)
            if isinstance(schedule, FixedOrder):
                planned = schedule.order(stage, Placement(world["stages"]), world["microbatches"])
                assert done.orders[stage] == list(planned)

    @settings(max_examples=200, deadline=None)
    @given(worlds, st.integers(2, 3), st.integers(0, 2**20))
    def test_looped_chunks(self, world, chunks, seed):
        World(rules(chunks=chunks, **world), seed).run()

    @settings(max_examples=100, deadline=None)
    @given(worlds, st.integers(0, 2**20))
    def test_recorded_events_replay_to_the_same_instructions(self, world, seed):
        first, second = (World(rules(**world), seed).run() for _ in range(2))
        assert first.orders == second.orders
        assert first.added == second.added
