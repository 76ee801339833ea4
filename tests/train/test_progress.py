"""What a Trainer tells a listener of whatever lasts; unless one is given it is quiet."""

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


def test_it_is_shown_if_that_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(progress_line, "LINE_AFTER", 0.0)
    trainer = toy.trainer(1)
    trainer.start(progress=True)
    assert isinstance(trainer._progress, Lasting)
    capsys.readouterr()
    trainer.evaluate(lambda step: toy.microbatches(3, seed=step), steps=2)
    assert "validating 2/2: done after" in capsys.readouterr().out
