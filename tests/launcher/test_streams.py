"""Streams that are closed, texts that cannot be had, folders that are gone, and what outlasts the work."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rrfp_jax import printing
from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.errors import REFUSED, TrainingError, UsageError, text_of
from rrfp_jax.files import shown_path
from rrfp_jax.launcher.folders import RunFolder
from rrfp_jax.launcher.rank_process import RankProcess
from rrfp_jax.launcher.supervisor import Screen
from rrfp_jax.runs.lent_folder import LOCK_SECONDS, lent_folder
from rrfp_jax.runtime.run.exits import exit_report, read_all, report, report_in
from rrfp_jax.runtime.run.host_memory import HostMemory
from rrfp_jax.runtime.run.world import World
from rrfp_jax.user_code import called
from tests.launcher.conftest import LIMIT_SECONDS, until
from tests.support.commands import launch, sim

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed(), Broken()], ids=["none", "closed", "broken"])
def test_nobody_to_print_for(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    printing.say("one")
    printing.warn("two")
    screen = Screen()
    screen.show(0, b"three\n")
    screen.live(b"four")
    printing.settle_streams()
    assert screen.environment == {} and not printing.is_terminal()


def test_what_a_stream_cannot_encode_is_escaped(monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := io.TextIOWrapper(io.BytesIO(), "ascii"))
    printing.say("Zürich")
    print_whole("─ Zürich")
    assert stream.buffer.getvalue() == b"Z\\xfcrich\n\\u2500 Z\\xfcrich\n"


def test_output_goes_on_once_a_full_pipe_has_room(monkeypatch):
    read, write = os.pipe()
    os.set_blocking(write, False)
    with open(read, "rb", 0) as reader, open(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        printing.write_bytes(b"x" * 2**20)
        reader.read(2**20)
        printing.write_bytes(b"late\n")
        assert reader.read(2**20).endswith(b"late\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_save_themselves_though_nobody_reads_any_more(tmp_path, marker, number):
    """As with `2>&1 | tee log` and Ctrl-C, which ends tee at once."""
    (tmp_path / "train.py").write_text(
        "import os, signal, time\n"
        "def save(*_):\n"
        "    time.sleep(0.5); open('saved-' + os.environ['RRFP_RANK'], 'w'); os._exit(0)\n"
        "signal.signal(signal.SIGINT, save); signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-m", "rrfp_jax", "launch", "-n", "2", "train.py", marker]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as launcher:
        assert {launcher.stdout.readline() for _ in range(2)} == {b"[0] ready\n", b"[1] ready\n"}
        launcher.stdout.close()
        launcher.send_signal(number)
        assert launcher.wait(LIMIT_SECONDS) in (0, 130)
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-", "> /dev/full 2>&1"])
def test_the_launcher_without_streams(tmp_path, marker, streams):
    (tmp_path / "train.py").write_text("print('here'); open('whole', 'w')")
    launch = f"{sys.executable} -m rrfp_jax launch -n 1 train.py {marker} {streams}"
    done = subprocess.run(
        ["bash", "-c", launch], cwd=tmp_path, env=ENV, capture_output=True, timeout=LIMIT_SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"") and (tmp_path / "whole").exists()
    assert (tmp_path / "runs/train/rank-0.log").read_text() == "here\n"


@pytest.mark.parametrize("command", ["launch", "train"])
def test_what_a_command_opens_never_takes_the_place_of_a_stream(tmp_path, command):
    """Else what C++ prints would go into a file of the run."""
    code = (
        f"import os, sys; from rrfp_jax.commands import cli; sys.argv = ['rrfp', '{command}', '--help']\n"
        f"cli.main = lambda argv: open('number', 'w').write(str(os.open('/', os.O_RDONLY))) and 0\n"
        f"cli.run()"
    )
    closed = ["bash", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(closed, cwd=tmp_path, env=ENV, timeout=LIMIT_SECONDS, check=False).returncode == 0
    assert int((tmp_path / "number").read_text()) > 3


class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def test_exceptions_without_a_text():
    assert text_of(Odd()) == "it has no text: its __str__ raised RuntimeError"
    words = exit_report(World(), Odd())
    assert words.sentence == f"Odd: {text_of(Odd())}" and "Odd" in words.traceback
    with (
        pytest.raises(TrainingError, match=r"^f\(\) raised Odd: it has no text"),
        called("f()", TrainingError),
    ):
        raise Odd
    with pytest.raises(UsageError, match=r"^f\(\) called sys.exit\('it has no"), called("f()", UsageError):
        sys.exit(Odd())


@pytest.mark.parametrize("long", [False, True])
def test_last_words_that_no_file_takes_are_printed_for_the_launcher(tmp_path, monkeypatch, capfd, long):
    world = World(1, 2, folder=tmp_path)
    shutil.rmtree(tmp_path)
    words = exit_report(world, ValueError("x" * (10**5 if long else 10)))
    report(world, words)
    line = capfd.readouterr().err
    tmp_path.mkdir()
    (tmp_path / "line").write_text(f"before{line}after\n")
    shown, code = [], f"print(open({str(tmp_path / 'line')!r}).read(), end='')"
    rank = RankProcess(1, [sys.executable, "-c", code], ENV, tmp_path / "log", shown.append)
    assert until(lambda: not rank.read())
    rank.close()
    assert shown == [b"before\n", b"after\n"] and list(rank.tail) == ["before", "after"]
    assert rank.end.report == report_in(line.lstrip("\n").encode())
    assert (rank.end.report.sentence, rank.end.report.traceback is None) == (words.sentence, long)
    assert (tmp_path / "log").read_text() == "before\nafter\n" and not read_all(tmp_path)


@pytest.mark.parametrize(
    "end",
    [
        "from rrfp_jax.commands.command_line import leave; leave(3)",
        "from rrfp_jax.runtime.run.exits import end\n"
        "from rrfp_jax.runtime.run.world import World\n"
        "end(World(), 3)",
        "import threading; from rrfp_jax.runtime.run.signals import ends_at_once\n"
        "answer = ends_at_once('x')\n"
        "thread = threading.Thread(target=answer.heed, args=[2]); thread.start(); thread.join()",
    ],
    ids=["leave", "end", "ends_at_once"],
)
@pytest.mark.parametrize(
    "odd",
    [
        "multiprocessing.active_children = fails",
        "sys.stdout = sys.stderr = type('Odd', (), {'write': len, 'flush': fails})()",
    ],
    ids=["workers", "stream"],
)
def test_a_failed_process_never_ends_as_if_all_were_well(end, odd):
    code = f"import multiprocessing, sys\ndef fails(*_): raise RuntimeError\n{odd}\n{end}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, capture_output=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == (130 if "ends_at_once" in end else 3)


def test_a_deleted_working_directory(tmp_path, monkeypatch, capsys):

    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert shown_path(Path("/a/b")) == "/a/b"
    assert sim([]) == 2
    assert capsys.readouterr().err == (
        "rrfp sim: the working directory was deleted: cd to one that is there\n"
    )
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        RunFolder(Path("runs"), "trial")


def test_what_a_killed_launcher_has_left_in_staging_is_removed(tmp_path):
    left, other = tmp_path / ".trial.starting-1", tmp_path / ".trials.starting-1"
    for folder in (left, other):
        folder.mkdir()
        (folder / "rank-0.log").touch()
    living = RunFolder(tmp_path, "trial")
    RunFolder(tmp_path, "trial").discard()
    assert sorted(tmp_path.iterdir()) == [living.staging, other]


def test_a_directory_that_is_a_live_runs_own_folder_is_refused_within_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("rrfp_jax.name_lock.LOCK_SECONDS", 0.1)
    living = RunFolder(tmp_path, "trial")
    with pytest.raises(UsageError, match=r"locked by another process for 0 s.*name another directory"):
        RunFolder(living.staging, "inner")
    living.discard()


def test_a_rank_that_the_kernel_holds_is_left_behind(tmp_path, monkeypatch):
    shown = []
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    rank = RankProcess(0, argv, ENV, tmp_path / "log", shown.append)
    with monkeypatch.context() as patched:
        patched.setattr(RankProcess, "_kill_group", lambda self, number: None)
        patched.setattr("rrfp_jax.launcher.rank_process.DEATH_SECONDS", 0.2)
        began = time.monotonic()
        while rank.runs:
            rank.send(signal.SIGKILL)
            assert time.monotonic() < began + LIMIT_SECONDS
            time.sleep(0.01)
    assert time.monotonic() >= began + 0.2 and rank.end.status == -signal.SIGKILL
    assert b"has not ended 0.2 s after SIGKILL and is left behind" in b"".join(shown)
    rank._kill_group(signal.SIGKILL)
    rank._process.wait(LIMIT_SECONDS)
    rank.close()


def test_a_clock_that_is_set_back_while_ranks_end(tmp_path, monkeypatch):
    rank = RankProcess(0, [sys.executable, "-c", ""], ENV, tmp_path / "log", lambda line: None)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1000.0)
    assert until(lambda: rank.look() or not rank.runs)
    monkeypatch.setattr(time, "time", lambda: real() - 1000.0)
    assert until(lambda: rank.gone, 5.0)
    rank.close()


ENDS = f"""
import atexit, os, socket, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from rrfp_jax.runtime.run.exits import limit_overtime
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.run.exits import Shutdown
from rrfp_jax.runtime.run.mailbox import Mailbox
ours, theirs = socket.socketpair()
world = World(0, 2, Mailbox(0, {{1: ours}}))
threading.Thread(target=lambda: all(iter(lambda: theirs.recv(4096), b"")), daemon=True).start()
def upload(): time.sleep(60)
limit_overtime(World() if sys.argv[2:] else world, float(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("code", "limit", "status", "who"),
    [
        (
            "threading.Thread(target=upload, name='uploader').start()",
            "1",
            1,
            "the thread uploader, in upload (",
        ),
        ("atexit.register(upload)", "1", 1, "an exit handler, in upload ("),
        ("threading.Thread(target=upload, daemon=True).start()", "1", 0, ""),
        ("threading.Timer(1.0, print, ['heard']).start()", "20", 0, ""),
        ("threading.Timer(1.0, os._exit, [7]).start(); sys.exit(3)", "inf", 7, ""),
        ("Shutdown._leave_service = lambda _: time.sleep(3); Shutdown(world)", "1", 0, ""),
    ],
)
def test_what_outlasts_the_work(tmp_path, code, limit, status, who):
    (tmp_path / "script.py").write_text(ENDS + code)
    command = [sys.executable, tmp_path / "script.py", limit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == status, done.stderr
    if who:
        waits, ended = done.stderr.splitlines()
        assert waits.startswith(f"rank 0: its work is done; it waits for {who}") and waits.endswith(
            "1 s at most"
        )
        assert ended.startswith(f"rank 0: its work is done, but {who}") and "not ended within 1 s" in ended
    else:
        assert done.stderr == ""


@pytest.mark.slow(reason="it waits for threads to end")
def test_a_process_that_nobody_waits_for_lasts_as_long_as_its_threads(tmp_path):
    (tmp_path / "script.py").write_text(f"{ENDS}threading.Timer(7.0, print, ['heard']).start()")
    command = [sys.executable, tmp_path / "script.py", "1", "alone"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert (done.returncode, done.stdout) == (0, "heard\n")
    assert done.stderr.startswith("rank 0: its work is done; it waits for the thread Thread-")
    assert done.stderr.count("\n") == 1 and done.stderr.endswith(" to end\n")


def test_the_launcher_does_not_wait_for_threads_of_the_config(tmp_path, marker):
    code = (
        "import threading, time; from rrfp_jax.commands.command_line import leave\n"
        "threading.Thread(target=time.sleep, args=[60]).start(); print('said'); leave(3)"
    )
    command = [sys.executable, "-c", code, marker]
    done = subprocess.run(command, env=ENV, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (3, b"said\n")


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


def test_a_left_folder_that_another_launcher_removes_at_that_moment(tmp_path, monkeypatch):
    (left := tmp_path / f"rrfp-{os.getuid()}-left").mkdir()
    lstat = Path.lstat

    def lstat_and_remove(path):
        found = lstat(path)
        if path == left:
            shutil.rmtree(left)
        return found

    monkeypatch.setattr(Path, "lstat", lstat_and_remove)
    with lent_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_what_ranks_are_told(tmp_path):
    assert HostMemory.of({}) is None
    memory = HostMemory(tmp_path, 2)
    assert HostMemory.of(memory.environment) == memory
    assert memory.request.parent == memory.folder and not memory.request.exists()
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
