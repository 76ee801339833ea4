"""What a launcher shows of its ranks, and what it would start or refuses."""

import io
import os
import sys
import time
from pathlib import Path

import pytest

from rrfp_jax.launcher import spawn
from rrfp_jax.launcher.folders import RunFolder
from rrfp_jax.launcher.rank_process import RankProcess
from rrfp_jax.launcher.supervisor import Patience, Screen, Supervisor
from rrfp_jax.progress import LIVE, MARK, Doing
from rrfp_jax.report import progress_line
from rrfp_jax.runtime.run.signals import collected_signals
from tests.support.commands import launch
from tests.support.commands import launch as main


class Terminal:
    """A stdout that is one, or is not."""

    def __init__(self, is_one=True):
        self.buffer, self.isatty = io.BytesIO(), lambda: is_one

    def fileno(self):
        raise ValueError("nothing that has a size")

    def shown(self):
        found = self.buffer.getvalue().decode().replace("\r\x1b[K", "<")
        self.buffer = io.BytesIO()
        return found


def test_lines_go_above_the_live_one(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    screen = Screen()
    screen.show(0, b"first\n")
    assert terminal.shown() == "[0] first\n"
    screen.show(0, f"{MARK}compiling 1/2\n".encode())
    assert terminal.shown() == "compiling 1/2"
    screen.show(1, b"second")
    assert terminal.shown() == "<[1] second\ncompiling 1/2"
    screen.show(0, f"{MARK}{'x' * 100}\n".encode())
    assert terminal.shown() == "<" + "x" * 79
    screen.show(0, f"{MARK}\n".encode())
    screen.live()
    assert terminal.shown() == "<"
    assert screen.environment == {LIVE: "1"}
    monkeypatch.setattr(sys, "stdout", Terminal(is_one=False))
    assert Screen().environment == {}


def test_what_the_launcher_says_takes_the_place_of_the_live_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with collected_signals([]) as signals:
        folder, told = RunFolder(tmp_path, "trial"), lambda text: terminal.buffer.write(text.encode())
        supervisor = Supervisor(Patience(), folder, signals, told, 1)
        supervisor._screen.live(b"compiling 1/2")
        supervisor.monitor._say("no rank has joined")
        supervisor.close()
    assert terminal.shown() == "compiling 1/2<no rank has joined"


def test_live_lines_are_not_kept(tmp_path):
    code = f"print('one'); print('{MARK}live'); print('two')"
    shown = []
    rank = RankProcess(0, [sys.executable, "-c", code], dict(os.environ), tmp_path / "log", shown.append)
    limit = time.monotonic() + 20
    while rank.read() and time.monotonic() < limit:
        time.sleep(0.01)
    rank.close()
    assert shown == [b"one\n", f"{MARK}live\n".encode(), b"two\n"]
    assert (tmp_path / "log").read_text() == "one\ntwo\n" and list(rank.tail) == ["one", "two"]


def test_a_rank_writes_live_lines_if_it_is_told_to(monkeypatch):
    said = []
    monkeypatch.setenv(LIVE, "1")
    monkeypatch.setattr(progress_line, "LIVE_AFTER", 0.0)
    lasting = progress_line.printed_lines(said.append)
    lasting(Doing("compiling", 0, 2))
    lasting(Doing("compiling", 2, 2))
    assert said[0] == f"{MARK}compiling 0/2" and said[-2] == MARK
    assert said[-1].startswith("compiling 2/2: done after ")
    monkeypatch.delenv(LIVE)
    progress_line.printed_lines(said.append)(Doing("saving", 0, 1))
    assert not any("saving" in line for line in said), "plain lines tell nothing before a second"


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


def test_a_script_leaves_a_live_run_of_its_name_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    living = RunFolder(tmp_path / "runs", "train")
    living.begin()
    assert main(["-n", "1", "train.py"]) == 2
    assert "runs/train: another live run is there: give this one another --name" in capfd.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == [living.path]


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


CONFIG = f"--config={ROOT / 'configs' / 'quickstart.py'}"


@pytest.fixture
def spawned(monkeypatch, tmp_path):
    """What `rrfp launch` would start."""
    calls = []
    monkeypatch.setattr("rrfp_jax.commands.launch.leave_accelerators_alone", lambda: None)
    monkeypatch.setattr(
        spawn.Launch,
        "run",
        lambda made: calls.append((made.argv, made.replicas.most, made.folder, made.max_restarts)) or 0,
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
        ([CONFIG, "-n", "5"], "so start 4, 2 or 1 processes"),
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
