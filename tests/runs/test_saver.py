"""From where a run goes on: a Saver with a Trainer that only notes which folder it is given."""

from types import SimpleNamespace

import pytest

from rrfp_jax.checkpoint.folder import MANIFEST, CheckpointFolder
from rrfp_jax.checkpoint.saving import NoneIntact
from rrfp_jax.runs.config import Checkpointing
from rrfp_jax.runs.saving import Saver, save_latest
from rrfp_jax.runtime.run.host_memory import HostMemory


class Notes:
    """A Trainer that goes on from any folder but the damaged ones."""

    def __init__(self, damaged=()):
        self.asked, self.steps_done, self._damaged = [], 0, damaged

    def _resume(self, folder):
        self.asked.append(folder.name)
        if folder.name in self._damaged:
            raise NoneIntact(f"{folder}: no checkpoint is intact")
        self.steps_done = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
        return self.steps_done > 0


@pytest.fixture
def resumed(tmp_path):
    """Let a run go on, in a launcher's folder; its Trainer, and what is said."""
    run, said = tmp_path / "run", []
    run.mkdir()

    def resumed(damaged=(), memory=None, folder=run, **settings):
        trainer = Notes(damaged)
        trainer._world = SimpleNamespace(rank=0, folder=folder, gather=lambda *about: None)
        lent = None if memory is None else HostMemory(memory, 1)
        settings = Checkpointing(every_steps=4, **settings)
        Saver(trainer, settings, tmp_path / "checkpoints", said.append, lent).resume()
        return trainer, said

    return resumed


@pytest.mark.parametrize("stored", [0, 4])
def test_damaged_states_in_memory_are_done_without(resumed, tmp_path, stored):
    states = tmp_path / "memory" / "states"
    for made in (states / "6", states / ".7.saving", tmp_path / "checkpoints" / f"{stored}"):
        made.mkdir(parents=True)
        (made / MANIFEST).touch()
    trainer, said = resumed(["states"], tmp_path / "memory")
    assert trainer.asked == ["states", "checkpoints"] and trainer.steps_done == stored
    assert not states.exists()  # or the next attempt would try them again
    assert said[0].startswith("the host's memory has no intact state: resumes from the latest checkpoint")
    assert said[1:] == ([f"resumes after 4 steps, from {tmp_path}/checkpoints/4"] if stored else [])


def test_damaged_checkpoints_are_an_error(resumed, tmp_path):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(NoneIntact):
        resumed(["checkpoints"])


def test_a_run_begins_anew_even_if_the_first_attempt_died_before(resumed, tmp_path, monkeypatch):
    """Of several attempts the first that comes so far moves earlier checkpoints away, and no other."""
    monkeypatch.setenv("RRFP_RESTARTS", "1")
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    trainer, said = resumed(resume=False)
    assert trainer.asked == [] and said == [f"earlier checkpoints are kept as {tmp_path}/checkpoints.1"]
    (tmp_path / "checkpoints" / "8").mkdir(parents=True)  # this run's own
    trainer, _ = resumed(resume=False)
    assert trainer.steps_done == 8


@pytest.mark.parametrize("job", ["", "7"])
def test_a_requeue_begins_anew_until_its_job_has(resumed, tmp_path, monkeypatch, job):
    """Without a launcher: an earlier run's checkpoints are nobody's to go on from with resume=False."""
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    monkeypatch.setenv("RRFP_RESTARTS", "1")  # the first attempt was killed while it compiled
    trainer, said = resumed(folder=None, resume=False)
    assert trainer.asked == [] and said == [f"earlier checkpoints are kept as {tmp_path}/checkpoints.1"]
    monkeypatch.setenv("RRFP_RESTARTS", "2")  # before it saved
    trainer, said = resumed(folder=None, resume=False)
    assert trainer.steps_done == 0 and len(said) == 1
    (tmp_path / "checkpoints" / "8").mkdir()
    assert resumed(folder=None, resume=False)[0].steps_done == 8
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        assert resumed(folder=None, resume=False)[0].steps_done == 0, "another job"
    assert (tmp_path / "checkpoints.1" / "4").is_dir()


def test_a_run_that_begins_anew_again_leaves_no_empty_folders(resumed, tmp_path):
    for _ in range(2):
        resumed(folder=None, resume=False)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "checkpoints"}


def test_a_folder_of_somebody_else_is_no_later_checkpoint(tmp_path):
    """Such as of a year: the state in memory is saved beside it."""
    memory = HostMemory(tmp_path / "memory", 1)
    state, stored = memory.states / "6", tmp_path / "checkpoints"
    for folder in (state, stored / "2024"):
        folder.mkdir(parents=True)
    (state / MANIFEST).touch()
    assert save_latest(memory, stored, 1, lambda text: None)
    assert (stored / "6" / MANIFEST).exists() and (stored / "2024").is_dir()


def test_a_copy_of_a_checkpoint_is_whole_or_not_there(tmp_path):
    """As if a file had been removed since the folder was looked through."""
    (tmp_path / "memory" / "8").mkdir(parents=True)
    (tmp_path / "memory" / "8" / MANIFEST).write_text("{}")
    (tmp_path / "memory" / "8" / "gone").symlink_to(tmp_path / "nowhere")
    stored = CheckpointFolder(tmp_path / "stored")
    with pytest.raises(FileNotFoundError):
        stored.import_checkpoint(tmp_path / "memory" / "8")
    assert not stored.steps() and not list(stored.path.iterdir())
