"""The launcher of named runs: what it would start, and what it refuses before it starts anything."""

import sys
from pathlib import Path

import pytest

from rrfp_jax.launcher import spawn
from tests.support.commands import launch

ROOT = Path(__file__).parents[2]
CONFIG = f"--config={ROOT / 'configs' / 'quickstart.py'}"


@pytest.fixture
def spawned(monkeypatch, tmp_path):
    """What `rrfp launch` would start."""
    calls = []
    monkeypatch.setattr("rrfp_jax.commands.launch.leave_accelerators_alone", lambda: None)
    monkeypatch.setattr(
        spawn.Launch,
        "run",
        lambda made: calls.append((made.argv, made.count, made.folder, made.max_restarts)) or 0,
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    return calls


def test_a_named_run_gets_a_process_per_stage(spawned, tmp_path):
    where = f"--config.directory={tmp_path}"
    assert launch([CONFIG, where, "--config.mesh.pp=2"]) == 0
    assert launch([CONFIG, where, "-n", "2", "--max-restarts=3"]) == 0
    (argv, count, folder, none), (others, fewer, _, restarts) = spawned
    assert argv == [sys.executable, "-m", "rrfp_jax", "train", CONFIG, where, "--config.mesh.pp=2"]
    assert (count, fewer, others[-1]) == (2, 2, where)
    assert (none, restarts) == (0, 3)
    assert folder.final == tmp_path / "quickstart"


def test_flags_come_in_any_order(spawned, tmp_path):
    given = [CONFIG, f"--config.directory={tmp_path}", "--config.name=mine", "-n", "2", "--max-restarts=1"]
    assert launch(given) == launch([*given[3:], *given[:3]]) == 0
    first, other = [(argv, count, folder.final, restarts) for argv, count, folder, restarts in spawned]
    assert other == first


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "no script given"),
        ([CONFIG, "--config.stepz=3"], "did you mean --config.steps?"),
        ([CONFIG, "--config.steps=0"], "at least one step"),
        ([CONFIG, "-n"], "-n: expected one argument"),
        ([CONFIG, "-n", "5"], "divides 4"),
        ([CONFIG, "-n", "0"], "give a number of processes, from 1 to 4,096"),
        ([CONFIG, "--max-restarts"], "--max-restarts: expected one argument"),
        ([CONFIG, "--max-restarts=-1"], "give a number of restarts"),
    ],
)
def test_a_named_run_is_refused_before_anything_is_started(spawned, argv, reason, capsys):
    assert launch(argv) == 2
    assert reason in capsys.readouterr().err
    assert spawned == []


@pytest.mark.parametrize(
    ("argv", "text"), [(["--help"], "usage"), ([CONFIG, "--help"], "--config.mesh.pp=4")]
)
def test_a_named_run_helps(spawned, argv, text, capsys):
    assert launch(argv) == 0
    assert text in capsys.readouterr().out and spawned == []
