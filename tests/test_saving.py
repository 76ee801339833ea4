"""Named runs that save themselves: they go on where they stopped, and keep the lines of their steps."""

import json
import os
import signal
import sys

import pytest

from rrfp_jax.train import run as running
from rrfp_jax.train.main import main
from rrfp_jax.train.trainer import Trainer
from tests.test_cli import arguments, folder  # noqa: F401

EVERY_TWO = {"checkpoint.every_steps": 2, "checkpoint.keep": 2}


@pytest.fixture(autouse=True)
def search_path_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def train(folder, tmp_path, capsys):  # noqa: F811
    """Run the command in a folder of its own; its status, what it said, and the steps in its metrics."""

    def train(**overrides):
        status = main(arguments(folder, directory=tmp_path, name="run", **{**EVERY_TWO, **overrides}))
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return status, "".join(capsys.readouterr()), [json.loads(line) for line in lines]

    return train


def checkpoints(tmp_path):
    return sorted(int(path.name) for path in (tmp_path / "run.checkpoints").iterdir())


def test_a_run_goes_on_where_it_stopped(train, tmp_path):
    _, _, straight = train(steps=5, **{"checkpoint.every_steps": 0})
    assert not (tmp_path / "run.checkpoints").exists()
    status, _, lines = train(steps=3)
    assert status == 0 and checkpoints(tmp_path) == [2, 3]
    status, said, lines = train(steps=5)
    assert status == 0 and "resumes after 3 steps" in said
    assert [(line["step"], line["loss"]) for line in lines] == [(s["step"], s["loss"]) for s in straight]
    assert checkpoints(tmp_path) == [4, 5]
    status, said, lines = train(steps=5)
    assert status == 0 and "nothing is left to do" in said and len(lines) == 5
    status, said, lines = train(steps=2, **{"checkpoint.resume": False})
    assert status == 0 and "earlier checkpoints are kept as" in said and checkpoints(tmp_path) == [2]


def test_lines_beyond_the_checkpoint_are_those_of_the_second_time(train, tmp_path, monkeypatch):
    """A run that breaks off between two checkpoints repeats the steps after the first."""
    steps = Trainer.steps

    def three(self, count):
        for report in steps(self, count):
            yield report
            if report.step == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "steps", three)
    status, _, lines = train(steps=4)
    assert status == 130 and len(lines) == 3 and checkpoints(tmp_path) == [2]
    monkeypatch.undo()
    status, said, lines = train(steps=4)
    assert "resumes after 2 steps" in said
    assert [line["step"] for line in lines] == [0, 1, 2, 3]


def test_sigterm_saves_and_is_a_good_end(train, tmp_path, monkeypatch):
    add = running.RunFiles.add

    def warned(self, line):
        add(self, line)
        if line["step"] == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(running.RunFiles, "add", warned)
    status, said, lines = train(steps=50, **{"checkpoint.every_steps": 40})
    done = len(lines)
    assert status == 0 and done < 50 and f"SIGTERM: stopped after step {done - 1}; resumes from" in said
    assert checkpoints(tmp_path) == [done]
    status, said, lines = train(steps=done + 1)
    assert f"resumes after {done} steps" in said and len(lines) == done + 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"checkpoint.every_steps": -1}, "checkpoint.every_steps=-1"),
        ({"checkpoint.keep": 0}, "checkpoint.keep=0: at least one"),
        ({"checkpoint.on_error": "hope"}, "choose 'continue' or 'stop'"),
    ],
)
def test_refusals(folder, tmp_path, capsys, overrides, said):  # noqa: F811
    assert main(arguments(folder, directory=tmp_path, **{**EVERY_TWO, **overrides})) == 2
    assert said in "".join(capsys.readouterr())
