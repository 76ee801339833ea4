"""One live run of a name: the second is refused, and nobody is in the way once he is dead."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys

import pytest

import rrfp_jax as rrfp
from rrfp_jax.files import is_used
from rrfp_jax.launcher.folders import RunFolder
from rrfp_jax.name_lock import is_held, used_folder
from rrfp_jax.runs import name_held as holding
from rrfp_jax.runs.name_held import name_held
from rrfp_jax.runs.run import train
from rrfp_jax.runtime.run.signals import ends_at_once, heard_signals
from rrfp_jax.runtime.run.world import World
from tests.scripts.toy_run import ToyRun

HOLDS = """import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()"""


def held(folder, said=None):
    return name_held(World(), folder, ([] if said is None else said).append)


def test_whoever_only_asks_is_in_nobodys_way(tmp_path, monkeypatch):
    """A run that was killed has left the file, and somebody asks at the moment in which another begins."""
    folder, asks = tmp_path / "run", []
    (tmp_path / ".run.lock").touch()

    def asked(seconds):
        asks.append(seconds)
        os.close(asker)

    asker = os.open(tmp_path / ".run.lock", os.O_RDONLY)
    fcntl.flock(asker, fcntl.LOCK_SH)
    monkeypatch.setattr(holding.time, "sleep", asked)
    with held(folder):
        assert is_held(folder) and len(asks) == 1


def test_the_second_is_refused_and_the_first_leaves_nothing(tmp_path):
    folder = tmp_path / "runs" / "second"
    who = rf"{folder} is being trained by process {os.getpid()} on .* \(since .*\): give another"
    with held(folder):
        with pytest.raises(rrfp.UsageError, match=who), held(folder):
            pytest.fail("both live")
        assert is_held(folder)
        with held(folder.with_name("third")):
            pass
    assert not is_held(folder) and not folder.parent.exists()
    with held(folder):
        pass


def test_a_killed_run_is_in_nobodys_way(tmp_path):
    folder, lock = tmp_path / "second", tmp_path / ".second.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        assert is_held(folder)
        with pytest.raises(rrfp.UsageError, match="being trained by another process"), held(folder):
            pytest.fail("both live")
        other.kill()
    assert lock.exists() and not is_held(folder)
    with held(folder):
        assert f"process {os.getpid()} " in lock.read_text()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    said = []
    with held(tmp_path / "second", said):
        assert not is_held(tmp_path / "second")
    assert said == [
        f"{tmp_path}/.second.lock cannot be locked (No locks available): "
        f"start no other run of this name meanwhile"
    ]


def test_a_live_runs_folder_stays_where_it_is(tmp_path):
    """Whether the launcher would move it, or rank 0."""
    live = tmp_path / "second"
    live.mkdir()
    with held(live), heard_signals(signal.SIGINT, answer=ends_at_once("test")) as signals:
        folder = RunFolder(tmp_path, "second")
        assert folder.begin() is None and not folder.has_begun
        folder.discard()
        config = ToyRun(name="second", steps=1, directory=str(tmp_path), mesh=rrfp.Mesh(pp=1))
        with pytest.raises(rrfp.UsageError, match=re.escape(f"{live} is being trained by process")):
            train(config, signals)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".second.lock", "second"]


def test_a_live_run_whose_lock_file_was_deleted_keeps_its_name(tmp_path):
    folder = tmp_path / "second"
    folder.mkdir()
    own = World(folder=folder)
    with held(folder), used_folder(folder):
        (tmp_path / ".second.lock").unlink()
        with (
            pytest.raises(rrfp.UsageError, match="another process, whose lock file"),
            held(folder),
        ):
            pytest.fail("both live")
        with name_held(own, folder, print):  # an attempt of the launcher that has the folder
            pass
    assert is_used(folder) is False
    with held(folder):
        pass
