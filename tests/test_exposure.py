"""The time in which a group idles only because nobody has decided; and deciding ahead of it."""

import pytest

from benchmarks.exposure import MemberStep, exposures
from rrfp_jax.core.hints import BF
from rrfp_jax.core.rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Placement, Task
from rrfp_jax.core.trace import TaskRecord
from rrfp_jax.runtime.device import DEEPEST, LEAD_SECONDS, Running
from rrfp_jax.runtime.paced import PacedQueue

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
