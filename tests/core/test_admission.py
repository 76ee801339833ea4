"""What may be in flight: the rules spelled out, and as a stage scheduler applies them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core.admission import ByChunk, Whole
from rrfp_jax.core.events import ROOM, Arrived
from rrfp_jax.core.hints import BFW, FPriority
from rrfp_jax.core.orders import GPipe
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Direction, Input, Placement
from tests.support.drain import Drain
from tests.support.interleave import check_invariants
from tests.support.small_step import B, Dispatch, F, rules


@st.composite
def charges(draw):
    """Costs by chunk and microbatch, and a limit that the dearest microbatch just fits or nearly so."""
    chunks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    row = st.lists(st.integers(0, 9), min_size=microbatches, max_size=microbatches)
    costs = draw(st.lists(row, min_size=chunks, max_size=chunks))
    return costs, max(map(sum, zip(*costs, strict=True))) + draw(st.integers(0, 20))


@settings(max_examples=300, deadline=None)
@given(charges(), st.randoms())
def test_the_rule_spelled_out(given, random):
    """Whatever is admitted and released in between, each answer is that of the rule."""
    costs, limit = given
    chunks, microbatches = range(len(costs)), range(len(costs[0]))
    admission = ByChunk(costs, limit)
    waiting, held, released = {(c, j) for c in chunks for j in microbatches}, set(), set()

    def safe(held, waiting):
        return all(
            sum(costs[c][j] for c, j in waiting if j == q) + sum(costs[c][k] for c, k in held if k >= q)
            <= limit
            for q in microbatches
            if any((c, q) not in released for c in chunks)
        )

    while waiting or held:
        admitted = [place for place in sorted(waiting) if safe(held | {place}, waiting - {place})]
        assert admitted == [place for place in sorted(waiting) if admission.admits(*place)]
        for chunk, j in waiting:
            if admission.refuses_beyond(chunk, j):
                assert all(k < j for c, k in admitted if c == chunk)
        if admitted and (not held or random.random() < 0.6):
            place = random.choice(admitted)
            admission.admit(*place)
            waiting.remove(place)
            held.add(place)
        else:
            place = random.choice(sorted(held))
            admission.release(*place)
            held.remove(place)
            released.add(place)
        assert admission.held == sum(costs[c][k] for c, k in held) <= limit


@settings(max_examples=300, deadline=None)
@given(charges(), st.randoms())
def test_the_rule_of_whole_microbatches_spelled_out(given, random):
    costs, limit = given
    totals = [sum(own) for own in zip(*costs, strict=True)]
    admission, waiting, held = Whole(costs, limit), set(range(len(totals))), []
    while waiting:
        admitted = []
        for j in sorted(waiting, key=lambda j: random.random()):
            reserve = max((totals[k] for k in waiting if k < j), default=0)
            admits = sum(totals) <= limit or sum(totals[k] for k in held) + totals[j] + reserve <= limit
            assert admission.admits(0, j) == admits
            admitted += [j] if admits else []
        for j in waiting:
            if admission.refuses_beyond(0, j):
                assert all(k < j for k in admitted)
        if admitted and (not held or random.random() < 0.6):
            j = random.choice(admitted)
            for chunk in range(len(costs)):
                assert chunk == 0 or admission.admits(chunk, j)
                admission.admit(chunk, j)
            waiting.remove(j)
            held.append(j)
        else:
            j = held.pop(random.randrange(len(held)))
            for chunk in range(len(costs)):
                admission.release(chunk, j)
        assert admission.held == sum(totals[k] for k in held)


def test_equal_costs_need_no_search():
    admission = ByChunk([[1] * 1000], 1)
    admission.admit(0, 0)
    assert admission.refuses_beyond(0, 1)


def test_room_for_an_order():
    """F2 may take its place before F1 and B0 if these fit beside it; F0 in any case."""
    admission = ByChunk([[1, 2, 1]], 3)
    admission.admit(0, 0)
    order = [F(0), B(0), F(1), B(0), F(2)]
    assert admission.leaves_room(F(2), order, 0, 3)
    assert not admission.leaves_room(F(2), order, 2, 4)
    assert admission.leaves_room(F(0), order, 2, 5)
    admission.release(0, 0)  # F1 is the lowest now, and what is past does not count
    assert admission.leaves_room(F(2), order, 0, 4)


def test_a_cheap_one_may_be_admitted_beyond_a_dear_one():
    """F1 would need 5 and a reserve of 4 for F0, which has not arrived; F2 needs 1 and a reserve of 5."""
    scheduler = StageScheduler(1, rules(), Budget([[4, 5, 1]], 6))
    for j in (1, 2):
        scheduler.handle(Arrived(F(j).input))
    assert scheduler.handle(ROOM) == Dispatch(F(2))


def test_limit_counts_until_the_backward_is_dispatched():
    scheduler = StageScheduler(0, rules(limit=2, microbatches=4))
    assert [bool(scheduler.handle(ROOM)) for _ in range(3)] == [True, True, False]
    scheduler.handle(Arrived(B(0).input))
    assert scheduler.handle(ROOM) == Dispatch(B(0), additions=(0,))
    assert scheduler.handle(ROOM) == Dispatch(F(2))


def test_reserve_for_lower_microbatches():
    scheduler = StageScheduler(1, rules(stages=3, limit=1))
    scheduler.handle(Arrived(F(1).input))
    assert scheduler.handle(ROOM) is None
    assert "room for F1" in str(scheduler.awaited())
    scheduler.handle(Arrived(F(0).input))
    assert scheduler.handle(ROOM) == Dispatch(F(0))


def test_fixed_orders_are_not_subject_to_the_limit():
    scheduler = StageScheduler(0, rules(limit=1, schedule=GPipe()))
    assert all(scheduler.handle(ROOM) for _ in range(3))


def test_forward_only_leaves_at_dispatch():
    scheduler = StageScheduler(0, rules(limit=1, microbatches=3, forward_only=True))
    for _ in range(3):
        scheduler.handle(ROOM)
        assert scheduler.in_flight == 0
    assert scheduler.finished


def test_limit_below_one():
    with pytest.raises(ValueError, match="limit=0"):
        StageScheduler(0, rules(limit=0))


def scheduler(stage=0, chunks=1, limit=1, schedule=None, admission=False):
    hint = schedule or FPriority()
    rules = StepRules(
        placement=Placement(2, chunks),
        microbatches=3,
        schedule=hint if admission else Drain(hint, limit),
        limit=limit if admission else None,
    )
    return StageScheduler(stage, rules)


def run(scheduler, *events):
    """The tasks dispatched on some events; a text is an arrival for the task of that name."""
    ran = []
    for event in events:
        dispatch = scheduler.handle(arrived(event) if isinstance(event, str) else event)
        ran += [str(dispatch.task)] if dispatch else []
        check_invariants(scheduler)
    return " ".join(ran)


def arrived(name):
    microbatch, _, chunk = name[1:].partition(".")
    direction = Direction.FORWARD if name[0] == "F" else Direction.BACKWARD
    return Arrived(Input(direction, int(chunk or 0), int(microbatch)))


class TestOneChunk:
    def test_no_forward_while_there_are_as_many_as_the_limit(self):
        stage = scheduler(limit=2)
        assert run(stage, ROOM, ROOM, ROOM) == "F0 F1"
        assert run(stage, "B1", ROOM, ROOM) == "B1 F2"

    def test_weight_gradients_may_run(self):
        stage = scheduler(1, schedule=BFW())
        assert run(stage, "F0", "F1", ROOM, ROOM, ROOM, ROOM) == "F0 I0 W0 F1"

    def test_keeps_nothing_back_for_lower_microbatches(self):
        assert run(scheduler(1), "F1", ROOM) == "F1"
        assert run(scheduler(1, admission=True), "F1", ROOM) == ""


class TestSeveralChunks:
    def test_one_microbatch_after_the_other_waiting_for_each_task(self):
        stage = scheduler(1, chunks=2)
        assert run(stage, "F1", "F0", ROOM, ROOM, ROOM) == "F0"  # at the limit, and F0.1 is not ready
        assert run(stage, "F0.1", ROOM, ROOM) == "F0.1 B0.1"
        assert run(stage, ROOM, "B0", ROOM) == "B0"
        assert run(stage, ROOM) == "F1"  # below the limit again

    def test_may_exceed_the_limit_by_the_chunks(self):
        stage = scheduler(1, chunks=2, limit=2)
        assert run(stage, "F1", ROOM, "F1.1", ROOM) == "F1 F1.1"
        assert run(stage, ROOM, "F0", ROOM, "F0.1", ROOM) == "F0 F0.1"  # four forwards of two microbatches
        assert run(stage, ROOM, "B0", ROOM) == "B0.1 B0"
        assert stage.in_flight == 2  # chunks

    def test_admission_holds_microbatches_to_the_limit(self):
        stage = scheduler(1, chunks=2, limit=2, admission=True)
        assert run(stage, "F1", ROOM, "F1.1", ROOM, "F2", ROOM) == "F1 F1.1 B1.1"


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="limit=0"):
        scheduler(limit=0)
