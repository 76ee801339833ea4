"""The launcher looks at ranks that answer, plead or are silent; tiny ranks, no JAX program."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rrfp_jax.core.hints import BFW
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import FORWARD, Placement, Task
from rrfp_jax.launcher import snapshot, supervisor
from rrfp_jax.launcher.folders import RunFolder
from rrfp_jax.launcher.restarts import Elastic
from rrfp_jax.launcher.spawn import Launch
from rrfp_jax.launcher.supervisor import Patience
from rrfp_jax.runtime.run import recorder as flight_recorder
from rrfp_jax.runtime.run.recorder import MOST_MESSAGES, FlightRecorder, read
from rrfp_jax.runtime.run.stacks import dumped_threads
from rrfp_jax.runtime.run.status_report import DUMP_SIGNAL, dump_on_signal, read_report
from tests.launcher.conftest import until
from tests.launcher.test_spawn import ROOT
from tests.support.commands import why as main

PATIENT = Patience(grace=20.0, terminate=0.3, silence=3.0, interrupt=1.0)

RANK = """\
import os, sys, time
from pathlib import Path
from rrfp_jax.runtime.run.status_report import StatusResponder, dump_on_signal
from rrfp_jax.runtime.run.exits import ExitReport
from rrfp_jax.runtime.run.recorder import FlightRecorder, RunPhase
from rrfp_jax.runtime.run.waits import ForGather, ForOther
from rrfp_jax.runtime.run.world import World
rank, here = int(os.environ["RRFP_RANK"]), Path(os.environ["RRFP_FOLDER"])
recorder = FlightRecorder(here / f"flight-{rank}", rank, f"stage {rank}")
dump_on_signal(here / f"stacks-{rank}.txt", recorder)
world = World(rank, 2, folder=here, recorder=recorder)
responder = StatusResponder(world)
recorder.phase(RunPhase("step", 3))
def until_asked():
    while not (here / "why.txt").exists():
        time.sleep(0.02)
"""


def phase_in(folder, rank):
    found = flight_recorder.recorded(folder).get(rank)
    return found and str(found.phase)


@pytest.fixture
def launch(tmp_path, marker, capfd):
    """Run a script in two ranks; what the launcher printed to stderr, and the run's folder and status."""

    def launch(text):
        script = tmp_path / "train.py"
        script.write_text(RANK + text)
        folder = RunFolder(tmp_path / "runs", "trial")
        folder.begin()
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        status = Launch(
            [sys.executable, str(script), marker], Elastic({1: 2}), folder, PATIENT, env=env
        ).run()
        return capfd.readouterr().err, tmp_path / "runs" / "trial", status

    return launch


def test_sigusr1_has_all_ranks_looked_at_and_the_run_goes_on(launch, tmp_path):
    def ask():
        until(lambda: [phase_in(tmp_path / "runs" / "trial", rank) for rank in range(2)] == 2 * ["step 3"])
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=ask, daemon=True).start()
    err, folder, status = launch(
        "responder.alone()\nwith world.waits_for(ForOther(what='rain')): until_asked()"
    )
    first, *others = err.splitlines()
    assert status == 0 and first.startswith("rrfp launch: the run moves (step 3): ")
    assert (
        others[0].startswith("  rank 0 (stage 0), in step 3, for ") and "waits for rain, since" in others[0]
    )
    assert others[1].startswith("  rank 1 (stage 1), in step 3, ") and others[-1].endswith("trial/why.txt")
    kept = (folder / "why.txt").read_text()
    assert f"{tmp_path}/train.py:16 until_asked" in kept
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["flight-0", "flight-1", "rank-0.log", "rank-1.log", "why.txt"]


def test_a_rank_whose_wait_is_at_its_limit_pleads_before_it_ends(launch):
    err, folder, status = launch(
        "responder.alone()\n"
        "world.gathers = rank\n"
        "def user():\n"
        "    until_asked()\n"
        "if rank == 0: user()\n"
        "else:\n"
        "    from rrfp_jax.runtime.run.recorder import recorded\n"
        "    while 0 not in recorded(here): time.sleep(0.02)\n"
        "    with world.waits_for(ForGather(number=1, what='the names', ranks=(0,)), 1.0) as wait:\n"
        "        try:\n"
        "            while True: wait.check(); time.sleep(0.05)\n"
        "        except Exception as error:\n"
        "            assert (here / 'why.txt').exists()\n"
        "            ExitReport(rank=1, stages='stage 1', kind='failed', sentence=str(error)).write(here)\n"
        "            sys.exit(1)\n"
    )
    sentence = "rank 0 (stage 0) is in the user's until_asked ("
    assert status == 1 and err.startswith(f"rrfp launch: {sentence}")
    assert f"\nrrfp launch: it hung: {sentence}" in err and "; another rank waits for it\n" in err
    assert (folder / "why.txt").read_text().startswith(sentence)


def test_what_holds_the_interpreter_is_shown_by_a_signal(launch, monkeypatch):
    monkeypatch.setattr(supervisor, "LEAST_SILENCE_SECONDS", 1.5)
    err, _, status = launch(
        "import ctypes, threading\n"
        "if rank == 1:\n"
        "    recorder.beat()\n"
        "    pipe = os.pipe()\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        until_asked(); os.write(pipe[1], b'x'); os._exit(0)\n"
        "    ctypes.PyDLL(None).read(pipe[0], ctypes.create_string_buffer(1), 1)\n"  # holds the lock
        "else:\n"
        "    responder.alone(); until_asked()\n"
    )
    assert status == 0
    assert err.startswith("rrfp launch: rank 1 (stage 1) does not answer: something holds its interpreter, ")
    assert "it is in <module> (" in err.splitlines()[0] and "train.py:24)" in err.splitlines()[0]


@pytest.fixture
def living(tmp_path, marker):
    """A process with a flight recorder in the folder."""
    script = RANK.replace("until_asked", "never").replace('os.environ["RRFP_FOLDER"]', "sys.argv[1]")
    script = script.replace('os.environ["RRFP_RANK"]', "0") + "responder.alone()\ntime.sleep(100)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    (tmp_path / "train.py").write_text(script)
    process = subprocess.Popen([sys.executable, tmp_path / "train.py", tmp_path, marker], env=env)
    assert until(lambda: phase_in(tmp_path, 0) == "step 3")
    yield process
    process.kill()
    process.wait()


def test_asking_a_run(living, tmp_path, capsys, monkeypatch):
    time.sleep(2.1)  # so that it counts as still
    (tmp_path / "rank-1.log").touch()
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("rank 1 has not begun to join the others: no rrfp.Trainer is ")
    (tmp_path / "rank-1.log").unlink()
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("rank 0 (stage 0) is in the user's <module> (")
    os.kill(living.pid, signal.SIGSTOP)
    assert until(lambda: flight_recorder.is_stopped(living.pid))
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(
        "rank 0 (stage 0) stands still: it was stopped, as by SIGSTOP\n"
    )

    def another_users(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(snapshot, "shared_page", another_users)
    assert main([str(tmp_path)]) == 2
    assert "the run is another user's; ask as that user" in capsys.readouterr().err
    monkeypatch.setattr(flight_recorder.socket, "gethostname", lambda: "elsewhere")
    assert main([str(tmp_path)]) == 2
    assert f"the run is on {os.uname().nodename}; run this command there" in capsys.readouterr().err


def test_a_run_that_has_ended_tells_how(living, tmp_path, capsys):
    living.kill()
    living.wait()
    (tmp_path / "diagnosis.txt").write_text("rrfp launch: rank 0 was killed by SIGKILL\n  more\n")
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"rrfp why: {tmp_path}: no rank of this run lives any more; it ended so: rrfp launch: rank 0 was "
        f"killed by SIGKILL (see {tmp_path}/diagnosis.txt)\n"
    )


def test_a_users_handler_is_left_alone(tmp_path):
    recorder = FlightRecorder(tmp_path / "flight", 0, "")
    before = signal.signal(DUMP_SIGNAL, lambda *_: None)
    try:
        dump_on_signal(tmp_path / "stacks", recorder)
    finally:
        signal.signal(DUMP_SIGNAL, before)
    assert read(tmp_path / "flight").dump_signal == 0 and not (tmp_path / "stacks").exists()


def test_of_several_dumps_the_last_is_read():
    dump = (
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/usr/lib/threading.py", line 327 in wait\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "train.py", line {} in load\n'
        '  File "train.py", line 80 in <module>\n'
    )
    one, two = dumped_threads((dump.format(5) + dump.format(6)).splitlines())
    assert (one.is_main, two.is_main) == (False, True)
    assert [str(frame) for frame in two.frames] == ["load (train.py:6)", "<module> (train.py:80)"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 0}'])
def test_an_answer_that_is_none_is_passed_over(tmp_path, text):
    (tmp_path / "testimony-0.json").write_text(text)
    assert read_report(tmp_path, 0) is None


def test_more_messages_than_a_board_holds_are_not_recorded(tmp_path):
    recorder = FlightRecorder(tmp_path / "flight", 0, "stage 0")
    rules = StepRules(placement=Placement(2), microbatches=MOST_MESSAGES, schedule=BFW())
    recorder.begin_round(1, 1, rules, [0])
    recorder.sent(0, Task(FORWARD, 0, MOST_MESSAGES - 1), 1)
    recorder.got(0, Task(FORWARD, 0, 0).input, 1)
    found = read(tmp_path / "flight").round
    assert (found.own, found.sent_bits, found.got_bits, found.microbatches) == ((), b"", b"", MOST_MESSAGES)
