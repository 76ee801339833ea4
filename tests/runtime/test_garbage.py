"""Python's garbage collector while a step's tasks run, and what steps leave behind."""

import gc
import weakref
from collections import Counter

import pytest

from rrfp_jax.core.hints import BF
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.engine import loop as driver
from rrfp_jax.runtime.engine.loop import EVERY, FIRST, collect_together, no_collections
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.step import ModelStep
from tests.support import toy


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_as_it_was_afterwards(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="of a task"), no_collections():
            assert not gc.isenabled()
            raise ValueError("of a task")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_no_task_is_stopped_for_it(monkeypatch):
    seen, fails, run = [], [], ModelStep.run

    def watched(*args):
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("of a task")
        return run(*args)

    monkeypatch.setattr(ModelStep, "run", watched)
    trainer = toy.trainer()
    trainer.step(toy.microbatches(2))
    assert seen and not any(seen) and gc.isenabled()
    fails.append(True)
    with pytest.raises(TrainingError, match="of a task"):
        trainer.step(toy.microbatches(2))
    assert not any(seen) and gc.isenabled()


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_collect_before_the_same_rounds(monkeypatch, ranks):
    collected, now = [], []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(now[-1]))
    for round in range(1, 2 * EVERY + 1):
        now.append(round)
        collect_together(round, ranks)
    assert collected == ([FIRST, EVERY + FIRST] if ranks > 1 else [])


def test_who_has_forbidden_collections_is_obeyed(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected"))
    gc.disable()
    try:
        collect_together(FIRST, 2)
    finally:
        gc.enable()


@pytest.mark.slow
def test_steps_are_counted_however_rounds_are(monkeypatch):
    """Processes that share a stage, and transports, take numbers of rounds, too."""
    counted, usual = [], World.next_round
    monkeypatch.setattr(driver, "collect_together", lambda round, ranks: counted.append(round))
    monkeypatch.setattr(World, "next_round", lambda world: usual(world) + usual(world))
    trainer = toy.trainer()
    for _ in range(3):
        trainer.step(toy.microbatches(2))
    assert counted == [1, 2, 3]


@pytest.mark.slow
def test_a_kept_report_keeps_no_trainer():
    trainer = toy.trainer()
    report = trainer.step(toy.microbatches(2))
    gone = weakref.ref(trainer._engine)
    del trainer
    gc.collect()
    assert gone() is None and report.recorded.work() is None and "step" in str(report)


def test_durations_of_one_shape_are_none_of_another():
    trainer = toy.trainer(2)
    shapes = [
        [{name: array[:, :length] for name, array in mb.items()} for mb in toy.microbatches(2)]
        for length in (4, 6)
    ]
    for batch in shapes:
        trainer.step(batch)
    (queue, *_) = trainer._engine.driver._queues
    by_task = Counter(cost[:-1] for cost in queue._usual)
    assert set(by_task.values()) == {2}


def test_a_question_of_another_thread_changes_nothing():
    """The watchdog asks what a stage waits for; what it finds is not remembered for the main thread."""
    rules = StepRules(placement=Placement(1), microbatches=2, schedule=BF())
    scheduler = StageScheduler(0, rules)
    key = scheduler.key()
    assert str(scheduler.awaited()) == "nothing: F0 can run"
    assert scheduler.view.cached is None and scheduler.key() == key
