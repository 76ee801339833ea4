"""What follows a step of a run: validation, the config's own methods, and an end before the last step."""

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import rrfp_jax as rrfp
from rrfp_jax.data.contract import as_data
from rrfp_jax.errors import DONE, INTERRUPTED
from rrfp_jax.runs.run import train
from rrfp_jax.runtime.run.signals import ends_at_once, heard_signals
from tests.scripts.toy_run import ToyRun
from tests.support import toy

STEPS = 6


class Corpus:
    """Validation data of several steps, in the second of which something may happen."""

    steps = 3

    def __init__(self, happens=lambda: None):
        self._happens, self._data = happens, as_data(lambda step: toy.microbatches(3, seed=50 + step))

    def plan(self, step):
        if step == 1:
            self._happens()
        return self._data.plan(step)

    def load(self, microbatch, fields):
        return self._data.load(microbatch, fields)


@dataclass(frozen=True, kw_only=True)
class Own(ToyRun):
    """Its methods are given as functions; what they were called with is kept."""

    validation: object = field(default_factory=Corpus)
    after_step: object = None
    after_validation: object = None
    seen: list = field(default_factory=list)

    def validation_data(self):
        return self.validation

    def on_step(self, report):
        self.seen.append(("step", report.step))
        return self.after_step and self.after_step(report)

    def on_validation(self, report, evaluation):
        self.seen.append(("validation", report.step))
        return self.after_validation and self.after_validation(report, evaluation)


@pytest.fixture
def run(tmp_path, capsys):
    """Train a run with some settings: its status, config, lines and what was said."""

    def run(**settings):
        usual = {"name": "own", "steps": STEPS, "mesh": rrfp.Mesh(pp=1), "validate_every": 2}
        config = Own(**usual | {"directory": str(tmp_path), "executables": None} | settings)
        with heard_signals(signal.SIGINT, answer=ends_at_once("test")) as signals:
            status = train(config, signals)
        lines = (Path(tmp_path) / "own" / "metrics.jsonl").read_text().splitlines()
        return status, config, [json.loads(line) for line in lines], capsys.readouterr().out

    return run


def test_methods_are_called_after_each_step_and_validation(run):
    status, config, lines, _ = run()
    assert status == DONE and len(lines) == STEPS
    steps = [[("step", step)] + [("validation", step)] * (step % 2) for step in range(STEPS)]
    assert config.seen == [call for calls in steps for call in calls]
    assert [line["step"] for line in lines if "validation_loss" in line] == [1, 3, 5]
    assert 0 <= lines[1]["validation_accuracy"] <= 1


@pytest.mark.parametrize(
    ("settings", "last", "validated"),
    [
        ({"after_step": lambda report: report.step == 2}, 2, [1, 2]),
        ({"after_validation": lambda report, found: report.step == 3}, 3, [1, 3]),
        ({"after_validation": lambda report, found: False}, STEPS - 1, [1, 3, 5]),
    ],
)
def test_a_method_ends_the_run_as_if_the_step_were_its_last(run, tmp_path, settings, last, validated):
    status, _, lines, said = run(**settings)
    assert status == DONE and [line["step"] for line in lines] == [*range(last + 1)]
    assert [line["step"] for line in lines if "validation_loss" in line] == validated
    assert "validation loss " in said
    assert (f"ended after step {last}, as the config's own method asked" in said) == (last < STEPS - 1)


def test_the_validation_is_as_long_as_asked_and_told_with_its_metrics(run):
    *_, lines, said = run(steps=1, validation_steps=2)
    (end,) = [line for line in said.splitlines() if line.startswith("validation loss ")]
    loss, accuracy = lines[-1]["validation_loss"], lines[-1]["validation_accuracy"]
    weight = sum(part["mask"].sum() for step in range(2) for part in toy.microbatches(3, seed=50 + step))
    assert end == f"validation loss {loss:.4f}  accuracy {accuracy:.4f}  (over a weight of {weight:,.0f})"


def test_validation_data_of_no_steps_is_refused_before_the_first_step(run, tmp_path):
    class Short(Corpus):
        steps = 0

    with pytest.raises(rrfp.UsageError, match=r"the data's steps is 0: .* leave the attribute out, or give"):
        run(validation=Short())
    assert not (tmp_path / "own").exists()
    assert run(steps=1, validation=Short(), validation_steps=1)[0] == DONE


def test_no_validation_data_counts_twice(run):
    losses = {run(steps=1, validation_steps=asked)[2][-1]["validation_loss"] for asked in (0, 3, 5)}
    assert len(losses) == 1, "there are three steps of it"


@pytest.mark.slow(reason="a run of its own")
def test_a_method_that_raises(run, tmp_path, capsys):
    def fails(report):
        raise KeyError("logger")

    with pytest.raises(rrfp.TrainingError, match=r"Own\.on_step\(\) raised KeyError: 'logger'"):
        run(after_step=fails)
    assert len((tmp_path / "own" / "metrics.jsonl").read_text().splitlines()) == 1, "the step was applied"
    assert "broken off after 1 steps" in capsys.readouterr().out


def test_a_validation_that_is_not_finite_ends_only_a_run_that_stops_for_that(run):
    spoilt = toy.microbatches(3, seed=50)
    spoilt[2]["mask"] = np.full_like(spoilt[2]["mask"], 2e37)  # float32 holds 16 of them, but not twice that
    settings = {"steps": 2, "validation": lambda step: spoilt, "validation_steps": 1}
    _, _, lines, said = run(on_nonfinite="skip", **settings)
    assert lines[-1]["validation_loss"] is None and "validation loss inf" in said
    with pytest.raises(rrfp.TrainingError, match="step 0 of an evaluation: the loss of microbatch 2 is inf"):
        run(**settings)


def test_fields_that_json_does_not_know_are_kept_with_checkpoints(run, tmp_path):
    own = {"directory": tmp_path, "seen": [Path("a")]}  # a path, where text is declared
    assert run(steps=1, checkpoint=rrfp.Checkpointing(every_steps=1), **own)[0] == DONE
    assert (tmp_path / "own.checkpoints" / "1").is_dir()


@pytest.mark.slow(reason="a run that is interrupted")
def test_what_a_config_saves_itself_is_no_checkpoint_of_the_run(run, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(Own, "trainer", lambda *given: made.append(ToyRun.trainer(*given)) or made[0])

    def save(report):
        made[0].save(tmp_path / "mine")
        made[0].finish_saving()

    status, *_ = run(after_step=save)
    assert status == DONE and (tmp_path / "mine" / str(STEPS)).is_dir()


def test_control_c_breaks_a_validation_off_but_not_the_last(run):
    press = Corpus(lambda: os.kill(os.getpid(), signal.SIGINT))
    status, _, lines, said = run(validation=press)
    assert status == INTERRUPTED and [line["step"] for line in lines] == [0, 1]
    assert "validation_loss" not in lines[1] and "Ctrl-C: stopped after step 1; nothing is saved" in said
    status, _, lines, _ = run(validation=press, validate_every=0)
    assert status == DONE and "validation_loss" in lines[STEPS - 1]
