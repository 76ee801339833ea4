"""Named runs that save themselves: they go on where they stopped, and keep the lines of their steps."""

import json
import os
import signal
import sys

import pytest

from rrfp_jax.checkpoint import saving
from rrfp_jax.errors import DONE, FAILED, INTERRUPTED
from rrfp_jax.runs import run as running
from rrfp_jax.train.trainer import Trainer
from tests.support.commands import train as main
from tests.support.quickstart import arguments, with_texts

EVERY_TWO = {"checkpoint.every_steps": 2, "checkpoint.keep": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the text is."""
    return with_texts(tmp_path_factory.mktemp("saving"))


@pytest.fixture(autouse=True)
def search_path_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def train(folder, tmp_path, capsys):
    """Run the command in a folder of its own; its status, what it said, and the steps in its metrics."""

    def train(**overrides):
        status = main(arguments(folder, directory=tmp_path, name="run", **{**EVERY_TWO, **overrides}))
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return status, "".join(capsys.readouterr()), [json.loads(line) for line in lines]

    return train


def checkpoints(tmp_path):
    return sorted(int(p.name) for p in (tmp_path / "run.checkpoints").iterdir() if p.name.isdecimal())


def losses(lines):
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.slow(reason="10 s: three runs; test_resume.py has Trainers")
def test_a_run_that_broke_off_goes_on_to_the_bit(train, tmp_path, monkeypatch):
    """It repeats the steps after its latest checkpoint; their lines are those of the second time."""
    _, _, straight = train(steps=7, **{"checkpoint.every_steps": 0})
    assert not (tmp_path / "run.checkpoints").exists()
    steps = Trainer.steps

    def five(self, count):
        for report in steps(self, count):
            yield report
            if report.step == 4:
                raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "steps", five)
    status, _, lines = train(steps=7)
    assert status == 130 and len(lines) == 5 and checkpoints(tmp_path)[0] == 2
    monkeypatch.undo()
    status, said, lines = train(steps=7)
    assert status == 0 and "resumes after" in said
    assert losses(lines) == losses(straight)
    assert checkpoints(tmp_path) == [6, 7]


@pytest.mark.costly(reason="several runs")
def test_what_a_start_finds_there(train, tmp_path, monkeypatch):
    said_none = "no checkpoint in"
    _, said, _ = train(steps=3)
    assert said_none not in said
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "start", lambda *args, **kwargs: pytest.fail("compiled for nothing"))
        status, said, lines = train(steps=3)
    assert status == 0 and "nothing is left to do" in said and len(lines) == 3
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    status, said, lines = train(steps=4)
    assert "resumes after 3 steps" in said and [line["step"] for line in lines] == [0, 1, 2, 3]


@pytest.mark.slow(reason="5 s: two runs; test_keeping.py has checkpoints that are laid aside")
def test_a_run_that_does_not_resume_keeps_what_is_there(train, tmp_path):
    train(steps=2)
    status, said, lines = train(steps=2, **{"checkpoint.resume": False})
    assert status == 0 and "earlier checkpoints are kept as" in said and checkpoints(tmp_path) == [2]
    assert len(lines) == 2


@pytest.mark.slow(reason="4 s: a process")
def test_sigterm_saves_and_is_a_good_end(train, tmp_path, monkeypatch):
    add = running.RunFiles.add

    def warned(self, report, line):
        add(self, report, line)
        if line["step"] == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(running.RunFiles, "add", warned)
    status, said, lines = train(steps=50, **{"checkpoint.every_steps": 40})
    done = len(lines)
    assert status == 0 and done < 50 and f"SIGTERM: stopped after step {done - 1}; resumes from" in said
    assert checkpoints(tmp_path) == [done]
    status, said, lines = train(steps=done + 1)
    assert f"resumes after {done} steps" in said and len(lines) == done + 1


@pytest.mark.slow(reason="2 s each: a run; test_keeping.py has a full disk")
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGTERM, INTERRUPTED, "SIGTERM: stopped after step"),
        (signal.SIGINT, INTERRUPTED, "Ctrl-C: stopped after step"),
        (None, FAILED, "rrfp train: all 5 steps were trained, but the checkpoint"),
    ],
)
def test_a_save_that_failed_does_not_count(train, tmp_path, monkeypatch, number, status, said, earlier):
    add, write = running.RunFiles.add, saving.write_leaf

    def warned(self, report, line):
        add(self, report, line)
        if line["step"] == 2 and number:
            os.kill(os.getpid(), number)

    def full(folder, *given):
        if earlier and folder.name == ".2.saving":
            return write(folder, *given)
        raise OSError(28, "No space left on device", "w")

    monkeypatch.setattr(running.RunFiles, "add", warned)
    monkeypatch.setattr(saving, "write_leaf", full)
    found, told, lines = train(steps=50 if number else 5)
    assert found == status
    (last,) = [line for line in told.splitlines() if line.startswith(said)]
    if number is None:
        assert last.endswith("/5 could not be written by rank 0 (stages 0-1): w: No space left on device")
    elif earlier:
        assert last.endswith(f", which could not be saved; resumes from {tmp_path}/run.checkpoints/2")
    else:
        assert last.endswith("nothing is saved")
    if earlier:
        monkeypatch.undo()
        found, told, lines = train(steps=len(lines) + 1)
        assert found == DONE and "resumes after 2 steps" in told
        assert [line["step"] for line in lines] == list(range(len(lines)))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"checkpoint.every_steps": -1}, "checkpoint.every_steps=-1"),
        ({"checkpoint.keep": 0}, "checkpoint.keep=0: at least one"),
        ({"checkpoint.on_error": "hope"}, "choose 'continue' or 'stop'"),
    ],
)
def test_refusals(folder, tmp_path, capsys, overrides, said):
    assert main(arguments(folder, directory=tmp_path, **{**EVERY_TWO, **overrides})) == 2
    assert said in "".join(capsys.readouterr())


@pytest.mark.slow(reason="6 s: several runs; runs/test_differences.py has the sentences")
def test_a_changed_configuration_is_told_or_refused_before_it_compiles(train, folder, tmp_path, monkeypatch):
    train(steps=2)
    _, said, _ = train(steps=3, learning_rate=0.25)
    told = "changed since the checkpoint that is there:\n  steps: 2 -> 3\n  learning_rate: 0.006 -> 0.25\n"
    assert told in said and said.index(told) < said.index("ready after")
    monkeypatch.setattr(Trainer, "start", lambda *args, **kwargs: pytest.fail("compiled before refusing"))
    status, said, lines = train(steps=4, **{"model.d_model": 16, "seed": 0})
    assert status == 2 and len(lines) == 3
    assert "  model.d_model: 8 -> 16\n" in said
    assert "is of another model: the parameters differ (its params.0." in said and "To begin anew" in said
    status, said, _ = train(steps=4, seed=3)
    assert status == 2 and "seed=3: the checkpoint of step 3 is of a run with seed=0" in said
