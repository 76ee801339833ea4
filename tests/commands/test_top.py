"""`rrfp top`: on a terminal and in a script; of a run that has not begun, that trains, and that has ended."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest

import rrfp_jax as rrfp
from rrfp_jax.report.look import read_latest
from rrfp_jax.report.store import LATEST, StepFile
from rrfp_jax.runs.name_held import name_held
from rrfp_jax.runtime.run.world import World
from tests.support import toy
from tests.support.commands import top
from tests.support.watched import step_of, told

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60.0
LINE = {"step_seconds": 0.5, "wall_seconds": 0.6, "loss": 2.0, "schedule": "bf"}


@pytest.fixture
def folder(tmp_path):
    """Of a run that has ended."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"steps": 2}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(LINE | {"step": n}) + "\n" for n in range(2)))
    StepFile(folder).add(told(step_of(4)))
    return folder


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "the following arguments are required: RUN"),
        (["file", "--once"], "file is no folder: give that of a run, as runs/NAME"),
        (["nowhere", "--once"], "nowhere: no run has begun there: give the folder of one"),
        ([".", "--once"], ".: no run has begun there"),
        (["nowhere"], "standard output is no terminal to draw on: --once prints one frame"),
        (["nowhere", "--every=0"], "--every=0: give seconds, from 0.1 to 3,600"),
        (["nowhere", "--every=nan"], "--every=nan: give seconds"),
        (["nowhere", "--every=often"], "--every=often: give seconds, from 0.1 to 3,600"),
    ],
)
def test_refusals(given, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert top(given) == 2
    told = capsys.readouterr()
    assert said in told.err and told.out == "" and told.err.count("\n") == 1


def test_a_frame_for_a_script(folder, monkeypatch, capsys):
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert top([str(folder), "--once"]) == 0
        told = capsys.readouterr().out
        assert told.startswith("mine  ended  all 2 steps  schedule bf\nloss 2  ") and "\x1b" not in told
        assert width - 20 < max(map(len, told.splitlines())) <= width
        assert told.count("█ computes") == 1 and told.endswith(" ms\n")


def test_it_needs_no_jax(folder):
    code = f"from tests.support.commands import top; import sys; top([{str(folder)!r}, '--once'])"
    code += "; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS)


class Terminal:
    """`rrfp top` on a terminal of 80 columns and 24 lines; `said` is all that it has written there."""

    def __init__(self, *arguments, kind="xterm-256color"):
        self._mine, own = pty.openpty()
        fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        environment["TERM"] = kind
        command = [sys.executable, "-m", "rrfp_jax", "top", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=own, stdout=own, stderr=own, env=environment, cwd=ROOT)
        os.close(own)
        self.said = ""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self._mine)

    def until(self, text):
        """Read until this has been said, or the process has ended."""
        limit = time.monotonic() + LIMIT_SECONDS
        while text not in self.said and time.monotonic() < limit:
            if not select.select([self._mine], [], [], 0.1)[0]:
                continue
            try:
                self.said += os.read(self._mine, 65536).decode(errors="replace")
            except OSError:  # it has ended
                break
        assert text in self.said

    def end(self):
        """Its exit status; what it has left on the terminal, once all is in order there."""
        self.until("\x1b[?25h")  # the cursor is shown
        status = self.process.wait(LIMIT_SECONDS)
        while select.select([self._mine], [], [], 0.1)[0]:
            try:
                self.said += os.read(self._mine, 65536).decode(errors="replace")
            except OSError:
                break
        return status, self.said.rpartition("\x1b[?1049l")[2]  # after the other screen was left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_waits_for_a_run_and_ctrl_c_ends_it(tmp_path, number):
    with Terminal(tmp_path / "none") as terminal:
        terminal.until("waiting for it")
        terminal.process.send_signal(number)
        status, left = terminal.end()
    assert status == 0 and "waiting for it" in left and "Traceback" not in terminal.said


def test_a_terminal_that_cannot_be_written_over(folder):
    with Terminal(folder, kind="dumb") as terminal:
        terminal.until("no terminal to draw on: --once prints one frame")
        assert terminal.process.wait(LIMIT_SECONDS) == 2


def test_a_run_that_begins_and_lives_is_shown_anew(tmp_path):
    folder = tmp_path / "mine"
    with Terminal(folder, "--every=0.1") as terminal:
        terminal.until("waiting for it")
        with name_held(World(), folder, print):
            terminal.until("mine\x1b[0m  starting")
            folder.mkdir()
            (folder / "config.json").write_text('{"steps": 2}')
            terminal.until("no step has ended yet")
            for step, shown in enumerate(("step 0 of 2", "all 2 steps")):
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(LINE | {"step": step}) + "\n")
                terminal.until(f"running  {shown}")
            StepFile(folder).add(told(step_of(4)))
            terminal.until(" computes  ")
        terminal.until("ended  all 2 steps")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end()[0] == 0


def test_a_run_that_has_ended_is_shown_and_left(folder):
    with Terminal(folder) as terminal:
        status, left = terminal.end()
    assert status == 0 and "all 2 steps" in left and "computes" in left


def once(folder):
    """A frame of a run as a script gets it; None if it is refused."""
    command = [sys.executable, "-m", "rrfp_jax", "top", str(folder), "--once"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, cwd=ROOT
    )
    assert "Traceback" not in done.stderr
    return done.stdout if done.returncode == 0 else None


@pytest.mark.slow(reason="22 s: processes; report/test_frame.py has the frames")
def test_a_run_of_several_processes_is_watched(tmp_path):
    folder = tmp_path / "toy"
    command = [sys.executable, "-m", "rrfp_jax", "launch", "--config=tests/scripts/toy_run.py"]
    command += [f"--config.directory={tmp_path}", "-n", "4"]
    launcher = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        limit, frames = time.monotonic() + LIMIT_SECONDS, [""]
        while time.monotonic() < limit and "computes  " not in frames[-1] and launcher.poll() is None:
            frames.append(once(folder) or "")
            time.sleep(0.2)
        lines = frames[-1].splitlines()
        assert lines[0].startswith("toy  running  step ") and " of 100000" in lines[0]
        assert max(map(len, lines)) <= 80
        at = next(number for number, line in enumerate(lines) if line.startswith("stage  rank"))
        assert [line.split()[:2] for line in lines[at + 1 : at + 5]] == [[str(n), str(n)] for n in range(4)]
        assert "KiB" in lines[at + 1] and "3>2 " in frames[-1]
        launcher.send_signal(signal.SIGINT)
        launcher.wait(LIMIT_SECONDS)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    assert once(folder).startswith("toy  ended  step ")
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert read_latest(folder / LATEST).trace.step == steps[-1], "the last step, however soon it came"


@pytest.mark.slow(reason="18 s: processes; report/test_frame.py has the frames")
def test_a_step_with_replicas(tmp_path):
    report = toy.trainer(mesh=rrfp.Mesh(pp=2, dp=2), data=None).step(toy.microbatches(4))
    StepFile(tmp_path).add(replace(report.recorded, ranks=report.ranks))
    found = read_latest(tmp_path / LATEST)
    assert found.trace.busy_seconds == report.trace.busy_seconds and len(found.trace.busy_seconds) == 2
    assert found.trace.replica == report.trace.replica and found.ranks == [[0]] * 4
