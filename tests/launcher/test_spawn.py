"""The launcher with tiny ranks: how it starts them, watches them, stops them and is stopped."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rrfp_jax.errors import DONE, FAILED, INTERRUPTED, UsageError
from rrfp_jax.files import move_away
from rrfp_jax.launcher.folders import RunFolder
from rrfp_jax.launcher.restarts import Elastic
from rrfp_jax.launcher.spawn import Launch
from rrfp_jax.launcher.supervisor import Patience
from rrfp_jax.runtime.run import signals
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.signals import SAVE_SECONDS, EndsAtOnce, StopReason, StopsAfterStep, save_seconds
from rrfp_jax.runtime.run.world import World
from tests.launcher.conftest import LIMIT_SECONDS, processes, until

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 20.0
"""Longer than any of these runs takes on a busy machine; shorter than they would without the launcher."""
PATIENT = Patience(grace=HANG_SECONDS, terminate=0.3, silence=1.0, interrupt=1.0)
BRISK = dataclasses.replace(PATIENT, grace=0.5)

PROLOGUE = """\
import os, signal, subprocess, sys, time
rank, here = int(os.environ["RRFP_RANK"]), os.environ["RRFP_FOLDER"]
def end_by(number): os.kill(os.getpid(), number)
"""
OURS = """\
from pathlib import Path
from rrfp_jax.core.tasks import BACKWARD, Task
from rrfp_jax.runtime.run.recorder import FlightRecorder, RunPhase
from rrfp_jax.runtime.run.exits import ExitReport
from rrfp_jax.runtime.run.waits import ForOther
recorder = FlightRecorder(Path(here) / f"flight-{rank}", rank, f"stage {rank}")
def farewell(kind, sentence, status=1, **more):
    ExitReport(rank=rank, stages=f"stage {rank}", kind=kind, sentence=sentence, **more).write(Path(here))
    sys.exit(status)
"""


@pytest.fixture
def launch(tmp_path, marker, capfd):
    """Run a script in several ranks; its status, what was printed, the run's folder, the seconds it took."""

    def launch(text, count=2, patience=PATIENT):
        script = tmp_path / "train.py"
        script.write_text(PROLOGUE + text)
        folder = RunFolder(tmp_path / "runs", "trial")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        began = time.monotonic()
        argv = [sys.executable, str(script), marker]
        status = Launch(argv, Elastic({1: count}), folder, patience, env=env).run()
        printed = capfd.readouterr()
        return Result(status, printed.out, printed.err, tmp_path / "runs" / "trial", time.monotonic() - began)

    return launch


class Result:
    def __init__(self, status, out, err, folder, seconds):
        self.status, self.out, self.err, self.folder, self.seconds = status, out, err, folder, seconds


def test_output_is_prefixed_and_kept_as_it_is(launch):
    done = launch(
        'os.write(1, b"plain\\n\\xff\\xfe garbage\\n"); os.write(2, b"error\\n"); os.write(1, b"a ")\n'
        'time.sleep(0.1); os.write(1, b"whole line\\n"); print("x" * 200000); os.write(1, b"no end")'
    )
    assert done.status == 0 and done.err == ""
    assert (done.folder / "rank-1.log").read_bytes() == (
        b"plain\n\xff\xfe garbage\nerror\na whole line\n" + b"x" * 200000 + b"\nno end"
    )
    lines = done.out.splitlines()
    assert {"[0] plain", "[1] error", "[0] a whole line", "[1] no end"} <= set(lines)
    assert all(line.startswith(("[0] ", "[1] ")) for line in lines)
    assert not (done.folder / "diagnosis.txt").exists()
    assert not list(done.folder.parent.glob(".*"))


def test_a_run_that_fails_before_its_first_step_says_where_an_earlier_one_is_kept(launch):
    launch("")
    done = launch("sys.exit(3)")
    assert done.err.startswith(f"rrfp launch: an earlier run is kept as {done.folder}.1\n")


def test_what_ranks_are_told(launch, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    names = "RRFP_COORDINATOR RRFP_PROCESSES RRFP_RANK RRFP_FOLDER XLA_FLAGS"
    done = launch(
        f'told = [os.environ[n] for n in "{names}".split()]\n'
        "print(*told, os.getsid(0) == os.getpid(), not sys.stdin.read())"
    )
    address, count, rank, folder, *flags, session, no_input = done.out.splitlines()[0].split()[1:]
    assert address.startswith("127.0.0.1:") and (count, rank) in {("2", "0"), ("2", "1")}
    assert Path(folder).parent == done.folder.parent
    assert flags == ["--xla_dump_to=", "--xla_cpu_multi_thread_eigen=false"]
    assert session == no_input == "True"


def test_a_killed_rank_ends_the_run(launch):
    done = launch(
        OURS
        + 'recorder.phase(RunPhase("step", 12)); recorder.dispatched(12, rank, Task(BACKWARD, 0, 3))\n'
        + "if rank == 1: end_by(signal.SIGKILL)\n"
        + 'awaited = ForOther(what="input of B3", waited=2.1)\n'
        + 'farewell("peer lost", "rank 1 was lost", culprit=1, waiting=(awaited,))'
    )
    assert done.status == 1 and done.seconds < HANG_SECONDS
    first, second, third, logs = done.err.splitlines()
    assert first.startswith("rrfp launch: rank 1 (stage 1) was killed by SIGKILL")
    assert second.startswith("  it was in step 12, last dispatched B3 on stage 1, ")
    assert third.startswith("  rank 0 (stage 0), in step 12, last dispatched B3 on stage 0, ")
    assert third.endswith("waited for input of B3, since 2.1 s")
    assert logs.startswith("logs: ") and logs.endswith("trial/rank-*.log")
    assert (done.folder / "diagnosis.txt").read_text().splitlines() == [first, second, third]


def test_those_who_do_not_end_by_themselves_are_ended(launch):
    done = launch(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(f'{here}/deaf-{rank}', 'w').close()\n"
        "deaf = lambda: sum(name.startswith('deaf') for name in os.listdir(here))\n"
        "while rank == 1 and deaf() < 3: time.sleep(0.01)\n"
        "if rank == 1: raise ValueError('bad')\n"
        "time.sleep(60)",
        count=3,
        patience=BRISK,
    )
    assert done.status == 1 and done.seconds < HANG_SECONDS
    assert done.err.startswith(
        "rrfp launch: rank 1 exited with status 1 after ValueError: bad\n  the end of its log:\n    Tr"
    )
    assert "ValueError: bad\n" in done.err
    assert "  rank 2: ended by the launcher (SIGKILL)\n" in done.err


def test_a_rank_that_ends_well_leaves_the_others_running(launch):
    assert launch("time.sleep(1.5 * rank)").status == 0


def test_a_rank_frozen_at_the_start(launch):
    done = launch("if rank == 1: end_by(signal.SIGSTOP)\ntime.sleep(60)", patience=BRISK)
    assert done.status == 1 and 1.0 < done.seconds < HANG_SECONDS
    assert done.err.startswith("rrfp launch: rank 1 was frozen (stopped)\n")


def test_a_rank_frozen_later_is_for_the_others_to_miss(launch):
    done = launch(
        OURS
        + 'recorder.phase(RunPhase("step", 3))\n'
        + "if rank == 1: end_by(signal.SIGSTOP)\n"
        + 'time.sleep(2.0)\nfarewell("peer lost", "rank 1 was lost", culprit=1)'
    )
    assert done.status == 1 and 2.0 < done.seconds < HANG_SECONDS
    assert done.err.startswith("rrfp launch: rank 1 (stage 1) was frozen (stopped)\n  it was in step 3, for ")


def test_all_frozen(launch):
    assert launch(OURS + 'recorder.phase(RunPhase("step", 3))\nend_by(signal.SIGSTOP)').status == 1


@pytest.mark.parametrize("leave", ["", ", start_new_session=True"])
def test_a_grandchild_that_keeps_the_pipe_hangs_nobody(launch, leave):
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(12)'" + (
        ", sys.argv[1]]" if not leave else "]"
    )
    done = launch(f"subprocess.Popen({sleeper}{leave}); print('done')")
    assert done.status == 0 and done.seconds < 10
    assert "[1] done" in done.out.splitlines()


def test_refusals_leave_no_folder(launch):
    done = launch(OURS + 'farewell("refused", "no such file: x", 2)')
    assert (done.status, done.err) == (2, "rrfp launch: all ranks: no such file: x\n")
    assert not done.folder.parent.exists()


def test_the_folder_may_be_renamed_by_a_rank(launch, tmp_path):
    (tmp_path / "runs" / "trial").mkdir(parents=True)
    done = launch(
        "if rank == 0:\n    final = os.path.join(os.path.dirname(here), 'trial')\n"
        "    os.rename(final, final + '.1'); os.rename(here, final); print('renamed'); sys.exit(3)"
    )
    assert done.status == 1
    assert (done.folder / "rank-0.log").read_text() == "renamed\n"
    assert (done.folder / "diagnosis.txt").exists()
    assert [path.name for path in sorted(done.folder.parent.iterdir())] == ["trial", "trial.1"]


def test_a_killed_launchers_staging_folder_is_no_hindrance(tmp_path):
    first, second = (RunFolder(tmp_path / "runs", "trial") for _ in range(2))
    assert first.path != second.path and second.begin() is None
    assert second.path == second.final and not first.has_begun
    first.discard()
    assert list(second.final.parent.iterdir()) == [second.final]


def test_an_earlier_run_is_moved_away(launch):
    launch("print('first')")
    done = launch("sys.exit(1)")
    assert (done.folder.with_name("trial.1") / "rank-0.log").read_text() == "first\n"
    assert move_away(done.folder).name == "trial.2"


def when_printed(folder, text, act):
    """Act, in a thread, once the logs of both ranks hold a text."""

    def all_have():
        logs = list(folder.glob("runs/.trial*/rank-*.log"))
        return len(logs) == 2 and all(text in log.read_text() for log in logs)

    def wait():
        until(all_have)
        act()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(launch, tmp_path, number):
    when_printed(tmp_path, "ready\n", lambda: os.kill(os.getpid(), number))
    done = launch(
        "def stop(n, f): print('got', n); sys.exit(130)\n"
        f"signal.signal({int(number)}, stop); print('ready'); time.sleep(60)"
    )
    passed_on, end, how = done.err.splitlines()
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert passed_on.startswith(f"rrfp launch: {name} is passed on to the ranks, which have 121 s;")
    assert (done.status, end) == (130, "rrfp launch: interrupted")
    assert how == "nothing is lost: the same command starts it again"
    assert {f"[0] got {int(number)}", f"[1] got {int(number)}"} <= set(done.out.splitlines())
    assert not done.folder.parent.exists()


@pytest.mark.parametrize("twice", [False, True])
def test_ranks_that_ignore_an_interrupt_are_killed(launch, tmp_path, twice):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        if twice:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    when_printed(tmp_path, "ready\n", interrupt)
    patience = Patience(interrupt=60.0 if twice else 0.5, save=0.0)
    done = launch("signal.signal(2, signal.SIG_IGN); print('ready'); time.sleep(60)", patience=patience)
    assert done.status == 130 and done.seconds < HANG_SECONDS
    assert "\nrrfp launch: interrupted\n  rank 0: ended by the launcher (SIGKILL)\n" in done.err
    assert ("rrfp launch: Ctrl-C again: the ranks are killed\n" in done.err) == twice


def test_no_rank_outlives_a_killed_launcher(tmp_path, marker):
    (tmp_path / "train.py").write_text("import time; time.sleep(60)")
    command = [sys.executable, "-m", "rrfp_jax", "launch", "-n", "2", "train.py", marker]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=env) as launcher:
        assert until(lambda: len(processes(marker)) == 3)
        launcher.kill()
    assert until(lambda: not processes(marker), 2.0)


def test_a_closed_stdout_does_not_end_the_run(tmp_path, marker):
    (tmp_path / "train.py").write_text("for i in range(2000): print(i)\nopen('whole', 'w')")
    launch = f"{sys.executable} -m rrfp_jax launch -n 1 train.py {marker}"
    command = f"{launch} | head -1; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"[0] 0\n", b"")
    assert (tmp_path / "whole").exists()
    assert (tmp_path / "runs/train/rank-0.log").read_text().endswith("1999\n")


@pytest.mark.parametrize(("text", "seconds"), [("", SAVE_SECONDS), ("4", 4.0), ("0", 0.0)])
def test_the_time_to_save(text, seconds):
    assert save_seconds({"RRFP_SAVE_SECONDS": text}) == seconds


@pytest.mark.parametrize("text", ["soon", "-3", "nan"])
def test_nonsense_as_the_time_to_save_is_refused(text):
    with pytest.raises(UsageError, match=f"RRFP_SAVE_SECONDS={text}"):
        Patience.of({"RRFP_SAVE_SECONDS": text})


def test_all_learn_of_one_request_at_the_same_gather():
    ours, theirs = socket.socketpair()
    worlds = [World(0, 2, Mailbox(0, {1: ours})), World(1, 2, Mailbox(1, {0: theirs}))]
    agreed = {0: [], 1: []}

    def steps(world):
        for step in range(3):
            if (world.rank, step) in ((1, 1), (0, 2)):  # the second is of less account
                world.stop.request(StopReason.CTRL_C if world.rank else StopReason.ASKED)
            assert world.gather(f"step {step}", world.rank) == [0, 1]
            agreed[world.rank].append(world.stop.agreed)

    other = threading.Thread(target=steps, args=[worlds[1]])
    other.start()
    steps(worlds[0])
    other.join()
    for world in worlds:
        world.mailbox.close()
    expected = [StopReason.NOTHING, StopReason.CTRL_C, StopReason.CTRL_C]
    assert agreed == {0: expected, 1: expected}


NOTES = f"""\
import json, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from rrfp_jax.runtime.run.signals import StopsAfterStep
from rrfp_jax.runtime.run.signals import EndsAtOnce, heard_signals
from rrfp_jax.runtime.run.world import World
world, mode = World(), sys.argv[1]
answer = StopsAfterStep(
    world, 0.5 if mode == "stuck" else 20.0, lambda why, again: print(why, again, flush=True)
)
at_start = EndsAtOnce(lambda: print("ends", flush=True), lambda: os._exit(130))
with heard_signals(signal.SIGINT, answer=at_start) as signals, signals.answered_by(answer, signal.SIGTERM):
    print("ready", flush=True)
    while not world.stop.requested: time.sleep(0.01)
    if mode != "steps": time.sleep(20.0)
    world.gather("step 0", None)
print(json.dumps([str(world.stop.agreed), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]))
"""


def test_what_a_launcher_sends_on_at_once_counts_once(tmp_path, monkeypatch):
    """systemd and SLURM may send SIGTERM to all processes of a run, its launcher among them."""
    world, said, failed = World(), [], []
    monkeypatch.setattr(StopsAfterStep, "_fail", lambda self, error: failed.append(type(error)))
    for folder, count in ((tmp_path, 0), (None, 1)):
        world.folder, world.stop = folder, type(world.stop)()
        answer = StopsAfterStep(world, 20.0, lambda why, again: said.append(again))
        for _ in range(2):
            answer.heed(signal.SIGTERM)
        assert failed == [KeyboardInterrupt] * count
        assert said == [False] + [False, True] * count
    world.folder = tmp_path
    monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
    answer.heed(signal.SIGTERM)
    assert failed == [KeyboardInterrupt] * 2


def test_a_second_signal_ends_a_process_whose_words_need_a_disk_that_does_not_answer(monkeypatch):
    world, answers, failed = World(), threading.Event(), []
    monkeypatch.setattr(StopsAfterStep, "_fail", lambda self, error: failed.append(type(error)))
    answer, began = (
        StopsAfterStep(world, 20.0, lambda why, again: answers.wait(HANG_SECONDS)),
        time.monotonic(),
    )
    answer.heed(signal.SIGINT)
    answer.heed(signal.SIGINT)
    assert failed == [KeyboardInterrupt] and time.monotonic() - began < HANG_SECONDS / 2
    EndsAtOnce(lambda: answers.wait(HANG_SECONDS), lambda: failed.append(SystemExit)).heed(signal.SIGINT)
    assert failed[1:] == [SystemExit] and time.monotonic() - began < HANG_SECONDS / 2
    answers.set()


@pytest.mark.parametrize(
    ("mode", "number", "name"),
    [
        ("steps", signal.SIGTERM, "SIGTERM"),
        ("steps", signal.SIGINT, "Ctrl-C"),
        ("stuck", signal.SIGTERM, "SIGTERM"),
        ("twice", signal.SIGINT, "Ctrl-C"),
    ],
)
def test_a_process_answers_signals_and_ends_if_it_cannot_stop(mode, number, name):
    with subprocess.Popen(
        [sys.executable, "-c", NOTES, mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        limit = threading.Timer(HANG_SECONDS, process.kill)
        limit.start()
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{name} False\n"
        if mode == "twice":
            process.send_signal(number)
            assert process.stdout.readline() == f"{name} True\n"
        began = time.monotonic()
        out, err = process.communicate()
        limit.cancel()
    assert time.monotonic() - began < HANG_SECONDS / 2
    if mode == "steps":
        assert (process.returncode, json.loads(out)) == (DONE, [name, True])
    elif mode == "stuck":
        told = f"rank 0: {name} came, and no step ended in the next 0.5 s\n"
        assert (process.returncode, err) == (FAILED, told)
    else:
        assert (process.returncode, err) == (INTERRUPTED, "")
