"""Restarts: the launcher with tiny ranks, and the lines that a run has written before."""

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rrfp_jax as rrfp
from rrfp_jax.errors import DONE, FAILED, INTERRUPTED, REFUSED
from rrfp_jax.launcher.folders import RunFolder
from rrfp_jax.launcher.restarts import BACK_OFF_SECONDS, NO_STEP, Assignment, Elastic, after_attempt, assigned
from rrfp_jax.launcher.spawn import Launch
from rrfp_jax.launcher.supervisor import Patience
from rrfp_jax.runs.config import load_config
from rrfp_jax.runs.files import RunFiles
from rrfp_jax.runs.saving import ranks_of_replicas
from rrfp_jax.runtime.run.recorder import FlightRecorder, RunPhase, read
from rrfp_jax.runtime.run.world import World

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 20.0
BRISK = Patience(grace=HANG_SECONDS, terminate=0.3, interrupt=1.0, save=HANG_SECONDS, back_off=(0.0,) * 3)

PROLOGUE = """\
import os, shutil, signal, sys, time
from pathlib import Path
rank, here = int(os.environ["RRFP_RANK"]), Path(os.environ["RRFP_FOLDER"])
restarts, given = int(os.environ["RRFP_RESTARTS"]), Path(sys.argv[0]).parent
def be_in_step(number): shutil.copy(given / f"step-{number}", here / f"flight-{rank}")
"""
"""What ranks need; they import nothing of ours, so as to be quick."""


class Launched:
    def __init__(self, status, out, err, folder, seconds):
        self.status, self.out, self.err, self.folder, self.seconds = status, out, err, folder, seconds


@pytest.fixture
def launch(tmp_path, capfd):
    """Run a script in two ranks; how that went. No process may be left."""

    def launch(text, max_restarts=3, patience=BRISK):
        script = tmp_path / "train.py"
        script.write_text(PROLOGUE + text)
        for step in range(3):
            FlightRecorder(tmp_path / f"step-{step}", 0, "stage 0").phase(RunPhase("step", step))
        folder, began = RunFolder(tmp_path / "runs", "trial"), time.monotonic()
        argv = [sys.executable, str(script)]
        status = Launch(argv, Elastic({1: 2}), folder, patience, max_restarts=max_restarts).run()
        seconds, printed = time.monotonic() - began, capfd.readouterr()
        return Launched(status, printed.out, printed.err, tmp_path / "runs" / "trial", seconds)

    limit = threading.Timer(2 * HANG_SECONDS, kill_all, [tmp_path])
    limit.start()
    yield launch
    limit.cancel()
    assert kill_all(tmp_path) == 0


def kill_all(folder):
    """Kill the processes that have a folder in their command lines; how many."""
    arguments = {p: " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])}
    own = [process for process, text in arguments.items() if str(folder) in text]
    for process in own:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(own)


def test_a_killed_run_goes_on_in_new_processes_with_new_files(launch):
    done = launch(
        "be_in_step(restarts)\n"
        "print('attempt', restarts, os.getpid(), os.environ['RRFP_COORDINATOR'], flush=True)\n"
        "if rank == 1 and restarts < 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if restarts < 2: sys.exit(1)"
    )
    assert done.status == DONE and not (done.folder / "diagnosis.txt").exists()
    for number, line in enumerate(done.err.splitlines(), start=1):
        assert line.startswith("rrfp launch: rank 1 (stage 0) was killed by SIGKILL"), line
        assert f"; restart {number} of 3 in 0 s; see " in line and line.endswith(f"/attempt-{number}/")
    logs = [done.folder / name / "rank-0.log" for name in ("attempt-1", "attempt-2", ".")]
    said = [log.read_text().split() for log in logs]
    assert [words[1] for words in said] == ["0", "1", "2"]
    assert len({words[2] for words in said}) == len({words[3] for words in said}) == 3
    kept = sorted(path.name for path in (done.folder / "attempt-1").iterdir())
    assert kept == ["diagnosis.txt", "flight-0", "flight-1", "rank-0.log", "rank-1.log"]
    assert (done.folder / "attempt-1" / "diagnosis.txt").read_text().count("\n") > 1
    assert [read(done.folder / f"attempt-{n}" / "flight-1").training_step for n in (1, 2)] == [0, 1]


def test_a_run_that_gains_nothing_is_given_up(launch):
    done = launch("be_in_step(2); sys.exit(3 if rank == 1 else 1)", max_restarts=50)
    assert done.status == FAILED
    last = "not restarted again: 3 restarts brought it no further than step 2\n"
    assert last in done.err and done.err.count("; restart ") == 3
    assert (done.folder / "diagnosis.txt").read_text().endswith(last)


def test_what_was_refused_is_not_started_again(launch):
    done = launch("print('no such file: x'); sys.exit(2)")
    assert (done.status, done.err) == (REFUSED, "rrfp launch: all ranks: no such file: x\n")


def when(happened, *numbers):
    """Send this process signals once something has happened, a moment apart."""

    def wait():
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline and not happened():
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    threading.Thread(target=wait, daemon=True).start()


def both_say(text, folder):
    """Whether both ranks' logs have this line, whole: what is printed comes before its newline does."""
    return lambda: sum(f"{text}\n" in path.read_text() for path in folder.rglob("rank-*.log")) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_wait_before_a_restart_can_be_broken_off(launch, tmp_path, number):
    when((tmp_path / "runs" / "trial" / "attempt-1" / "rank-1.log").exists, number)
    done = launch("sys.exit(1)", patience=Patience(back_off=(HANG_SECONDS, 0, 0)))
    assert done.status == INTERRUPTED and done.seconds < HANG_SECONDS
    assert "; restart 1 of 3 in 20 s" in done.err and done.err.endswith("\nrrfp launch: interrupted\n")


SAVES = """\
def save(number, frame):
    print('saves', flush=True); time.sleep(%s); print('saved', flush=True); os._exit(0)
signal.signal(signal.SIGTERM, save)
print('ready', flush=True)
time.sleep(60)
"""


@pytest.fixture
def sighup_is_heard():
    """Also where these tests run under `nohup`: the launcher leaves an ignored SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("sighup_is_heard")
@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ([signal.SIGTERM], "SIGTERM"),
        ([signal.SIGHUP, signal.SIGHUP], "SIGTERM, for SIGHUP,"),
        ([signal.SIGTERM, signal.SIGHUP], "SIGTERM"),
    ],
)
def test_sigterm_lets_ranks_save_and_is_a_good_end(launch, tmp_path, numbers, name):
    """And so does a terminal that closes, also after another signal."""
    when(both_say("ready", tmp_path), *numbers)
    done = launch(SAVES % 1.5)  # longer than after other signals
    assert done.status == DONE and done.err.startswith(f"rrfp launch: {name} is passed on to the ranks")
    assert done.err.count("\n") == 1
    assert (done.folder / "rank-0.log").read_text() == "ready\nsaves\nsaved\n"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_whoever_is_impatient_need_not_wait_for_that(launch, tmp_path, second):
    when(both_say("ready", tmp_path), signal.SIGTERM, second)
    done = launch("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SAVES % 60)
    assert done.status == INTERRUPTED and done.seconds < HANG_SECONDS
    name = "Ctrl-C" if second == signal.SIGINT else "SIGTERM"
    assert f"\nrrfp launch: {name} again: the ranks are killed\nrrfp launch: interrupted\n" in done.err
    assert "restart" not in done.err


@pytest.mark.parametrize(("well", "status"), [(True, INTERRUPTED), (False, FAILED)])
def test_a_run_that_was_told_to_end_is_not_started_again(launch, tmp_path, well, status):
    when(both_say("ready", tmp_path), signal.SIGTERM)
    done = launch(
        "pid = here / 'pid'\n"
        "if rank == 1: pid.write_text(f'{os.getpid()} ')\n"
        f"while rank == 0 and not {well}:\n"  # until the launcher knows of the other's end
        "    known = pid.exists() and pid.read_text().endswith(' ')\n"
        "    if known and not Path('/proc', pid.read_text().strip()).exists(): break\n"
        "    time.sleep(0.01)\n"
        "print('ready', flush=True)\n"
        f"if rank == 0 or {well}: time.sleep(60)\n"
        "sys.exit(3)"
    )
    assert done.status == status and "restart" not in done.err and not list(done.folder.glob("attempt-*"))


def test_lines_survive_a_rank_0_that_is_killed_while_it_starts(tmp_path):
    """Each start is killed before its first step; the second also after the launcher has moved the folder."""
    (tmp_path / "trial").mkdir()
    lines = [f'{{"step": {step}}}\n' for step in range(8)]
    (tmp_path / "trial" / "metrics.jsonl").write_text("".join(lines) + '{"step": 8, "lo')
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config = dataclasses.replace(config, name="trial", directory=str(tmp_path))

    killed = []  # what is open stays so, with whatever was not written yet

    def start(folder=None):
        killed.append(RunFiles(config, World(folder=folder), {}, 5).__enter__())

    start()
    moved = RunFolder(tmp_path, "trial")
    moved.begin()
    start(moved.path)
    assert (tmp_path / "trial" / "metrics.jsonl").read_text() == "".join(lines[:5])


@pytest.mark.parametrize("status", [DONE, REFUSED, INTERRUPTED])
def test_only_what_failed_is_started_again(status):
    assert after_attempt(status, [7], 5)[0] is None
    assert after_attempt(FAILED, [7], 5)[0] is not None


@pytest.mark.parametrize(
    ("reached", "waits"),
    [
        ([12], BACK_OFF_SECONDS[0]),
        ([12, 13], BACK_OFF_SECONDS[0]),
        ([12, 12], BACK_OFF_SECONDS[1]),
        ([12, 11], BACK_OFF_SECONDS[1]),
        ([12, 11, 12], BACK_OFF_SECONDS[2]),
        ([12, 11, 12, 13], BACK_OFF_SECONDS[0]),
        ([NO_STEP, NO_STEP, 0], BACK_OFF_SECONDS[0]),
    ],
)
def test_it_follows_later_the_longer_nothing_was_gained(reached, waits):
    assert after_attempt(FAILED, reached, 50)[0] == waits


@pytest.mark.parametrize(
    ("reached", "most", "reason"),
    [
        ([12], 0, ""),
        ([1, 2, 3, 4], 3, "--max-restarts=3"),
        ([12, 12, 11, 12], 50, "3 restarts brought it no further than step 12"),
        ([NO_STEP] * 4, 50, "3 restarts brought it no further than the first step"),
    ],
)
def test_it_ends_when_that_is_pointless_or_too_often(reached, most, reason):
    wait, why = after_attempt(FAILED, reached, most)
    assert wait is None and reason in why
    assert bool(reason) == bool(why)


def test_a_flight_recorder_tells_the_training_step_also_in_the_validation_after_it(tmp_path):
    recorder = FlightRecorder(tmp_path / "flight-0", 0, "")
    assert read(tmp_path / "flight-0").training_step is None
    for phase in (RunPhase("step", 12), RunPhase("validation", 3), RunPhase("validation", 4)):
        recorder.phase(phase)
        assert read(tmp_path / "flight-0").training_step == 12


TWO_BY_TWO = {1: 2, 2: 4}


def test_two_replicas_of_two_stages():
    assert assigned(TWO_BY_TWO, {}) == Assignment(replicas=2, slots=(0, 1, 2, 3))
    assert assigned(TWO_BY_TWO, {1}) == Assignment(replicas=1, slots=(0, 2))  # whatever stages these had
    assert assigned(TWO_BY_TWO, {1, 2}) == Assignment(replicas=1, slots=(0, 3))
    assert assigned(TWO_BY_TWO, {0, 1, 2}) is None


def test_the_replicas_that_a_mesh_can_do_without():
    mesh = rrfp.Mesh(pp=2, dp=4)
    assert ranks_of_replicas(mesh, 8) == {1: 2, 2: 4, 4: 8}  # three could not share four microbatches
    assert ranks_of_replicas(mesh, 2) == {2: 1, 4: 2}  # a process has four devices
    assert ranks_of_replicas(rrfp.Mesh(pp=2, dp=2), 2) == {1: 1, 2: 2}  # the one that is left takes both
    assert ranks_of_replicas(rrfp.Mesh(pp=2, tp=(2, 1), dp=2), 6) == {1: 3, 2: 6}
    assert ranks_of_replicas(rrfp.Mesh(pp=4), 4) == {1: 4}


@st.composite
def histories(draw):
    """What replicas of some mesh need, and losses that befall them: fractions that choose a rank."""
    stages, dp = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    needs = {n: n * stages for n in range(1, dp + 1) if dp % n == 0}
    return needs, draw(st.lists(st.lists(st.floats(0, 1, exclude_max=True), max_size=3)))


@given(histories())
def test_whatever_is_lost_the_rest_is_used_as_well_as_it_can_be(history):
    needs, losses = history
    gone, whole = set(), max(needs.values())
    for fractions in losses:
        found = assigned(needs, gone)
        if found is None:
            assert whole - len(gone) < min(needs.values())
            return
        assert len(found.slots) == len(set(found.slots)) == needs[found.replicas]
        assert gone.isdisjoint(found.slots) and set(found.slots) <= set(range(whole))
        more = [n for n in needs if n > found.replicas]
        assert all(needs[n] > whole - len(gone) for n in more)
        gone |= {found.slots[int(fraction * len(found.slots))] for fraction in fractions}
    assert assigned(needs, set()).replicas == max(needs)
