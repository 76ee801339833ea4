"""What a Trainer tells a listener of whatever lasts, and evaluations of other shapes than training."""

import numpy as np
import pytest

from rrfp_jax.progress import Doing
from rrfp_jax.report import progress_line
from rrfp_jax.report.progress_line import Lasting
from tests.support import toy


def test_a_listener_is_told_of_what_lasts(tmp_path):
    told = []
    trainer = toy.trainer(1)
    trainer.start(progress=told.append)
    assert trainer.is_main and trainer._progress == told.append
    told.clear()
    trainer.evaluate(lambda step: toy.microbatches(3, seed=step), steps=4)
    assert [doing for doing in told if doing.what == "validating"] == [
        *(Doing("validating", step, 4, f"{25 * step}%") for step in range(4)),
        Doing("validating", 4, 4),
    ]
    told.clear()
    list(trainer.steps(1))
    trainer.save(tmp_path)
    trainer.restore(tmp_path)
    assert told == [
        Doing(what, done, 1, detail)
        for what, detail in (("saving", ""), ("restoring", str(tmp_path)))
        for done in (0, 1)
    ]
    told.clear()
    trainer.start(progress=None)
    steps = trainer._evaluating(lambda step: toy.microbatches(3), steps=4)
    next(steps)
    steps.close()
    assert [(doing.done, doing.total) for doing in told] == [(0, 4), (4, 4)], "it ends, too, if it is left"
    trainer.start(progress=False)
    told.clear()
    trainer.save(tmp_path)
    assert told == []


@pytest.mark.slow(reason="a Trainer; test_a_listener_is_told_of_what_lasts has all")
def test_it_is_shown_if_that_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(progress_line, "LINE_AFTER", 0.0)
    trainer = toy.trainer(1)
    trainer.start(progress=True)
    assert isinstance(trainer._progress, Lasting)
    capsys.readouterr()
    trainer.evaluate(lambda step: toy.microbatches(3, seed=step), steps=2)
    assert "validating 2/2: done after" in capsys.readouterr().out


def uneven_steps(step):
    """Two steps with very different numbers of unmasked tokens; no shape or number is that of training."""
    batch = toy.microbatches(3, seed=step, length=12)
    for mb in batch:
        mb["mask"][1:] *= step
    return batch


def test_an_evaluation_is_that_of_plain_jax_and_leaves_training_as_it_was():
    """The shapes that it evaluates can be trained on afterwards."""
    trainer = toy.trainer(2)
    trainer.start()
    found = trainer.evaluate(uneven_steps, steps=2)
    losses, weights = zip(
        *(
            (float(toy.reference(trainer.stage_params, batch)[0]), sum(mb["mask"].sum() for mb in batch))
            for batch in map(uneven_steps, range(2))
        ),
        strict=True,
    )
    assert weights[1] > 1.5 * weights[0]
    assert found.weight == sum(weights)
    assert found.loss == pytest.approx(np.average(losses, weights=weights), rel=1e-6)
    loss, gradient = trainer.value_and_grad(uneven_steps(0))
    expected_loss, expected = toy.reference(trainer.stage_params, uneven_steps(0))
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    assert toy.worst_leaf(gradient, expected) <= 1e-5
    assert trainer.steps_done == 0 and next(trainer.steps(1)).step == 0
