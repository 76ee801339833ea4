"""The folder in the host's memory that a launcher lends its ranks, and who cannot have one."""

import os
import sys

import pytest

from rrfp_jax.errors import REFUSED, UsageError
from rrfp_jax.runtime.run.host_memory import LOCK_SECONDS, HostMemory, lent_folder
from tests.support.commands import launch


def test_a_folder_is_removed_and_so_are_those_of_killed_launchers(tmp_path):
    with lent_folder(tmp_path) as living:
        left = tmp_path / f"rrfp-{os.getuid()}-left"
        left.mkdir()
        (left / "states").mkdir()
        made_again = tmp_path / f"rrfp-{os.getuid()}-again"  # by ranks, so not locked
        (made_again / "states").mkdir(parents=True)
        for folder in (living, left / "states", left, made_again):
            old = folder.stat().st_mtime - LOCK_SECONDS - 1
            os.utime(folder, (old, old))
        with lent_folder(tmp_path) as other:
            assert sorted(tmp_path.iterdir()) == sorted([living, other, made_again])
            assert other.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == [made_again]
    with pytest.raises(UsageError, match="no folder can be made in the host's memory"):
        lent_folder(tmp_path / "absent").__enter__()


def test_what_ranks_are_told(tmp_path):
    assert HostMemory.of({}) is None
    memory = HostMemory(tmp_path, 2)
    assert HostMemory.of(memory.environment) == memory
    memory.ask()
    assert memory.is_asked_for
    memory.forget()
    assert not memory.is_asked_for
    for wrong in ({"RRFP_REPLICAS": "2"}, {"RRFP_HOST_MEMORY": str(tmp_path)}):
        with pytest.raises(UsageError, match="unset them"):
            HostMemory.of(wrong)
    with pytest.raises(UsageError, match="no folder with a number of replicas"):
        HostMemory.of(memory.environment | {"RRFP_REPLICAS": "0"})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--replace-after=5", "--config.mesh.dp=2"], "give --max-restarts=N"),
        (
            ["--replace-after=5", "--max-restarts=2"],
            "with mesh.dp=1 in 4 processes: no replica can be done without",
        ),
        (["--replace-after=soon", "--max-restarts=2"], "give a number of seconds"),
    ],
)
def test_what_cannot_be(given, reason, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("rrfp_jax.commands.launch.leave_accelerators_alone", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    argv = [f"--config={root}/configs/quickstart.py", f"--config.directory={tmp_path / 'runs'}", *given]
    assert launch(argv) == REFUSED
    assert reason in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_a_script_has_no_replicas_to_speak_of(tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    assert launch(["-n", "2", "--replace-after=5", str(tmp_path / "train.py")]) == REFUSED
    assert "--replace-after=5 with a script: only a named run" in capsys.readouterr().err
