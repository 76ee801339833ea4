"""The time in which a group idles only because nobody has decided; and deciding ahead of it."""

import time

import pytest

from benchmarks.agreement import MemberStep, exposures
from benchmarks.paced_queue import PacedQueue
from rrfp_jax.core.foresight import DEEPEST
from rrfp_jax.core.hints import BF
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Placement, Task
from rrfp_jax.runtime.engine.device import LEAD_SECONDS, Running
from rrfp_jax.runtime.engine.pacing import JitteredQueue
from rrfp_jax.trace.records import TaskRecord

RULES = StepRules(placement=Placement(2), microbatches=2, schedule=BF())


def step(*tasks):
    """One rank of stage 1, from (task, when it was ready, when it was known, start, end)."""
    records = [TaskRecord(1, task, 0, ready, known, start, end) for task, ready, known, start, end in tasks]
    return MemberStep(records, [known for _, _, known, _, _ in tasks])


F0, F1, B0, B1 = (Task(kind, 0, j) for kind in (FORWARD, BACKWARD) for j in (0, 1))


def test_from_the_last_arrival_of_a_task_that_can_run_to_the_last_rank_that_knows():
    leader = step((F0, 1.0, 1.1, 1.1, 2), (B0, 1.1, 1.8, 2, 3), (F1, 2.5, 2.9, 3, 4), (B1, 3, 3.9, 4, 5))
    follower = step(
        (F0, 1.2, 1.5, 1.5, 2.5), (B0, 1.5, 2.1, 2.5, 3), (F1, 2.0, 3.5, 3.5, 4), (B1, 3, 4, 4, 5)
    )
    # F0: here on both at 1.2, known at 1.5. B0: idle at 2, known at 2.1. F1: idle at 3. B1: known as it ends.
    assert exposures(RULES, [leader, follower], [leader]) == pytest.approx([0.3, 0.1, 0.5, 0.0])


def test_nothing_is_exposed_while_an_input_is_missing_somewhere():
    leader = step((F0, 1.0, 1.1, 1.1, 2), (B0, 1.1, 1.8, 2, 3), (F1, 2.5, 2.9, 3, 4), (B1, 3, 3.9, 4, 5))
    follower = step((F0, 9.0, 1.5, 9.0, 9.5), (B0, 9, 1.9, 9.5, 10), (F1, 9, 3, 10, 11), (B1, 9, 4, 11, 12))
    assert exposures(RULES, [leader, follower], [leader]) == pytest.approx([0.0] * 4)


def test_a_task_that_was_not_chosen_counts_too():
    leader = step((F1, 1.4, 1.5, 1.5, 2), (B1, 1.5, 1.8, 2, 3), (F0, 1.0, 2.9, 3, 4), (B0, 3, 3.9, 4, 5))
    assert exposures(RULES, [leader], [leader])[0] == pytest.approx(0.5)  # F0 could have run at 1.0


def test_a_device_has_room_earlier_and_for_more_where_decisions_are_made_ahead():
    queue = PacedQueue("device", lambda: None, lambda running: 1.0)
    with queue:
        rooms = []
        for ahead in (0.0, 0.25):
            queue.decide_ahead(ahead)
            for j in range(len(queue.running), DEEPEST if ahead else 2):
                queue.submit(Running(0, 0, Task(FORWARD, 0, j), 0, None, None, 0.0, 100.0))
                rooms.append(queue.room_at(100.0))
    assert rooms[:2] == pytest.approx([101.0 - LEAD_SECONDS, float("inf")])
    assert rooms[2] == pytest.approx(103.0 - LEAD_SECONDS - 0.25) and rooms[-1] == float("inf")


def program(microbatch, dispatched, end=0.0):
    return Running(0, 0, Task(FORWARD, 0, microbatch), 0, "F", Token(), 0.0, dispatched, end)


class Token:
    """Of a program that is still running."""

    def is_ready(self):
        return False

    def block_until_ready(self):
        """It has ended."""


@pytest.fixture
def jittered():
    """A device that ends each task 1000 s late; its first has just ended after one second."""
    queue = JitteredQueue("device", lambda: None, lambda running, seconds: 1000.0)
    with queue:
        now = time.perf_counter()
        queue.submit(program(0, now - 5.0, now - 4.0))
        assert queue.ended() == []
        yield queue, now + 996.0


def test_a_delay_gives_no_room_to_who_decides_alone(jittered):
    queue, end = jittered
    assert queue.room_at(end - 1.0) == float("inf") and queue.next_event(0.0) == end


def test_a_delay_gives_room_as_much_earlier_as_a_group_decides_ahead(jittered):
    queue, end = jittered
    queue.decide_ahead(0.25)
    assert queue.room_at(0.0) == queue.next_event(0.0) == pytest.approx(end - LEAD_SECONDS - 0.25)


def test_what_a_group_decides_behind_a_delay_counts_as_run_behind_it(jittered):
    queue, end = jittered
    queue.decide_ahead(0.25)
    now = time.perf_counter()
    queue.submit(program(1, now - 3.0, now - 1.0))
    assert queue.ended() == []
    second = queue._held[1]
    assert second.start == pytest.approx(end) and second.end == pytest.approx(end + 2.0 + 1000.0)
    assert [task.microbatch for task in queue.running] == [0, 1]
