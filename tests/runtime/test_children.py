"""Forked children, such as a loader's workers: the parent's signals, locks and connections are not theirs."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 60.0

PROLOGUE = """
import os, signal, socket, sys, threading, time
from pathlib import Path
def child(then=lambda: time.sleep(1000)):
    if pid := os.fork():
        time.sleep(0.3)
        return pid
    then()
    os._exit(0)
def ended(pid, number):
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, os.WNOHANG if number == signal.SIGINT else 0)[1])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""
LISTENS = """
from rrfp_jax.runtime.run.signals import heard_signals
from rrfp_jax.runtime.run.signals import collected_signals
class Noted:
    heard = []
    def heed(self, number): self.heard.append(number)
    def left(self): return None
    def check(self): pass
def later(act):
    thread = threading.Thread(target=act)
    thread.start(); thread.join()
with heard_signals(signal.SIGINT, answer=Noted()) as signals, signals.answered_by(Noted(), signal.SIGTERM):
    INSIDE
    time.sleep(0.3)
print(Noted.heard, threading.active_count())
"""
LOCKS = """
from rrfp_jax.runs.name_held import _locked
with _locked(Path(sys.argv[1])):
    child()
    die()
"""
LENDS = """
from rrfp_jax.runs.lent_folder import lent_folder
with lent_folder(Path(sys.argv[1]).parent) as folder:
    folder.rename(sys.argv[1])
    child()
    die()
"""
STAGES = """
from rrfp_jax.launcher.folders import RunFolder
place = Path(sys.argv[1])
folder = RunFolder(place.parent, "trial")
folder.staging.rename(place)
child()
die()
"""
IN_A_RUN = """
from rrfp_jax.runtime.run.exits import Shutdown
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.world import World
Shutdown(World(0, 2, Mailbox(0, {1: socket.socket(fileno=int(sys.argv[1]))})))
def fails(): raise ValueError("in the child")
time.sleep(1.0)  # for a heartbeat
"""
CALLS = """
from rrfp_jax.errors import TrainingError
from rrfp_jax.user_code import called
try:
    with called("step 3: the data's load()", TrainingError):
        pid = os.fork()
        if pid == 0: THEN
except Exception:
    os.write(1, b"goes on")
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture
def parent(tmp_path):
    """Runs a program that forks; its status and what it printed. Nothing of it is left at the end."""
    started = []

    def run(text, *arguments, **more):
        with (tmp_path / "printed").open("w+") as printed:  # no pipe: children keep it
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", PROLOGUE + text, *map(str, arguments)],
                cwd=ROOT,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
                **more,
            )
            started.append(process)
            status = process.wait(SECONDS)
            printed.seek(0)
            return status, printed.read()

    yield run
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param("child()", id="it lives on"),
        pytest.param("later(child)", id="it is forked by another thread, and lives on"),
        pytest.param("assert ended(child(), signal.SIGTERM) == -15", id="it is terminated"),
        pytest.param("assert ended(child(), signal.SIGINT) == 0", id="Ctrl-C comes to it, too"),
        pytest.param(
            "with collected_signals([signal.SIGINT, signal.SIGTERM]) as inner:\n"
            "        assert ended(child(), signal.SIGTERM) == -15 and not inner.take()",
            id="its parent listens twice",
        ),
    ],
)
def test_a_parent_hears_no_signals_of_its_children_and_ends_without_them(parent, inside):
    assert parent(LISTENS.replace("INSIDE", inside)) == (0, "[] 1\n")


ENDS_LIKE_PYTHON = """
import rrfp_jax, os, sys, jax
from rrfp_jax.runtime.run.join import join
world = join()
if world.rank == 1:
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
world.gather("the child's end", world.rank)
print("devices", jax.device_count())
"""


def test_a_child_that_ends_like_python_leaves_its_parents_run_alone(parent, tmp_path):
    (tmp_path / "script.py").write_text(ENDS_LIKE_PYTHON)
    launched = [sys.executable, "-W", "ignore", "-m", "rrfp_jax", "launch", "-n", "2", "script.py"]
    text = f"import subprocess\nsys.exit(subprocess.call({launched}, cwd=sys.argv[1]))"
    status, said = parent(text, tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (status, said.count("devices 2\n")) == (0, 2), said


@pytest.mark.parametrize("holds", [LOCKS, LENDS, STAGES])
def test_locks_end_with_their_holder_whoever_it_has_forked(parent, tmp_path, holds):
    place = tmp_path / "place"
    assert parent(holds, place)[0] == -signal.SIGKILL
    descriptor = os.open(place, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if somebody has it
    os.close(descriptor)


@pytest.mark.parametrize("then", ["child(); die()", "child(sys.exit); die()", "child(fails); die()"])
def test_ranks_learn_of_a_death_though_a_child_lives_or_has_ended_in_any_way(parent, then):
    ours, theirs = socket.socketpair()
    ours.settimeout(SECONDS)
    status, _ = parent(IN_A_RUN + then, theirs.fileno(), pass_fds=[theirs.fileno()])
    theirs.close()
    with ours, ours.makefile("rb") as heard:
        said = heard.read()
    assert status == -signal.SIGKILL
    assert b"Beat" in said and b"Goodbye" not in said and b"Failed" not in said


@pytest.mark.parametrize(
    ("then", "status", "said"),
    [
        ("pass", 1, "step 3: the data's load() forked a child that has returned"),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('in it')", 1, "ValueError: in it"),
        ("sys.stdout = None", 1, "forked a child that has returned"),
        ("sys.stdout = None; raise ValueError('in it')", 1, "ValueError: in it"),
    ],
)
def test_a_child_does_not_go_on_as_the_run(parent, then, status, said):
    ended, printed = parent(CALLS.replace("THEN", then))
    assert ended == 0 and printed.splitlines()[-1] == str(status) and said in printed
    assert "goes on" not in printed
