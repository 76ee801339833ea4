"""Processes that share a stage, while what they run changes from step to step, or is cut short."""

import json

import pytest

from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.tasks import Placement
from tests.support import group_changes as changes
from tests.support import toy
from tests.train.test_processes import command

pytestmark = pytest.mark.slow(reason="a run of four processes; core/test_group.py has the protocol")

RANKS = 4


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of four ranks found in one launch that goes through all changes."""
    folder = tmp_path_factory.mktemp("changes")
    ranks = ("-n", RANKS, "-m", "tests.support.group_changes", folder)
    status, said = command("rrfp_jax", "launch", *ranks, folder=folder, limit=400.0)
    assert status == 0, said
    return [json.loads((folder / f"ranks-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture
def changed(found):
    """What each rank found in a change, step by step."""

    def of(change):
        steps = [rank[change] for rank in found]
        for one, other in (steps[:2], steps[2:]):
            assert [step["order"] for step in one] == [step["order"] for step in other]
        for own in steps:
            assert [step["loss"] for step in own] == [step["loss"] for step in steps[0]]
        return steps

    return of


def test_nothing_is_left_of_the_messages_once_the_trainers_are_gone(found):
    assert [rank["left"] for rank in found] == [0] * RANKS


@pytest.fixture(scope="module")
def alone():
    """The losses of one process."""
    return [report.loss for report in toy.trainer(1, data=changes.data).steps(len(changes.SCHEDULES))]


def test_hints_and_fixed_orders_in_turns(changed, alone):
    ranks = changed("schedules")
    assert [step["loss"] for step in ranks[0]] == pytest.approx(alone, rel=1e-4)
    for rank, steps in enumerate(ranks):
        for schedule, step in zip(map(by_name, changes.SCHEDULES), steps, strict=True):
            if isinstance(schedule, FixedOrder):
                order = schedule.order(rank // 2, Placement(2), changes.MICROBATCHES)
                assert step["order"] == list(map(str, order))


def test_several_chunks(changed, alone):
    ranks = changed("chunks")
    forwards = {f"F{j}{chunk}" for j in range(changes.MICROBATCHES) for chunk in ("", ".1")}
    assert [step["loss"] for step in ranks[0]] == pytest.approx(4 * alone[:2], rel=1e-4)
    for steps in ranks:
        for step in steps:
            assert len(set(step["order"])) == len(step["order"])
            assert forwards <= set(step["order"])


def test_budgets_in_bytes(changed, alone):
    ranks = changed("budgets")
    assert [step["loss"] for step in ranks[0]] == pytest.approx(2 * alone[:2], rel=1e-4)
    for tight, loose in zip(ranks[0][:2], ranks[0][2:], strict=True):
        for step in (tight, loose):
            assert all(0 < peak <= limit for peak, limit in zip(step["peak"], step["budget"], strict=True))
        assert max(tight["peak"]) < max(loose["peak"])


def test_sigterm_between_two_tasks_of_a_step_stops_all_after_that_step(changed, alone):
    ranks = changed("sigterm")
    assert [len(steps) for steps in ranks] == [changes.STOPPED_STEP + 1] * RANKS
    assert [s["loss"] for s in ranks[0]] == pytest.approx(alone[: len(ranks[0])], rel=1e-4)
