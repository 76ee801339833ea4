"""Looks at folders that runs are writing, or have left."""

import errno
import json
import os

import pytest

from rrfp_jax import name_lock
from rrfp_jax.report.look import LATEST_BYTES, Looker, State
from rrfp_jax.report.store import LATEST, StepFile, read_lines
from rrfp_jax.report.watch import BLOCKS, Window, frame
from rrfp_jax.runs.name_held import _locked
from rrfp_jax.runtime.run.recorder import COMPILING, ENDED, STARTING, FlightRecorder, RunPhase
from tests.support.watched import step_of, told

LINE = {"step": 0, "step_seconds": 0.5, "wall_seconds": 0.6, "loss": 2.0, "of_somebody_else": [1]}


@pytest.fixture
def folder(tmp_path):
    """Of a run that has ended after two steps."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"steps": 5, "name": "mine"}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(LINE | {"step": n}) + "\n" for n in range(2)))
    StepFile(folder).add(told(step_of(2)))
    return folder


@pytest.fixture
def held(folder):
    """Its name, held by another run that lives."""
    with _locked(name_lock.lock_of(folder)):
        yield


def refuse(descriptor, operation):
    raise OSError(errno.ENOLCK, "No locks available")


def set_age(path, seconds):
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def test_a_run_that_has_ended(folder):
    found = Looker(folder).look()
    assert (found.state, found.steps, found.last.step, found.failed) == (State.ENDED, 5, 1, False)
    assert found.latest.trace.stages == 2
    (folder / "diagnosis.txt").touch()
    assert Looker(folder).look().failed


def test_a_run_that_died_before_it_had_written_anything(tmp_path):
    (tmp_path / "diagnosis.txt").touch()
    FlightRecorder(tmp_path / "flight-0", 0, "stage 0").phase(COMPILING)
    found = Looker(tmp_path).look()
    assert (found.state, found.failed, found.last) == (State.ENDED, True, None)
    shown = "\n".join(str(line) for line in frame(found, Window(80, 24, BLOCKS)))
    assert "ended" in shown and "it failed: " in shown and "compiling" not in shown


def test_no_run(tmp_path):
    assert Looker(tmp_path / "none").look().state is State.ABSENT
    assert Looker(tmp_path).look().state is State.ABSENT, "a folder of something else"


def test_a_run_that_lives(folder, held):
    (folder / "config.json").touch()
    set_age(folder.parent / ".mine.lock", 10)
    assert Looker(folder).look().state is State.RUNNING


def test_a_run_that_starts_beside_what_an_earlier_one_has_left(folder, held):
    for path in folder.iterdir():
        set_age(path, 10)
    staged = folder.parent / ".mine.starting-77"
    staged.mkdir()
    FlightRecorder(staged / "flight-0", 0, "stage 0").phase(COMPILING)
    (staged / "flight-1").write_bytes(b"half")
    found = Looker(folder).look()
    assert (found.state, found.lines, found.latest) == (State.STARTING, (), None)
    assert [str(one.phase) for one in found.recorders] == ["compiling"]


def test_signs_of_life_tell_where_there_are_no_locks(folder, monkeypatch):
    """There the file of the lock is left behind, and says nothing."""
    recorder = FlightRecorder(folder / "flight-0", 0, "stage 0")
    assert Looker(folder).look().state is State.ENDED, "there is no lock"
    (folder.parent / ".mine.lock").touch()
    set_age(folder.parent / ".mine.lock", 10)
    assert Looker(folder).look().state is State.ENDED, "nobody has it"
    monkeypatch.setattr(name_lock.fcntl, "flock", refuse)
    assert Looker(folder).look().state is State.RUNNING
    recorder.phase(ENDED)
    assert Looker(folder).look().state is State.ENDED


def test_processes_that_a_launcher_has_just_started(tmp_path):
    staged = tmp_path / ".mine.starting-77"
    staged.mkdir()
    FlightRecorder(staged / "flight-0", 0, "")
    found = Looker(tmp_path / "mine").look()
    assert found.state is State.STARTING and found.recorders[0].phase == STARTING


def test_what_a_killed_launcher_has_left_says_nothing_of_a_run_that_lives(folder, held):
    (folder / "config.json").touch()
    left = folder.parent / ".mine.starting-77"
    left.mkdir()
    FlightRecorder(left / "flight-0", 0, "").phase(STARTING)
    FlightRecorder(folder / "flight-0", 0, "stage 0").phase(RunPhase("step", 1))
    assert [str(one.phase) for one in Looker(folder).look().recorders] == ["step 1"]
    FlightRecorder(left / "flight-0", 0, "").phase(COMPILING)
    assert [str(one.phase) for one in Looker(folder).look().recorders] == ["compiling"]


def test_a_step_of_an_earlier_start_is_not_shown(folder):
    looker = Looker(folder)
    assert looker.look().latest is not None
    set_age(folder / LATEST, 10)
    set_age(folder / "config.json", 5)
    found = looker.look()
    assert found.latest is None and found.busy == []
    (folder / LATEST).write_text("half a step")
    assert looker.look().latest is None


def test_what_is_half_written_is_passed_over(folder):
    looker = Looker(folder)
    before = looker.look()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "step_sec')
    (folder / LATEST).write_bytes((folder / LATEST).read_bytes()[:-9])
    (folder / "config.json").write_text('{"steps": 5')
    set_age(folder / "config.json", 5)
    found = looker.look()
    assert [line.step for line in found.lines] == [0, 1]
    assert found.latest is before.latest is not None and found.steps is None
    StepFile(folder).add(told(step_of(3)))
    found = looker.look()
    assert found.latest.trace.stages == 3, "once it is whole"
    assert [len(step[0]) for step in found.busy] == [2, 3]


@pytest.mark.parametrize(
    "spoilt", ["garbage", "[]", '{"step": -1}', '{"step": 3, "step_seconds": NaN}', "[" * 9999]
)
def test_lines_of_something_else_are_passed_over(tmp_path, spoilt):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{spoilt}\n{json.dumps(LINE | {'step': 9})}\n")
    assert [line.step for line, _ in read_lines(path, LATEST_BYTES)[0]] == [0, 9]


def test_only_the_end_of_a_long_file_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(LINE | {"step": n}) + "\n" for n in range(20_000)))
    steps = [line.step for line, _ in read_lines(path, LATEST_BYTES)[0]]
    assert 1000 < len(steps) < 4000 and steps == list(range(20_000 - len(steps), 20_000))


def test_no_metrics(tmp_path):
    assert read_lines(tmp_path / "metrics.jsonl", LATEST_BYTES)[0] == []
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert read_lines(tmp_path / "metrics.jsonl", LATEST_BYTES)[0] == []
