"""A run that goes on from the host's memory, with fewer replicas and with all of them again."""

import json
import os
import shutil
import signal
from dataclasses import dataclass

import numpy as np
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.checkpoint import saving
from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.errors import DONE, HANDED_OVER
from rrfp_jax.runs.config import Checkpointing
from rrfp_jax.runs.run import train
from rrfp_jax.runtime.run.host_memory import HostMemory
from rrfp_jax.runtime.run.signals import ends_at_once, heard_signals
from tests.scripts.toy_run import ToyRun
from tests.support import toy

STEPS = 12


@dataclass(frozen=True, kw_only=True)
class Replicas(ToyRun):
    """Four microbatches a step; after one of them the run is asked to hand over."""

    asked_after: int = -1
    ended_after: int = -1
    removed_after: int = -1

    def optimizer(self):
        return optax.adam(1e-2)

    def train_data(self):
        return lambda step: toy.microbatches(4, seed=step)

    def on_step(self, report):
        if report.step == self.asked_after:
            HostMemory.of(os.environ).request.touch()
        if report.step == self.removed_after:
            shutil.rmtree(os.environ["RRFP_HOST_MEMORY"])
        return report.step == self.ended_after


@pytest.fixture
def attempt(tmp_path, monkeypatch, capsys):
    """Train with some replicas from the host's memory: status, the lines of all steps, what was said."""

    def attempt(replicas, asked_after=-1, memory=True, name="lent", every_steps=0, **more):
        (tmp_path / "memory").mkdir(exist_ok=True)
        lent = HostMemory(tmp_path / "memory", replicas)
        for variable, value in lent.environment.items():
            monkeypatch.setenv(variable, value) if memory else monkeypatch.delenv(variable, False)
        lent.request.unlink(missing_ok=True)
        config = Replicas(
            name=name,
            steps=STEPS,
            mesh=rrfp.Mesh(pp=2, dp=2, shard_optimizer=True),
            directory=str(tmp_path),
            checkpoint=Checkpointing(every_steps=every_steps),
            asked_after=asked_after,
            **more,
        )
        with heard_signals(signal.SIGINT, answer=ends_at_once("test")) as signals:
            status = train(config, signals)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return status, [json.loads(line) for line in lines], capsys.readouterr().out

    return attempt


def column(lines, name):
    return [line[name] for line in lines]


@pytest.mark.slow(reason="runs of processes that lose one")
def test_no_step_is_lost_and_all_have_the_same_microbatches(attempt, tmp_path):
    _, calm, _ = attempt(2, memory=False, name="calm")
    status, lines, said = attempt(2, 2)
    assert status == HANDED_OVER and column(lines, "step") == [0, 1, 2, 3]
    assert column(lines, "loss") == column(calm[:4], "loss")  # to the bit
    assert "stopped after step 3, as lost ranks are replaced" in said
    status, lines, said = attempt(1, 5)
    assert status == HANDED_OVER and len(lines) == 7 and "2 stages on " in said
    assert "resumes after 4 steps, from the host's memory" in said
    assert lines[4]["loss"] == calm[4]["loss"]  # before that step's sums
    status, lines, said = attempt(2)
    assert status == DONE and "resumes after 7 steps" in said and "2 stages in 2 replicas" in said
    assert column(lines, "step") == list(range(STEPS))
    assert column(lines, "plan") == column(calm, "plan")
    np.testing.assert_allclose(column(lines, "loss"), column(calm, "loss"), rtol=1e-5)
    assert [line["step"] for line in lines if line.get("resumed")] == [4, 7]
    assert CheckpointFolder(tmp_path / "memory" / "states").steps() == [STEPS - 1]  # one at a time


@pytest.mark.slow(reason="runs of processes that lose one")
def test_whichever_is_later_of_memory_and_checkpoint(attempt, tmp_path):
    attempt(2, 4, every_steps=4)
    assert CheckpointFolder(tmp_path / "lent.checkpoints").steps() == [4]  # a hand-over saves nothing
    kept = CheckpointFolder(tmp_path / "memory" / "states")
    (kept.staging(9) / "params").mkdir(parents=True)  # somebody was killed while the next was written
    status, lines, said = attempt(1, every_steps=4)
    assert "resumes after 6 steps, from the host's memory" in said and "never completed" not in said
    assert (status, len(lines)) == (DONE, STEPS) and not kept.staging(9).exists()
    shutil.rmtree(tmp_path / "memory")
    status, lines, said = attempt(2, every_steps=4)
    assert status == DONE and "12 steps have been trained already" in said


@pytest.mark.slow(reason="2 s: a run; launcher/test_elastic.py has such memory")
@pytest.mark.parametrize("asked_after", [-1, 4])
def test_full_memory_is_told_and_training_goes_on(attempt, monkeypatch, asked_after):
    def full(*args):
        raise OSError(28, "No space left on device", "params.0")

    monkeypatch.setattr("rrfp_jax.checkpoint.saving.write_leaf", full)
    status, lines, said = attempt(1, asked_after)
    assert (status, len(lines)) == (DONE, STEPS)
    assert said.count("params.0: No space left on device; there is no other") == STEPS - 1


@pytest.mark.slow(reason="runs of processes that lose one")
def test_with_full_memory_a_checkpoint_is_handed_over(attempt, monkeypatch, tmp_path):
    write = saving.write_leaf

    def full(folder, *args):
        if (tmp_path / "memory") in folder.parents:
            raise OSError(28, "No space left on device", "params.0")
        return write(folder, *args)

    monkeypatch.setattr(saving, "write_leaf", full)
    status, lines, _ = attempt(1, asked_after=4, every_steps=100)
    assert (status, len(lines)) == (HANDED_OVER, 6)
    assert CheckpointFolder(tmp_path / "lent.checkpoints").steps() == [6]


def test_the_runs_own_end_comes_before_a_hand_over(attempt, tmp_path):
    status, lines, said = attempt(1, asked_after=4, ended_after=5, removed_after=2)
    assert (status, len(lines)) == (DONE, 6) and "lost ranks" not in said
    assert CheckpointFolder(tmp_path / "memory" / "states").steps() == [5]
    assert (tmp_path / "memory").stat().st_mode & 0o777 == 0o700  # as it was before somebody removed it
