"""Every schedule on its placements, with deliveries and room in random order."""

import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.orders import write_csv
from rrfp_jax.core.events import ROOM, Arrived, WaitCause
from rrfp_jax.core.hints import Ranked
from rrfp_jax.core.orders import FixedOrder, planned_order
from rrfp_jax.core.scheduler import StageScheduler, check_can_end
from rrfp_jax.core.schedules import NAMED, read_csv
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Input, Placement, Task
from tests.support.interleave import World

ONE_CHUNK = ("1f1b", "gpipe", "zb-h1", "zb-h2")
HINTS = sorted(name for name, schedule in NAMED.items() if not isinstance(schedule, FixedOrder))


def placements(stages, chunks):
    return st.sampled_from([Placement(stages, chunks), Placement(stages, chunks, "v")])


@st.composite
def budget(draw, chunks, microbatches, dearest, room):
    """In which each microbatch fits, by itself, with so much to spare at most."""
    cost = st.integers(0, dearest)
    costs = [[draw(cost) for _ in range(microbatches)] for _ in range(chunks)]
    most = draw(st.none() | st.integers(1, microbatches))
    return Budget(costs, max(map(sum, zip(*costs, strict=True))) + draw(st.integers(0, room)), most)


@st.composite
def fixed(draw):
    """A fixed order on a placement and a number of microbatches for which it is defined."""
    name, stages = draw(st.sampled_from(sorted(set(NAMED) - set(HINTS)))), draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 8))
    if name == "interleaved-1f1b":
        return NAMED[name], Placement(stages, draw(st.integers(2, 3))), stages * draw(st.integers(1, 3))
    return NAMED[name], NAMED[name].placement_for(stages), microbatches


@st.composite
def hinted(draw):
    stages, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    placement = draw(placements(stages, chunks))
    microbatches = draw(st.integers(1, 7))
    limit = draw(st.none() | st.integers(1, 4))
    rules = StepRules(
        placement=placement,
        microbatches=microbatches,
        schedule=NAMED[draw(st.sampled_from(HINTS))],
        limit=limit,
        accumulation=draw(st.sampled_from(["index", "arrival"])),
        spare_gradients=draw(st.integers(0, 2)),
    )
    budgets = None
    if draw(st.booleans()):
        budgets = [draw(budget(chunks, microbatches, 5, 6)) for _ in range(stages)]
    return rules, budgets


@settings(max_examples=300, deadline=None)
@given(fixed(), st.integers(0, 2**32))
def test_fixed_orders_end_in_their_order(case, seed):
    schedule, placement, microbatches = case
    rules = StepRules(placement=placement, microbatches=microbatches, schedule=schedule)
    world = World(rules, seed).run()
    for stage, order in enumerate(world.orders):
        assert order == list(schedule.order(stage, placement, microbatches))


@settings(max_examples=600, deadline=None)
@given(hinted(), st.integers(0, 2**32))
def test_hints_end_within_their_limits(case, seed):
    rules, budgets = case
    world = World(rules, seed, budgets).run()
    for added in world.added:
        by_chunk = {}
        for chunk, microbatch in added:
            by_chunk.setdefault(chunk, []).append(microbatch)
        for microbatches in by_chunk.values():
            assert sorted(microbatches) == list(range(rules.microbatches))
            assert rules.accumulation == "arrival" or microbatches == sorted(microbatches)


@pytest.mark.slow(reason="4 s; test_hints_end_within_their_limits has rankings")
@settings(max_examples=200, deadline=None)
@given(fixed(), st.integers(0, 2**32), st.none() | st.integers(1, 3), st.booleans(), st.data())
def test_any_order_may_be_a_ranking(case, seed, limit, reserve, data):
    """Also where it does not fit the limit."""
    schedule, placement, microbatches = case
    rules = StepRules(
        placement=placement,
        microbatches=microbatches,
        schedule=Ranked(schedule, reserve),
        limit=limit,
        accumulation=data.draw(st.sampled_from(["index", "arrival"])),
        spare_gradients=data.draw(st.integers(0, 2)),
    )
    budgets = None
    if data.draw(st.booleans()):
        one = budget(placement.chunks, microbatches, 5, 20)
        budgets = [data.draw(one) for _ in range(placement.stages)]
    world = World(rules, seed, budgets).run()
    for stage, order in enumerate(world.orders):
        assert sorted(order) == sorted(schedule.order(stage, placement, microbatches))


@pytest.mark.parametrize(("limit", "runs_ahead"), [(4, False), (8, True), (None, True)])
def test_a_ranking_fills_the_warm_up_in_order_unless_there_is_room_for_more(limit, runs_ahead):
    """The first microbatch's way back comes next; forwards of the first chunk are there."""
    order, placement = NAMED["zb-v"], NAMED["zb-v"].placement_for(4)
    rules = StepRules(placement=placement, microbatches=16, schedule=Ranked(order), limit=limit)
    stage = StageScheduler(1, rules)
    for j in range(16):
        stage.handle(Arrived(Input(FORWARD.direction, 0, j)))
    own = order.order(1, placement, 16)
    way_back = own.index(Task(FORWARD, 1, 0))
    assert [stage.handle(ROOM).task for _ in range(way_back)] == list(own[:way_back])
    dispatch = stage.handle(ROOM)
    assert (dispatch is not None) == runs_ahead
    if not runs_ahead:
        assert stage.awaited().cause is WaitCause.RESERVED
        stage.handle(Arrived(Input(FORWARD.direction, 1, 0)))
        assert stage.handle(ROOM).task == own[way_back]


CHUNKS_HELD = {
    "zb-v": lambda p: 2 * p,
    "v-zb": lambda p: 2 * p,
    "v-half": lambda p: 2 * ((p + 2) // 2),
    "v-min": lambda p: 2 * ((p + 4) // 3),
    "dualpipe-v": lambda p: 2 * p + 1,
}
"""Chunks of microbatches that a V holds on its fullest stage, as published; 1F1B holds 2 p halves."""


@pytest.mark.parametrize("name", CHUNKS_HELD)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31])
def test_a_v_holds_what_is_published(name, stages):
    placement = NAMED[name].placement_for(stages)
    peaks = []
    for stage in range(stages):
        order = planned_order(NAMED[name], stage, placement, 4 * stages)
        steps = [(task.kind is FORWARD) - (task.kind in (BACKWARD, WEIGHT)) for task in order]
        peaks.append(max(accumulate(steps)))
    assert max(peaks) == CHUNKS_HELD[name](stages)


@pytest.mark.parametrize("shape", ["looped", "v"])
def test_placements_are_bijections(shape):
    placement = Placement(3, 4, shape)
    places = [placement.place(v) for v in range(12)]
    assert sorted(places) == sorted((s, c) for s in range(3) for c in range(4))
    assert [placement.virtual_stage(*place) for place in places] == list(range(12))


def test_a_v_turns_round_on_the_last_stage():
    placement = Placement(3, 2, "v")
    assert [placement.place(v) for v in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert placement.destination(2, Task(FORWARD, 0, 5)) == (2, Task(FORWARD, 1, 5).input)


def test_bfw_is_fused_where_nobody_waits_for_the_input_gradient():
    rules = StepRules(placement=Placement(3), microbatches=2, schedule=NAMED["bfw"])
    world = World(rules, 0).run()
    kinds = [{task.kind.letter for task in order} for order in world.orders]
    assert kinds == [{"F", "B"}, {"F", "I", "W"}, {"F", "I", "W"}]


class TestOrdersThatCannotBe:
    def refused(self, *tasks, match):
        class Listed(FixedOrder):
            def order(self, stage, placement, microbatches):
                return tasks

        with pytest.raises(ValueError, match=match):
            StageScheduler(0, StepRules(placement=Placement(1), microbatches=1, schedule=Listed()))

    def test_repeated(self):
        self.refused(Task(FORWARD, 0, 0), Task(FORWARD, 0, 0), match="F0 is there twice")

    def test_half_split(self):
        self.refused(Task(FORWARD, 0, 0), Task(INPUT, 0, 0), match="W0 is missing")

    def test_backwards(self):
        tasks = Task(FORWARD, 0, 0), Task(WEIGHT, 0, 0), Task(INPUT, 0, 0)
        self.refused(*tasks, match="W0 stands before I0")

    def test_foreign(self):
        tasks = Task(FORWARD, 0, 0), Task(INPUT, 0, 0), Task(WEIGHT, 0, 0), Task(FORWARD, 0, 1)
        self.refused(*tasks, match="F1 does not belong")


@pytest.mark.parametrize("name", sorted(NAMED))
def test_who_turns_back_at_the_end_of_the_model(name):
    """Each backward of the last virtual stage follows its forward; by hints mostly, whatever arrives."""
    schedule = NAMED[name]
    placement = schedule.placement_for(4, 1)
    rules = StepRules(placement=placement, microbatches=16, schedule=schedule)
    stage, chunk = placement.place(placement.last)
    pairs = []
    for seed in range(4):
        order = World(rules, seed).run().orders[stage]
        pairs += [(one, after) for one, after in pairwise(order) if one[:2] == (FORWARD, chunk)]
    turned = sum(after.kind is not FORWARD and after[1:] == one[1:] for one, after in pairs) / len(pairs)
    apart = name in ("gpipe", "f-priority", "v-half", "dualpipe-v")
    assert schedule.turns_back(placement, 16) != apart
    assert turned >= (1.0 if isinstance(schedule, FixedOrder) else 0.6) if rules.joined else turned < 0.6
    assert not StepRules(placement=placement, microbatches=16, schedule=schedule, forward_only=True).joined


@pytest.mark.parametrize("name", sorted(NAMED))
def test_all_numbers_of_microbatches_have_one_answer_to_who_turns_back(name):
    """Else steps of unlike sizes would have unlike programs."""
    for stages in range(1, 10):
        placement = NAMED[name].placement_for(stages, 1)
        counts = range(stages, 4 * stages, stages) if "interleaved" in name else range(1, 3 * stages)
        assert len({NAMED[name].turns_back(placement, count) for count in counts}) == 1, stages


def test_a_budget_too_small_for_one_microbatch_is_refused():
    rules = StepRules(placement=Placement(1), microbatches=2, schedule=NAMED["bf"])
    with pytest.raises(ValueError, match="microbatch 1 costs 5"):
        StageScheduler(0, rules, Budget([[1, 5]], 4))


def test_shuffled_seeds_differ():
    """The world's randomness is real: two seeds give different orders."""
    rules = StepRules(placement=Placement(3), microbatches=6, schedule=NAMED["bfw"])
    assert len({str(World(rules, random.randrange(2**30)).run().orders) for _ in range(5)}) > 1


class TestCsv:
    @settings(max_examples=50, deadline=None)
    @given(fixed())
    def test_round_trip(self, case):
        schedule, placement, microbatches = case
        read = read_csv(write_csv(schedule, placement, microbatches))
        assert read.microbatches == microbatches
        for stage in range(placement.stages):
            again = read.order(stage, read.placement, microbatches)
            if placement.stages > 1:  # on one stage both placements are the same
                assert read.placement == placement
            assert list(again) == list(schedule.order(stage, placement, microbatches))

    def test_idle_cells_mean_nothing(self):
        order = read_csv("0F0,,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
        assert [str(t) for t in order.rows[1]] == ["F0", "B0", "F1", "B1"]

    @pytest.mark.parametrize(
        "text, match",
        [
            ("0F0,0G0", "line 1, cell 2: '0G0' is no task"),
            ("0F0,0B0\n\n0F1,1F0", "line 3, cell 1: 0F1"),
            ("", "no tasks"),
            ("0F0,99999999999F0", "virtual stage 1 has no tasks, although 99999999999 has some"),
        ],
    )
    def test_refused(self, text, match):
        with pytest.raises(ValueError, match=match):
            read_csv(text)

    def test_other_sizes_are_refused(self):
        with pytest.raises(ValueError, match="not for"):
            read_csv("0F0,0B0").order(0, Placement(1), 2)


@settings(max_examples=100, deadline=None)
@given(fixed())
def test_the_orders_of_the_field_can_end(case):
    schedule, placement, microbatches = case
    check_can_end(StepRules(placement=placement, microbatches=microbatches, schedule=schedule))


def test_orders_that_wait_for_each_other_are_named():
    order = read_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
    rules = StepRules(placement=order.placement, microbatches=2, schedule=order)
    with pytest.raises(ValueError, match=r"deadlock: stage 0 waits for B0.*stage 1 waits for F1"):
        check_can_end(rules)
