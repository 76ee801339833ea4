"""Which checkpoints are kept, how they are written beside training, and what happens without room."""

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.checkpoint import saving
from rrfp_jax.checkpoint.folder import CheckpointFolder, readable_checkpoints
from rrfp_jax.checkpoint.format import RunState
from rrfp_jax.checkpoint.saving import Checkpoints
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run.world import World
from tests.support import stored
from tests.support.stored import ALL, full_for, save, specs_of

ROOT = Path(__file__).parents[2]
CHANGES = ((Path, "rename"), (shutil, "rmtree"))


class KilledError(BaseException):
    """A process dies."""


def seed_of_ten(folder):
    """By the checkpoint of step 10, which is the only one."""
    found = CheckpointFolder(folder)
    assert found.steps() == [10]
    return found.open(10)[0].seed


def mortal(folder, left, change):
    """A change of names that looks whether the checkpoint is intact, and at some time kills."""

    def changes(*given, **how):
        assert seed_of_ten(folder) in (1, 2)
        if next(left, None) is None:
            raise KilledError
        return change(*given, **how)

    return changes


pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB, where this user may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "small", place]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield place
    subprocess.run(["umount", place], check=True)


class TestKeeping:
    def test_the_last_few_are_kept(self, made):
        for step in (1, 2, 10, 20):
            save(made(keep=2), step)
        assert sorted(path.name for path in made.folder.iterdir()) == ["10", "20"]

    def test_one_that_is_removed_while_it_is_read_gives_way_to_a_newer_one(self, made):
        save(made(keep=1), 10)
        found = readable_checkpoints("test", made.folder)
        assert next(found).run.step == 10
        save(made(keep=1), 20)
        assert next(found).run.step == 20
        with pytest.raises(TrainingError, match="no checkpoint is intact"):
            next(found)

    def test_folders_of_others_stay(self, made):
        """Such as of classes, folds, or years."""
        for name in ("0", "10", "2024"):
            (made.folder / name).mkdir(parents=True)
            (made.folder / name / "own").touch()
        for step in (10, 20):
            save(made(keep=1), step)
        assert sorted(path.name for path in made.folder.iterdir()) == ["0", "10.1", "20", "2024"]
        assert {path.parent.name for path in made.folder.glob("*/own")} == {"0", "10.1", "2024"}
        assert made().restore(specs_of(stored.leaves(ALL, 0))).run.step == 20

    def test_a_step_saved_again_replaces_the_first(self, made):
        save(made(), 10, seed=1)
        save(made(), 10, seed=2)
        assert made().restore(specs_of(stored.leaves(ALL, 0))).run.seed == 2
        assert [path.name for path in made.folder.iterdir()] == ["10"]

    @pytest.mark.parametrize("keep", [1, 3])
    def test_whenever_saving_a_step_again_ends_an_intact_one_is_there(self, made, monkeypatch, keep):
        """A process may die before or after any change of names; removing files takes long."""
        for died_before in range(1, 20):
            with monkeypatch.context() as patch:
                save(made(keep=keep), 10, seed=1)
                left = iter(range(died_before))
                for owner, name in CHANGES:
                    patch.setattr(owner, name, mortal(made.folder, left, getattr(owner, name)))
                with suppress(KilledError, TrainingError):
                    save(made(keep=keep), 10, seed=2)
            assert seed_of_ten(made.folder) in (1, 2)
            restored = made().restore(specs_of(stored.leaves(ALL, 0)))
            assert restored.run.seed in (1, 2)
            CheckpointFolder(made.folder).tidy()
            assert [path.name for path in made.folder.iterdir()] == ["10"]
            if next(left, None) is not None:
                return
        raise AssertionError("it never came to its end")

    def test_a_run_that_goes_back_leaves_the_later_ones_aside_and_says_so(self, made, capsys):
        for step in (10, 20):
            save(made(), step)
        assert made().restore(specs_of(stored.leaves(ALL, 0)), step=10).run.step == 10
        save(made(), 15)
        assert made().restore(specs_of(stored.leaves(ALL, 0))).run.step == 15
        assert sorted(path.name for path in made.folder.iterdir()) == ["10", "15", "20.1"]
        said = f"the checkpoint of step 20, of a run that has gone back since, is kept as {made.folder}/20.1"
        assert said in capsys.readouterr().out


class TestAsynchronous:
    def test_training_goes_on_while_files_are_written(self, made, monkeypatch):
        """Leaves are donated once they are copied; what is written is what they were."""
        may_write = threading.Event()
        write = saving.write_leaf
        monkeypatch.setattr(saving, "write_leaf", lambda *args: may_write.wait(30) and write(*args))
        leaf = jnp.arange(1000.0)
        checkpoints = made()
        checkpoints.save(RunState(step=1), [(("w",), leaf)])
        checkpoints.copied()
        jax.jit(lambda a: a + 1, donate_argnums=0)(leaf)
        assert leaf.is_deleted()  # it is not, as long as somebody on the host reads its memory
        checkpoints.advance()
        assert CheckpointFolder(made.folder).steps() == []
        may_write.set()
        checkpoints.advance(to_the_end=True)
        found = made().restore({("w",): jax.ShapeDtypeStruct((1000,), jnp.float32)})
        assert (found.leaves["w",] == np.arange(1000.0)).all()

    def test_a_second_one_waits_for_the_first(self, made):
        checkpoints = made()
        for step in (1, 2):
            checkpoints.save(RunState(step=step), stored.leaves(ALL, step))
            checkpoints.copied()
        checkpoints.advance(to_the_end=True)
        assert CheckpointFolder(made.folder).steps() == [1, 2]

    def test_tidying_keeps_the_only_checkpoint_if_it_cannot_be_renamed(self, made, monkeypatch):
        save(made(), 40)
        (made.folder / "40").rename(made.folder / ".40.replaced")
        folder = CheckpointFolder(made.folder)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
            folder.tidy()
        assert folder.steps() == [40] and folder.open(40)
        folder.tidy()
        assert [path.name for path in made.folder.iterdir()] == ["40"]


FORGETFUL = """
import sys
from pathlib import Path
from rrfp_jax.checkpoint.format import RunState
from rrfp_jax.checkpoint.saving import Checkpoints
from rrfp_jax.runtime.run.world import World
from tests.support import stored
world = World()
world.size = int(sys.argv[2])
def main():
    Checkpoints(Path(sys.argv[1]), world).save(RunState(step=3), stored.leaves(stored.ALL, 3))
main()
"""


@pytest.mark.parametrize(
    ("size", "steps", "said"),
    [
        (1, ["3"], "of step 3 is complete"),
        (2, [], "of step 3 was not completed: .*call trainer.finish_saving"),
    ],
)
def test_a_script_that_ends_while_one_is_written(tmp_path, size, steps, said):
    argv = [sys.executable, "-c", FORGETFUL, str(tmp_path / "saved"), str(size)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and not done.stderr
    assert re.fullmatch(f"the checkpoint {said}.*\n", done.stdout)
    assert [path.name for path in (tmp_path / "saved").iterdir() if path.name.isdecimal()] == steps


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_child_leaves_its_parents_checkpoint_alone(made):
    checkpoints = made()
    checkpoints.save(RunState(step=3), stored.leaves(ALL, 3))
    assert made.folder in saving._UNDER_WAY
    if (child := os.fork()) == 0:
        os._exit(len(saving._UNDER_WAY))
    assert os.waitpid(child, 0)[1] == 0
    checkpoints.advance(to_the_end=True)
    assert made.folder not in saving._UNDER_WAY


class TestWithoutRoom:
    @pytest.fixture(autouse=True)
    def full(self, made, monkeypatch):
        """A checkpoint is there; the next one finds no room for one leaf."""
        save(made(), 10)
        made.said.clear()
        with monkeypatch.context() as full:
            full.setattr(saving, "write_leaf", full_for("params.2.up", saving.write_leaf))
            yield full

    def test_training_goes_on(self, made, full):
        save(made(), 20)
        assert (
            "params.2.up/0.0: No space left on device; the latest complete one is of step 10" in made.said[0]
        )
        assert [path.name for path in made.folder.iterdir()] == ["10"]
        full.undo()
        save(made(), 30)
        assert made().restore(specs_of(stored.leaves(ALL, 0))).run.step == 30

    def test_or_stops(self, made):
        with pytest.raises(TrainingError, match=r"step 20 cannot be written .*No space left"):
            save(made(on_error="stop"), 20)
        assert made().restore(specs_of(stored.leaves(ALL, 0))).run.step == 10

    def test_what_stands_in_a_leafs_way_is_named(self, made, full):
        full.undo()
        staging = CheckpointFolder(made.folder).staging(20)
        staging.mkdir()
        (staging / "params.2.up").touch()
        save(made(), 20)
        assert "params.2.up" in made.said[0] and ": Not a directory; the latest" in made.said[0]
        assert [path.name for path in made.folder.iterdir()] == ["10"]

    @pytest.mark.parametrize("megabytes", [2, 40])
    def test_on_a_disk_that_is_full(self, small_disk, full, megabytes):
        full.undo()
        said = []
        checkpoints = Checkpoints(small_disk / "checkpoints", World(), say=said.append)
        save(checkpoints, 10)
        most = {("params", "0", "w"): jnp.arange(megabytes * 2.0**18)}
        save(checkpoints, 20, [*most.items(), *stored.leaves(ALL, 20)])
        assert re.search(
            r"/params\S+: No space left on device; the latest complete one is of step 10", said[1]
        )
        assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["10"]
        save(checkpoints, 30)
        assert checkpoints.restore(specs_of(stored.leaves(ALL, 0))).run.step == 30

    def test_where_nothing_can_be_written(self, tmp_path):
        (tmp_path / "file").touch()
        said = []
        save(Checkpoints(tmp_path / "file" / "checkpoints", World(), say=said.append), 1)
        assert "Not a directory; there is no other" in said[0]
