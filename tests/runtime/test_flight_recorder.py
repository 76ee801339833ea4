"""What processes leave behind (flight recorders, last words), and how long a wait is."""

import json
import os
import signal
import subprocess
import sys
import time
from ctypes import sizeof

import pytest
from msgspec import to_builtins

from rrfp_jax.core.tasks import BACKWARD, FORWARD, Task
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run import recorder as flight_recorder
from rrfp_jax.runtime.run import waits
from rrfp_jax.runtime.run.exits import ExitReport, read_all
from rrfp_jax.runtime.run.recorder import (
    COMPILING,
    ENDED,
    STARTING,
    FlightRecorder,
    RecordedDispatch,
    Recording,
    RunPhase,
    read,
)
from rrfp_jax.runtime.run.waits import ForOther, ForProgram, LimitedWait, Waits


def test_a_box_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "flight-2"
    recorder = FlightRecorder(path, 2, "")
    assert (read(path).phase, read(path).stages, read(path).last) == (STARTING, "", ())
    recorder.runs("stages 2-3", [2, 3, 70])
    recorder.phase(RunPhase("step", 12))
    before = time.time()
    for j in range(100):
        recorder.dispatched(12, 2, Task(BACKWARD, 1, j))
    recorder.beat()
    found = read(path)
    assert (found.rank, found.pid, found.stages, found.phase) == (
        2,
        os.getpid(),
        "stages 2-3",
        RunPhase("step", 12),
    )
    assert found.stage_bits == (0b1100, 1 << 6, 0, 0)
    assert [e.position for e in found.last] == list(range(37, 101))
    assert found.last[-1].task == Task(BACKWARD, 1, 99)
    assert before <= found.last[0].at <= found.beat <= time.time()


def test_a_box_outlives_its_process(tmp_path):
    script = (
        "import os, sys; from pathlib import Path\n"
        "from rrfp_jax.runtime.run.recorder import FlightRecorder, RunPhase\n"
        "from rrfp_jax.core.tasks import *\n"
        "recorder = FlightRecorder(Path(sys.argv[1]), 1, 'stage 1'); recorder.phase(RunPhase('step', 7))\n"
        "recorder.dispatched(7, 1, Task(FORWARD, 0, 5)); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "flight"], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (
        read(tmp_path / "flight")
        .sentence(time.time())
        .startswith("in step 7, last dispatched F5 on stage 1, ")
    )


def test_without_a_path_there_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = FlightRecorder(None, 0, "stage 0")
    recorder.phase(RunPhase("step", 1))
    recorder.dispatched(1, 0, Task(FORWARD, 0, 0))
    assert list(tmp_path.iterdir()) == []


def test_a_torn_record_is_passed_over(tmp_path):
    path = tmp_path / "flight"
    recorder = FlightRecorder(path, 0, "stage 0")
    recorder.phase(RunPhase("step", 1))
    recorder.phase(RunPhase("step", 2))
    for j in range(3):
        recorder.dispatched(2, 0, Task(FORWARD, 0, j))
    data = bytearray(path.read_bytes())
    data[flight_recorder.RING_AT + 3 * flight_recorder.ENTRY.size + 8] ^= (
        1  # not the numbers: the record is whole
    )
    data[flight_recorder.RING_AT + 2 * flight_recorder.ENTRY.size] ^= 64  # the number at the front alone
    data[flight_recorder.PHASES_AT + 3 % 2 * sizeof(flight_recorder.PhaseLayout)] += 2
    path.write_bytes(data)
    assert [e.task.microbatch for e in read(path).last] == [0, 2]
    assert read(path).phase == RunPhase("step", 1)


@pytest.mark.parametrize("data", [b"", b"x" * flight_recorder.SIZE, flight_recorder.MAGIC])
def test_a_file_that_is_no_flight_recorder_is_refused(tmp_path, data):
    (tmp_path / "flight").write_bytes(data)
    with pytest.raises(ValueError, match="not a flight recorder"):
        read(tmp_path / "flight")


def test_long_texts_are_cut_between_characters(tmp_path):
    FlightRecorder(tmp_path / "flight", 0, "ä" * 100)
    found = read(tmp_path / "flight")
    assert set(found.stages) == {"ä"}


def test_a_box_may_be_made_again_under_the_first(tmp_path):
    first = FlightRecorder(tmp_path / "flight", 0, "stage 0")
    FlightRecorder(tmp_path / "flight", 0, "stage 1")
    first.beat()
    assert read(tmp_path / "flight").stages == "stage 1"


ENTRY = RecordedDispatch(1, 12, 2, Task(BACKWARD, 0, 3), 99.2)


@pytest.mark.parametrize(
    ("phase", "beat", "last", "sentence"),
    [
        (RunPhase("step", 12), 100, (ENTRY,), "in step 12, last dispatched B3 on stage 2, 0.8 s before"),
        (
            RunPhase("validation", 3),
            100,
            (ENTRY,),
            "in validation 3, last dispatched B3 on stage 2 in step 12, 0.8 s before",
        ),
        (COMPILING, 100, (), "compiling, for 3.0 s"),
        (COMPILING, 97, (), "compiling, for 3.0 s, last sign of life 3.0 s before"),
        (ENDED, 100, (), "at its end, for 3.0 s"),
    ],
)
def test_what_a_box_says(phase, beat, last, sentence):
    recording = Recording(2, 1, "stage 2", phase, phase_since=97.0, beat=beat, last=last)
    assert recording.sentence(100.0) == sentence


def test_a_dispatch_is_noted_quickly():
    recorder, task = FlightRecorder(None, 0, ""), Task(FORWARD, 0, 0)
    best = 1.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            recorder.dispatched(0, 0, task)
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 5e-6  # seconds; 0.3 us on a quiet machine


WORDS = ExitReport(
    rank=1,
    stages="stage 1",
    kind="peer lost",
    sentence="rank 2 was lost: ü",
    waiting=(ForProgram(step=3, task=Task(BACKWARD, 0, 3), waited=2.1),),
    culprit=2,
)


@pytest.mark.parametrize("renamed", [False, True])
def test_last_words_are_read_as_they_were_written(tmp_path, renamed):
    folder = tmp_path / "starting"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    if renamed:
        folder = folder.rename(tmp_path / "run")
    WORDS.write(descriptor if renamed else folder)
    os.close(descriptor)
    assert read_all(folder) == {1: WORDS}
    assert [p.name for p in folder.iterdir()] == ["last-words-1.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        b"\xff",
        json.dumps({**to_builtins(WORDS), "kind": "bored"}),
        json.dumps({"rank": 3}),
    ],
)
def test_unreadable_last_words_are_passed_over(tmp_path, text):
    WORDS.write(tmp_path)
    (tmp_path / "last-words-3.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read_all(tmp_path) == {1: WORDS}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(waits, "perf_counter", clock)
    return clock


LOOKS = {
    "every second": [1.0] * 300,
    "stands still once": [1.0, 5000.0, *[1.0] * 299],
    "stands still twice": [1.0, 500.0, 1.0, 500.0, *[1.0] * 298],
    "less and less often": [*[1.0] * 200, 10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0, 19.5],
}


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_a_wait_comes_to_its_limit_by_what_was_waited(clock, looks):
    wait = LimitedWait(Waits(0, "rank {}".format), ForOther(what="the input of F3"), 300.0)
    *before, last = looks
    for seconds in before:
        clock.now += seconds
        wait.check()
    clock.now += last
    with pytest.raises(TrainingError, match=r"rank 0 gives up waiting for the input of F3, since 300\.0 s"):
        wait.check()
