"""A schedule that is set between steps: what is compiled, what is held, what is refused."""

import numpy as np
import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.orders import GPipe, OneFOneB
from rrfp_jax.runtime.programs import stage_programs
from rrfp_jax.runtime.programs.compiler import Compiler
from tests.support import toy


def test_the_schedule_may_be_set_by_name_between_steps(trainer):
    trainer.schedule = "gpipe"
    assert trainer.schedule == GPipe()
    assert np.isfinite(next(trainer.steps(1)).loss)
    with pytest.raises(rrfp.UsageError, match="no such schedule"):
        trainer.schedule = "zb"
    trainer.schedule = "bf"


def test_the_schedule_may_change_between_steps_to_one_that_splits():
    trainer = toy.trainer(2)
    trainer.step(toy.microbatches())
    for schedule in ("bfw", "zb-h1", rrfp.schedules.Ranked(OneFOneB())):
        trainer.schedule = schedule
        trainer.step(toy.microbatches())
    assert trainer.steps_done == 4


@pytest.mark.slow
def test_a_schedule_for_another_placement_is_refused_also_between_steps():
    trainer = toy.trainer(2)
    trainer.step(toy.microbatches())
    trainer.schedule = "zb-v"
    with pytest.raises(rrfp.UsageError, match="2 chunks a stage"):
        trainer.step(toy.microbatches())


def test_nothing_is_compiled_again_after_a_step_of_another_kind(monkeypatch):
    trainer, batch = toy.trainer(2, schedule="bfw"), toy.microbatches(4)
    trainer.step(batch)
    trainer.evaluate(batch)
    monkeypatch.setattr(Compiler, "__call__", lambda *args, **kwargs: pytest.fail("compiled"))
    monkeypatch.setattr(stage_programs, "differentiate", lambda *args: pytest.fail("traced"))
    trainer.step(batch[:3])
    trainer.evaluate(batch)


def test_a_schedule_that_does_not_split_holds_no_more_after_one_that_does():
    trainer = toy.trainer(2, schedule="bf")
    kinds = []
    for schedule in ("bf", "bfw", "bf"):
        trainer.schedule = schedule
        trainer.step(toy.microbatches())
        (programs,) = trainer._engine.library.all_programs("train")
        kinds.append([set(part.tasks) for stage in programs.values() for part in stage])
    assert kinds[0] == kinds[2] != kinds[1]
