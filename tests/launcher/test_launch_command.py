"""The command `rrfp launch` itself: what it runs, what it refuses, its help."""

import sys
from pathlib import Path

import pytest

from tests.support.commands import launch as main

ROOT = Path(__file__).parents[2]


def test_the_command_runs_scripts_and_modules(tmp_path, marker, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "train_it.py").write_text("import sys; print(sys.argv[2:]); sys.exit(len(sys.argv) - 3)")
    assert main(["-n", "1", "train_it.py", marker, "-n"]) == 0
    assert (
        main(["-n", "2", "--name=trial", "--directory", "elsewhere", "-m", "train_it", marker, "a", "b"]) == 1
    )
    assert (tmp_path / "runs/train_it/rank-0.log").read_text() == "['-n']\n"
    assert (tmp_path / "elsewhere/trial/rank-1.log").read_text() == "['a', 'b']\n"
    assert main(["-n", "1", "train_it.py", marker, "-n"]) == 0
    assert "an earlier run is kept as" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "-n"),
        (["-n", "2"], "no script given"),
        (["-n", "0", "conftest.py"], "-n 0: give a number of processes, from 1 to 4,096"),
        (["-n", "two", "conftest.py"], "-n two: give a number of processes, from 1 to 4,096"),
        (["-n", "2", "absent.py"], "absent.py: no such file"),
        (["-n", "2", "-m", "absent"], "-m absent: no such module"),
        (["-n", "2", "-m"], "no module given"),
        (["-n", "2", "--name=a/b", "conftest.py"], "--name='a/b'"),
        (["--nam=x", "-n", "2", "conftest.py"], "--nam=x"),
        (["-n", "2", "--max-restarts=-1", "conftest.py"], "--max-restarts=-1"),
        (["-n", "2", "--directory=conftest.py/x", "conftest.py"], "cannot be written"),
    ],
)
def test_the_command_refuses_in_one_line(argv, reason, monkeypatch, capsys):
    monkeypatch.chdir(ROOT / "tests")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("rrfp launch: ") and printed.err.count("\n") == 1
    assert reason in printed.err


def test_the_command_helps(capsys):
    assert main(["--help"]) == 0
    assert "Runs a Python script in N processes" in capsys.readouterr().out
