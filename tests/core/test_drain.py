"""The paper's drain, a hint of its own, next to admission."""

import pytest

from rrfp_jax.core.events import ROOM, Arrived
from rrfp_jax.core.hints import BFW, FPriority
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Direction, Input, Placement
from tests.support.drain import Drain
from tests.support.invariants import check_invariants


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
