"""The `rrfp train` command: what it prints and writes, what it refuses, and how it ends."""

import dataclasses
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

import jax
import numpy as np
import pytest

from rrfp_jax.commands.field_help import listed
from rrfp_jax.commands.overrides import override
from rrfp_jax.errors import UsageError
from rrfp_jax.runs.config import fields_of, load_config
from rrfp_jax.runs.display import Display
from rrfp_jax.runtime.programs.segments import OnDevices
from rrfp_jax.train.report import Report
from tests.support.commands import train as main
from tests.support.kept import with_cache
from tests.support.quickstart import CONFIG, arguments, with_texts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the text is, and where the runs go."""
    return with_texts(tmp_path_factory.mktemp("cli"))


@pytest.fixture(autouse=True)
def search_path_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="module")
def finished(folder):
    """A run that has ended well: its folder, and what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setattr(sys, "path", [*sys.path])
        assert main(arguments(folder)) == 0
        return folder / "runs" / "quickstart", sys.stdout.getvalue()


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class TestARunThatEndsWell:
    def test_the_start_tells_versions_devices_and_stages(self, finished):
        _, printed = finished
        assert f"jax {jax.__version__}" in printed and "cpu:0, cpu:1" in printed
        for row in (
            ["stage", "layers", "device", "parameters", "weights"],
            ["0", "0-1", "cpu:0", "2,512"],
            ["1", "2-2", "cpu:1", "2,056"],
        ):
            assert any(line.split()[: len(row)] == row for line in printed.splitlines())

    def test_a_plain_line_per_step_where_there_is_no_terminal(self, finished):
        _, printed = finished
        lines = [line for line in printed.splitlines() if line.startswith("step ")]
        assert [line.split()[1] for line in lines] == ["0", "1", "2"]
        assert all(word in lines[0] for word in ("loss", "tokens/s", "ms", "idle"))
        assert "validation" in lines[2] and "\r" not in printed and "\x1b" not in printed

    def test_the_end_tells_validation_loss_bigram_loss_and_files(self, finished):
        run, printed = finished
        end = printed.splitlines()[-6:]
        assert f"validation loss {metrics(run)[-1]['validation_loss']:.4f}" in end[0]
        assert "bigram" in end[1] and str(run) in end[2] and end[3] == "next:"
        commands = [line.split("  ")[1] for line in end[4:]]
        assert commands == [f"rrfp report {run}", f"rrfp top {run}"]

    def test_metrics(self, finished):
        run, _ = finished
        lines = metrics(run)
        assert [line["step"] for line in lines] == [0, 1, 2]
        for line in lines:
            assert {"loss", "tokens_per_second", "step_seconds"} <= line.keys()
            assert len(line["bubble"]) == 2 and all(0 <= share < 1 for share in line["bubble"])
        assert ["validation_loss" in line for line in lines] == [False, False, True]

    def test_config(self, finished):
        run, _ = finished
        config = json.loads((run / "config.json").read_text())
        memory = json.loads((run / "memory.json").read_text())
        assert all(stage["weight_bytes"] > 0 and stage["buckets"] for stage in memory)
        assert (config["steps"], config["mesh"]["pp"], config["model"]["d_model"]) == (3, 2, 8)
        assert config["model"]["dtype"] == "float32"

    def test_trace(self, finished):
        run, _ = finished
        events = json.loads((run / "trace.json").read_text())["traceEvents"]
        complete = [event for event in events if event["ph"] == "X"]
        assert {event["ph"] for event in events} == {"X", "M", "s", "f"}
        for event in complete:
            assert event["ts"] >= 0 and event["dur"] >= 0 and {"pid", "tid", "name"} <= event.keys()
        tasks = [event["args"] for event in complete if event["name"] != "idle"]
        assert all(task.keys() >= {"chunk", "bucket", "ready", "dispatched"} for task in tasks)
        names = sorted((task["step"], task["stage"], task["kind"], task["microbatch"]) for task in tasks)
        assert names == list(itertools.product(range(3), range(2), "BF", range(2)))
        gaps = [event for event in complete if event["name"] == "idle"]
        assert gaps and all(gap["args"]["awaited"][0] in "FB" for gap in gaps)


@pytest.mark.slow(reason="2 s: a run; launcher/test_spawn.py moves one away")
def test_an_earlier_run_is_kept(folder, finished, capsys):
    run, _ = finished
    before = (run / "metrics.jsonl").read_text()
    assert main(arguments(folder, validate_every=2)) == 0
    assert "kept as" in capsys.readouterr().out
    assert (run.with_name("quickstart.1") / "metrics.jsonl").read_text() == before
    assert ["validation_loss" in line for line in metrics(run)] == [False, True, True]


def test_a_run_that_breaks_off_says_where_and_keeps_its_files(folder, capsys):
    assert main(arguments(folder, name="broken", steps=9, learning_rate=1e30)) == 1
    out, err = capsys.readouterr()
    run = folder / "runs" / "broken"
    broken = len(metrics(run))
    assert 0 < broken < 9 and f"after {broken} steps" in out
    assert err.startswith(f"rrfp train: step {broken}: ") and "not finite" in err and err.count("\n") == 1
    assert json.loads((run / "trace.json").read_text())["traceEvents"]


@pytest.fixture
def interrupted(folder):
    """Run the command until it prints a line that begins so, then press Ctrl-C; what it then says."""

    def run(name, beginning, **overrides):
        environment = with_cache({**os.environ, "JAX_PLATFORMS": "cpu"})
        given = arguments(folder, name=name, steps=10**6, **overrides)
        command = [sys.executable, "-m", "rrfp_jax", "train", *given]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=environment, **streams) as process:
            limit = threading.Timer(120, process.kill)
            limit.start()
            for line in process.stdout:
                if line.startswith(beginning):
                    process.send_signal(signal.SIGINT)
                    break
            out, err = process.communicate()
            limit.cancel()
        assert (process.returncode, err) == (130, "")
        return out, shlex.join(command)

    return run


@pytest.mark.slow(reason="6 s: a process; test_control_c_says_how_to_go_on has one")
def test_control_c_ends_after_a_step(folder, interrupted):
    out, _ = interrupted("stopped", "step     3")
    assert "Ctrl-C: stops after this step and saves nothing" in out
    step = int(re.search(r"^Ctrl-C: stopped after step (\d+); nothing is saved$", out, re.MULTILINE)[1])
    run = folder / "runs" / "stopped"
    assert len(metrics(run)) == step + 1
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
    assert json.loads((run / "config.json").read_text())["steps"] == 10**6


@pytest.mark.costly(reason="a process that is interrupted")
def test_control_c_says_how_to_go_on(folder, interrupted):
    settings = {"checkpoint.every_steps": 10**5, "checkpoint.resume": False}
    out, command = interrupted("goes-on", "step     1", **settings)
    said = re.search(r"^Ctrl-C: stopped after step (\d+); resumes from .*/(\d+)\nto resume: (.*)$", out, re.M)
    assert int(said[2]) == int(said[1]) + 1 and out.splitlines()[-1] == f"to resume: {said[3]}"
    goes_on = command.replace(" --config.checkpoint.resume=False", "")
    assert said[3] == f"{goes_on} --config.checkpoint.resume=True"


@pytest.mark.slow(reason="5 s: a run and a process; the test above has one that is interrupted")
def test_control_c_while_starting_says_what_is_kept(folder, interrupted):
    settings = {"checkpoint.every_steps": 10**5}
    assert main(arguments(folder, name="resumed", **settings)) == 0
    out, again = interrupted("resumed", "rrfp_jax on jax", **settings)
    latest = folder / "runs" / "resumed.checkpoints" / "3"
    assert out.splitlines()[-2:] == [
        f"Ctrl-C while starting: ends; nothing is lost; resumes from {latest}",
        f"to resume: {again}",
    ]
    assert not (folder / "runs" / "resumed.1").exists()


def test_control_c_while_compiling_says_so_and_writes_nothing(folder, capsys, monkeypatch):
    def pressed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(OnDevices, "lower", pressed)
    assert main(arguments(folder, name="never")) == 130
    assert "interrupted" in "".join(capsys.readouterr())
    assert not (folder / "runs" / "never").exists()


def test_help_lists_the_fields_of_the_run(capsys):
    assert main([CONFIG, "--help"]) == 0
    out, err = capsys.readouterr()
    config = load_config(CONFIG.removeprefix("--config="))
    listed = [line.split("=")[0].strip() for line in out.splitlines() if line.startswith("  --config.")]
    assert sorted(listed) == sorted(f"--config.{name}" for name, *_ in fields_of(config))
    places = [listed.index(f"--config.{name}") for name in ("model.d_model", "steps", "agreement")]
    assert places == sorted(places), "the run's own first, then what every run has, then the seldom changed"
    assert err == "" and main(["--help"]) == 0


@dataclass(frozen=True)
class Older:
    """A config with a type as it was written before Python 3.10."""

    rate: Optional[float] = 1.0  # noqa: UP045


def test_overrides_of_every_type(folder):
    config = load_config(CONFIG.removeprefix("--config="))
    given = ["split=(4,6)", "max_in_flight=3", "clip_norm=None", "mesh.share_devices=true", "path=a=b"]
    made = override(config, [f"--config.{text}" for text in [*given, "mesh.pp=2", "model.dtype=bfloat16"]])
    twice = override(config, ["--config.mesh.pp=2", "--config.mesh.tp=2", "--config.mesh.tp=2,1"])
    assert twice.mesh.tp == (2, 1)
    assert override(config, ["--config.mesh.tp=2"]).mesh.tp == 2
    assert [override(config, [f"--config.loss_scale={s}"]).loss_scale for s in ("dynamic", "8")] == [
        "dynamic",
        8.0,
    ]
    assert (made.split, made.max_in_flight, made.clip_norm, made.path) == ((4, 6), 3, None, "a=b")
    assert made.mesh == type(made.mesh)(pp=2, share_devices=True)
    assert made.model.dtype == "bfloat16" and made.steps == config.steps
    assert override(made, ["--config.max_in_flight=None"]).max_in_flight is None
    assert override(Older(), ["--config.rate=None"]).rate is None


@pytest.mark.parametrize(
    ("own", "given", "made"),
    [
        ({"clip_norm": 1}, "clip_norm=0.5", 0.5),
        ({"loss_scale": 1024.0}, "loss_scale=dynamic", "dynamic"),
        ({"activation_budget": 10**9}, "activation_budget=2GiB", "2GiB"),
        ({"activation_budget": 10**9}, "activation_budget=5000", 5000),
        ({"loss_scale": 1024.0}, "loss_scale=8", 8.0),
        ({"learning_rate": np.float64(0.5)}, "learning_rate=0.25", 0.25),
    ],
)
def test_an_override_is_read_by_what_the_field_may_be_and_not_by_what_it_is(own, given, made):
    config = dataclasses.replace(load_config(CONFIG.removeprefix("--config=")), **own)
    assert getattr(override(config, [f"--config.{given}"]), given.partition("=")[0]) == made
    assert override(config, ["--config.steps=1"]) == dataclasses.replace(config, steps=1)


Mode = Enum("Mode", "FAST SLOW")


@dataclass(frozen=True)
class Declared:
    """Fields of types that texts are read by."""

    sizes: tuple[int, ...] | None = None
    widths: int | tuple[int, ...] | None = None
    kind: Literal["a", "b"] | None = None
    tags: dict[str, int] | None = None
    rate: float | Literal["auto"] = "auto"
    cache: bool | Literal["auto"] = "auto"
    cached: bool | Literal["auto"] = True
    level: Literal[1, 2] = 1
    share: int | float = 3
    folder: Path = Path("x")
    log: Path | None = None
    words: tuple[str, ...] = ("p", "q")
    letters: tuple[Literal["a", "b"], ...] = ("a",)
    mode: Mode | None = None
    warm: bool | None = None
    anything: Any = 3
    unset: Any = None
    steps: int = 2
    warmup: int | None = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        object.__setattr__(self, "warmup", self.steps - 2 or None)
        if self.steps == 7:
            raise ValueError("flag steps=7 and batch:\n  take steps=6")


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("steps=3", 3),
        *[("words=u,v", ("u", "v")), ("words=u-1, v", ("u-1", "v")), ("words=1,2", ("1", "2"))],
        *[("words=('u,v',)", ("u,v",)), ("words=()", ()), ("words=", ())],
        *[("letters=a,b", ("a", "b")), ("mode=slow", Mode.SLOW), ("mode=None", None), ("anything=4", 4)],
        *[("unset=4", 4), ("unset=a,b", "a,b"), ("warm", True), ("warm=false", False)],
        *[("sizes=3,4", (3, 4)), ("sizes=3", (3,)), ("widths=3,4", (3, 4)), ("widths=3", 3)],
        ("kind=b", "b"),
        *[("rate=0.5", 0.5), ("rate=auto", "auto"), ("cache=False", False)],
        *[("cached=auto", "auto"), ("cached=False", False)],
        *[("share=2.5", 2.5), ("share=7", 7), ("share=1.0", 1.0)],
        *[("folder=/y", Path("/y")), ("log=/y", Path("/y"))],
    ],
)
def test_an_override_is_read_by_what_is_declared(given, made):
    found = getattr(override(Declared(), [f"--config.{given}"]), given.partition("=")[0])
    assert (found, type(found)) == (made, type(made))


def test_what_a_config_says_itself_is_told_as_it_is_and_the_last_value_counts():
    with pytest.raises(UsageError, match=r"^flag steps=7 and batch:\n  take steps=6$"):
        override(Declared(), ["--config.steps=7"])
    assert override(Declared(), ["--config.steps=x", "--config.warm", "--config.steps=5"]).steps == 5


def test_a_field_that_follows_from_others_has_no_flag():
    assert override(Declared(), ["--config.steps=8"]).warmup == 6
    assert "warmup" not in listed(Declared())
    with pytest.raises(UsageError, match=r"^--config\.warmup=8: no such flag"):
        override(Declared(), ["--config.warmup=8"])


def test_a_text_that_is_no_number_is_refused_for_one():
    with pytest.raises(UsageError, match=r"^--config\.share=x: give a whole number or a number$"):
        override(Declared(), ["--config.share=x"])
    with pytest.raises(UsageError, match=r"^--config\.level=x: give 1 or 2$"):
        override(Declared(), ["--config.level=x"])
    with pytest.raises(UsageError, match=r"^--config\.mode=x: give FAST or SLOW$"):
        override(Declared(), ["--config.mode=x"])


@dataclasses.dataclass(frozen=True)
class Tagged:
    tags: dict[str, str] = dataclasses.field(default_factory=lambda: {"team": "x"})
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    steps: int = 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tags=y", "--config.tags=y: tags is a dict: set it in the file"),
        ("tags.team=y", "--config.tags.team=y: tags is a dict: set it in the file"),
        (
            "sizes=3,4",
            "--config.sizes=3,4: sizes is a list: declare it `tuple[int, ...]` to set it by a flag",
        ),
    ],
)
def test_a_field_that_is_a_list_or_a_dict_stays_as_the_file_has_it(given, said):
    assert override(Tagged(), ["--config.steps=3"]) == Tagged(steps=3)
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        override(Tagged(), [f"--config.{given}"])
    with pytest.raises(
        UsageError, match=r"^--config\.tags=y: no text can be read as dict or None: set it in the file$"
    ):
        override(Declared(), ["--config.tags=y"])
    assert "  tags={'team': 'x'} (in the file only)\n" in listed(Tagged())


def test_a_live_bar_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    times = {"step_seconds": 0.01, "wall_seconds": 0.02, "load_seconds": 0.0, "bubble": [0.25, 0.5]}
    report = Report(
        **{"step": 1, "loss": 1.25, "weight": 50.0, "metrics": {}, "hyperparams": {}, "plan": ""},
        **{"gradient_norm": 0.5, "parameter_norm": 2.0, "loss_scale": 1.0, "applied": True, "skipped": 0},
        **times,
        schedule="bf",
        recorded=None,
        ranks=[[0], [1]],
        peak_bytes=[0],
        budget_bytes=[None],
    )
    with closing(Display(3)) as display:
        display.show(report, None)
        display.say("a line [with brackets]")
    shown = terminal.getvalue()
    assert " 67%" in shown and "2,500 tokens/s" in shown and "a line [with brackets]\n" in shown
    assert "step     1  loss 1.2500" in shown  # as a plain line counts it
    assert shown.endswith("\x1b[?25h")  # the cursor is back
