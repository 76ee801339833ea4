"""A run's own files: what an earlier start has left of its metrics, and disks that take no more."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

import rrfp_jax as rrfp
from configs.quickstart import get_config
from rrfp_jax.runs import files as files_module
from rrfp_jax.runs.config import Checkpointing
from rrfp_jax.runs.files import RunFiles
from rrfp_jax.runs.run import train
from rrfp_jax.runtime.run.signals import ends_at_once, heard_signals
from rrfp_jax.runtime.run.world import World
from rrfp_jax.train.trainer import Trainer
from tests.support.watched import step_of, told

LINES = [f"{json.dumps({'step': step, 'loss': 1.5})}\n" for step in range(4)]


@pytest.fixture
def files(tmp_path):
    """A function that makes the files of a run that goes on after some steps."""
    config = replace(get_config(), name="run", directory=str(tmp_path))
    return lambda done=0, **writes: RunFiles(config, World(), writes, done)


def earlier(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(text)


def lines(tmp_path):
    return (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)


@pytest.mark.parametrize("text", ["".join(LINES), "".join(LINES[:2]), "".join(LINES[:2]) + LINES[2][:7]])
def test_the_lines_of_the_steps_before_are_kept(tmp_path, files, capsys, text):
    earlier(tmp_path, text)
    with files(2):
        assert lines(tmp_path) == LINES[:2]
    assert "metrics.jsonl" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        ("garbage\n", "line 2 is no step's: no JSON"),
        ("\n", "line 2 is no step's: no JSON"),
        ("[]\n", "line 2 is no step's: Expected `object`, got `array`"),
        ("{}\n", "line 2 is no step's: Object missing required field `step`"),
        ('{"step": "1"}\n', "line 2 is no step's: Expected `int`, got `str` - at `$.step`"),
        ('{"step": -1}\n', "line 2 is no step's: Expected `int` >= 0"),
        ('{"step": 1.5}\n', "line 2 is no step's: Expected `int`, got `float`"),
        ("[" * 100_000 + "\n", "line 2 is no step's: nested too deeply"),
        ('{"step": 1, "step": 2}\n', "line 2 is no step's: the key 'step' is there twice"),
    ],
)
def test_lines_that_are_no_steps_are_left_out_and_the_file_is_kept(tmp_path, files, capsys, garbage, said):
    earlier(tmp_path, LINES[0] + garbage + LINES[1])
    with files(2):
        assert lines(tmp_path) == LINES[:2]
    printed = capsys.readouterr().out
    assert said in printed and f"it is kept as {tmp_path}/run.1/metrics.jsonl" in printed
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == LINES[0] + garbage + LINES[1]


@pytest.mark.parametrize(
    ("name", "beside", "taken"),
    [
        ("lr0", {"lr0.1": "lr0"}, True),
        ("lr0", {"lr0.001": "lr0.001"}, False),
        ("lr0", {"lr0.1": "lr0.1"}, False),
        ("lr0", {"lr0.1": None}, True),
        ("lr[0]", {"lr[0].1": "lr[0]"}, True),
        ("lr[0]", {"lr0.1": "lr0"}, False),
        ("lr0", {"lr0.1": "lr0", "lr0.2": "lr0.2"}, True),
    ],
)
def test_lines_are_taken_of_runs_of_exactly_this_name(tmp_path, name, beside, taken):
    for folder, own in beside.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "metrics.jsonl").write_text("".join(LINES[:2]))
        if own is not None:
            (tmp_path / folder / "config.json").write_text(json.dumps({"name": own}))
    config = replace(get_config(), name=name, directory=str(tmp_path))
    with RunFiles(config, World(), {}, 2):
        assert bool((tmp_path / name / "metrics.jsonl").read_text()) == taken


@pytest.mark.parametrize("name", ["a", "a[b]"])
def test_what_a_launcher_prepares_is_of_exactly_this_name(tmp_path, name):
    for other in ("starting-7", "starting-7.1", "starting-x.starting-7", "starting-7.old"):
        (tmp_path / f".{name}.{other}").mkdir()
    from rrfp_jax.files import staged

    found = [path.name for path in staged(tmp_path / name)]
    assert found == [f".{name}.starting-7", f".{name}.starting-7.1"]


def test_a_pipe_is_not_waited_for(tmp_path, files, capsys):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    with files(2):
        assert lines(tmp_path) == []
    assert "cannot be read: it is no file, but a folder, a pipe or a device" in capsys.readouterr().out


@pytest.mark.parametrize(("done", "resumed"), [(0, []), (2, [2])])
def test_the_first_step_after_a_restart_is_marked(tmp_path, files, done, resumed):
    if done:
        earlier(tmp_path, "".join(LINES[:done]))
    with files(done) as made:
        for step in range(done, 4):
            made.add(told(step_of(2)), {"step": step})
    assert [own["step"] for line in lines(tmp_path) if "resumed" in (own := json.loads(line))] == resumed


def refuse(path):
    raise rrfp.UsageError(f"{path}: cannot be written: No space left on device")


def test_a_file_that_cannot_be_written_at_the_end(tmp_path, files):
    with files(**{"trace.json": refuse, "costs.json": Path.touch}) as made:
        pass
    assert made.trouble == f"{tmp_path}/run/trace.json: cannot be written: No space left on device"
    assert (tmp_path / "run" / "costs.json").exists(), "the others are written"


def test_what_broke_the_run_off_is_not_hidden_by_it(files, capsys):
    with pytest.raises(KeyboardInterrupt), files(**{"trace.json": refuse}):
        raise KeyboardInterrupt
    assert "trace.json: cannot be written: No space left" in capsys.readouterr().out


class Disk:
    """A disk that takes so many more bytes of lines."""

    def __init__(self, monkeypatch):
        self.room, self._write = 10**9, os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = data[: self.room]
        self.room -= len(taken)
        return self._write(file, taken)


def add(made, steps):
    for step in steps:
        made.add(told(step_of(2)), json.loads(LINES[step]))


@pytest.mark.parametrize("room", [0, 10])
def test_lines_that_a_full_disk_does_not_take_are_written_later(tmp_path, files, capsys, monkeypatch, room):
    disk = Disk(monkeypatch)
    with files() as made:
        add(made, [0])
        disk.room = room
        add(made, [1, 2])
        assert lines(tmp_path) == LINES[:1], "whole lines only"
        disk.room = 10**9
        add(made, [3])
        assert lines(tmp_path) == LINES
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl: cannot be written: No space left on device; training continues") == 1
    assert said.count("metrics.jsonl: can be written again") == 1 and not made.trouble


def test_lines_that_never_could_be_written_are_counted(tmp_path, files, monkeypatch):
    monkeypatch.setattr(files_module, "MOST_WAITING", 2 * len(LINES[0]))
    disk = Disk(monkeypatch)
    with files() as made:
        disk.room = 0
        add(made, [0, 1, 2, 3])
        disk.room = len(LINES[0])
    assert lines(tmp_path) == LINES[2:3], "the oldest are given up"
    assert made.trouble == f"{tmp_path}/run/metrics.jsonl lacks the lines of 3 steps"


def test_a_folder_that_somebody_removes(tmp_path, files, capsys):
    with files() as made:
        add(made, [0])
        shutil.rmtree(tmp_path / "run")
        add(made, [1, 2])
    assert lines(tmp_path) == LINES[1:3] and made.trouble.endswith("metrics.jsonl lacks the lines of 1 steps")
    assert capsys.readouterr().out.count("metrics.jsonl: cannot be written: somebody has removed it") == 1


LIMITED = """
import json, resource, sys
from pathlib import Path
from unittest.mock import Mock
from rrfp_jax.runs.files import KeptLines
kept, line = KeptLines(Path(sys.argv[1]), []), "x" * 1500 + "\\n"
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))
for _ in range(4):
    try: kept.add(line)
    except OSError as error: print(error.strerror)
print(Path(sys.argv[1]).read_text() == 2 * line, kept.missing)
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
kept.flush()
print(Path(sys.argv[1]).read_text() == 4 * line, kept.missing)
"""


@pytest.mark.slow(reason="2 s: a process")
def test_the_kernels_own_refusal(tmp_path):
    command = [sys.executable, "-c", LIMITED, tmp_path / "metrics.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [*2 * ["File too large"], "True 2", "True 0"], done.stderr


def test_a_disk_that_is_full_when_a_step_is_kept_for_those_who_look(tmp_path, files, capsys, monkeypatch):
    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with files() as made:
        monkeypatch.setattr(Path, "write_bytes", write)
        add(made, [0])
    assert lines(tmp_path) == LINES[:1] and not made.trouble
    assert "latest-step: cannot be written: No space left on device; training" in capsys.readouterr().out


def test_a_file_system_that_fails_when_lines_are_closed(tmp_path, files, monkeypatch):
    def close(self):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), files() as made:
        patched.setattr(files_module.KeptLines, "close", close)
        raise KeyboardInterrupt
    assert made.trouble == f"{tmp_path}/run/metrics.jsonl may lack lines: Input/output error"
    with files():
        pass  # no lock is left


def test_a_run_that_cannot_begin_leaves_no_lock(files, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(rrfp.UsageError, match="Input/output"):
        patched.setattr(files_module, "KeptLines", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        with files():
            pytest.fail("it has no lines")
    with files():
        pass


def test_a_live_runs_folder_is_not_taken_away(tmp_path, files):
    with files(), pytest.raises(rrfp.UsageError, match="another live run is there"), files():
        pytest.fail("both live")


@pytest.mark.parametrize("file", ["runs", "runs/run.checkpoints"])
def test_a_file_in_the_place_of_a_folder_is_refused_before_anything_is_compiled(tmp_path, monkeypatch, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("a few words")
    monkeypatch.setattr(Trainer, "start", lambda *args, **kwargs: pytest.fail("it was not refused"))
    config = replace(
        get_config(),
        name="run",
        directory=str(tmp_path / "runs"),
        checkpoint=Checkpointing(every_steps=1, resume=False),
    )
    with (
        heard_signals(answer=ends_at_once("test")) as signals,
        pytest.raises(rrfp.UsageError, match=f"{file} is no folder; set --config.directory"),
    ):
        train(config, signals)
    assert (tmp_path / file).read_text() == "a few words"


def test_a_folder_in_the_place_of_a_file_is_moved_away_with_its_run(tmp_path, files):
    (tmp_path / "run" / "metrics.jsonl" / "own").mkdir(parents=True)
    (tmp_path / "run" / "config.json").mkdir()
    with files():
        assert lines(tmp_path) == []
    assert (tmp_path / "run.1" / "metrics.jsonl" / "own").is_dir()
