"""`rrfp report`: what it says of a run's files, and which it refuses."""

import json
import sys

import pytest

from rrfp_jax.report.store import write_steps
from tests.support.commands import report
from tests.support.spoilt import spoilt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run with a slow stage, whose data came late."""
    folder = tmp_path_factory.mktemp("run")
    step, _ = spoilt("stage")
    write_steps(folder / "steps.msgpack", {"run": [step]})
    span = step.trace.makespan
    line = {"step": 0, "loss": 1.0, "wall_seconds": 1.25 * span, "load_seconds": 0.25 * span}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n" + '{"step": 1, "lo')
    return folder


@pytest.mark.slow(reason="5 s: two files; tests/report has what is in them")
def test_a_run_is_explained(folder, capsys):
    assert report([str(folder)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("schedule bf\nStage 2 computes 1.60 times as long as the others: ")
    assert "waiting for data" in told and "20.0%" in told
    assert "Stage 2 computes" in (folder / "report.html").read_text()
    out = folder / "why.html"
    assert report([str(folder / "steps.msgpack"), f"--out={out}"]) == 0
    told = capsys.readouterr().out
    assert "waiting for data" not in told and f"pictures: {out} (" in told and out.exists()


def test_two_runs_are_told_side_by_side(folder, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    step, _ = spoilt("link")
    write_steps(other / "steps.msgpack", {"run": [step]})
    (other / "metrics.jsonl").write_text(json.dumps({"step": 0, "wall_seconds": step.trace.makespan}) + "\n")
    assert report([str(folder), str(other)]) == 0
    told = capsys.readouterr().out
    for said in ("Stage 2 computes 1.60 times as long", "The link from stage 1 to 2 is slow", "difference"):
        assert said in told
    assert not (other / "report.html").exists()


def test_without_what_draws_there_is_the_text(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.delitem(sys.modules, "rrfp_jax.report.page", raising=False)
    assert report([str(folder)]) == 0
    told = capsys.readouterr().out
    assert (
        told.startswith("schedule bf\nStage 2 computes 1.60 times")
        and 'pip install "PATH-TO-CHECKOUT[pictures]"' in told
    )


def test_a_folder_that_cannot_be_written_to(folder, monkeypatch, capsys):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert report([str(folder)]) == 2
    said = f"{folder}/report.html: cannot be written; give a file in another folder with --out=FILE.html\n"
    assert capsys.readouterr().err.endswith(said)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert report([str(folder)]) == 0
    assert "Stage 2 computes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "the following arguments are required: RUN"),
        (["nowhere"], "there is no nowhere: give the folder of a run, as runs/NAME, or its steps.msgpack"),
        (["empty"], "empty has no steps.msgpack: give the folder of a run that has ended"),
        (["script"], "script has no steps.msgpack: a script's run writes none, but trainer.write_trace("),
        (["trace.json"], "trace.json is a trace for ui.perfetto.dev; what is read is a run's steps.msgpack"),
        (["broken"], "broken/steps.msgpack has no steps of this version of rrfp_jax"),
        (["untrained"], "untrained/steps.msgpack has no step of a run that trained"),
        (["empty", "--out=nowhere/why.html"], "nowhere/why.html: there is no folder nowhere"),
        (["cut"], "cut/metrics.jsonl: line 1 is no step's: "),
        (["strange"], "strange/config.json: Expected `object`, got `array`"),
        (["traced", "--out=why.txt"], "why.txt: the name of a page ends with .html or .htm"),
        (["traced", "empty", "--out=two.html"], "--out is for the page of one run: two are compared"),
        (["traced", "empty"], "empty has no steps.msgpack"),
    ],
)
def test_refusals(given, said, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken", "untrained", "cut", "strange", "traced", "script"):
        (tmp_path / name).mkdir()
    (tmp_path / "script" / "rank-0.log").write_text("")
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "broken" / "steps.msgpack").write_text("{")
    write_steps("untrained/steps.msgpack", {"run": []})
    (tmp_path / "cut" / "steps.msgpack").write_bytes((folder / "steps.msgpack").read_bytes())
    (tmp_path / "cut" / "metrics.jsonl").write_text("{}\n")
    for name in ("strange", "traced"):
        for file in ("steps.msgpack", "metrics.jsonl"):
            (tmp_path / name / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "strange" / "config.json").write_text("[]")
    assert report(given) == 2
    told = capsys.readouterr()
    assert said in told.err and told.out == "" and told.err.count("\n") == 1
