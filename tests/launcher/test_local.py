"""The launcher of named runs: what it would start, and what it refuses before it starts anything."""

import sys
from pathlib import Path

import pytest

from rrfp_jax.commands import launch, local
from rrfp_jax.launcher import spawn

ROOT = Path(__file__).parents[2]
CONFIG = f"--config={ROOT / 'configs' / 'quickstart.py'}"


@pytest.fixture
def spawned(monkeypatch, tmp_path):
    """What `launch.local` would start."""
    calls = []
    monkeypatch.setattr(local, "leave_accelerators_alone", lambda: None)
    monkeypatch.setattr(
        spawn.Launch,
        "run",
        lambda made: calls.append((made.argv, made.count, made.folder, made.max_restarts)) or 0,
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    return calls


def test_a_named_run_gets_a_process_per_stage(spawned, tmp_path):
    where = f"--config.directory={tmp_path}"
    assert local.main([CONFIG, where, "--config.mesh.pp=2"]) == 0
    assert local.main([CONFIG, where, "-n", "2", "--max-restarts=3"]) == 0
    (argv, count, folder, none), (others, fewer, _, restarts) = spawned
    assert argv == [sys.executable, "-m", "rrfp_jax.commands.train", CONFIG, where, "--config.mesh.pp=2"]
    assert (count, fewer, others[-1]) == (2, 2, where)
    assert (none, restarts) == (0, 3)
    assert folder.final == tmp_path / "quickstart"


def test_a_named_run_is_launched_by_either_command(spawned, tmp_path):
    given = [CONFIG, f"--config.directory={tmp_path}", "--config.name=mine", "-n", "2", "--max-restarts=1"]
    assert local.main(given) == launch.main(given) == launch.main([*given[3:], *given[:3]]) == 0
    first, *others = [(argv, count, folder.final, restarts) for argv, count, folder, restarts in spawned]
    assert others == [first] * 2


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "no --config given"),
        ([CONFIG, "--config.stepz=3"], "did you mean --config.steps?"),
        ([CONFIG, "--config.steps=0"], "at least one step"),
        ([CONFIG, "-n"], "give a number"),
        ([CONFIG, "-n", "5"], "divides 4"),
        ([CONFIG, "-n", "0"], "divides 4"),
        ([CONFIG, "--max-restarts"], "give a number of restarts"),
        ([CONFIG, "--max-restarts=-1"], "give a number of restarts"),
    ],
)
def test_a_named_run_is_refused_before_anything_is_started(spawned, argv, reason, capsys):
    assert local.main(argv) == 2
    assert reason in capsys.readouterr().err
    assert spawned == []


@pytest.mark.parametrize(
    ("argv", "text"), [(["--help"], "usage"), ([CONFIG, "--help"], "--config.mesh.pp=4")]
)
def test_a_named_run_helps(spawned, argv, text, capsys):
    assert local.main(argv) == launch.main(argv) == 0
    assert capsys.readouterr().out.count(text) >= 2 and spawned == []
