"""Python's garbage collector while a step's tasks run."""

import gc

import pytest

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.driver.garbage import EVERY, FIRST, collect_together, no_collections
from rrfp_jax.runtime.stages.model_step import ModelStep
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
