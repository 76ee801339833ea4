"""Predicted bytes against the record of what XLA's compiler for GPUs said."""

import sys

import pytest

from benchmarks import harness
from benchmarks.gpu.bytes import BELOW, CASES, Pair, pairs_of, pairs_table, read_record, stages_of

MIB = 2**20


@pytest.fixture(autouse=True)
def path_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.slow(reason="programs of large models")
@pytest.mark.parametrize("name", ["gpt3", "llama3"])
def test_predictions_are_not_below_what_xla_said(name):
    for pair in pairs_of(name, read_record()[name]):
        if pair.what == "held":
            assert pair.predicted == pair.found > 0
        elif pair.judged:
            assert pair.off > -BELOW, pair


def test_nothing_is_predicted_of_several_devices():
    assert not list(pairs_of("llama3-tp8", read_record()["llama3-tp8"]))


def test_the_record_has_all_runs():
    assert read_record().keys() == CASES.keys()


def test_a_table_shows_the_shape_that_needs_most():
    pairs = [
        Pair("run", "0", bucket, "B", 3 * size, 2 * size) for bucket, size in (("a", MIB), ("b", 9 * MIB))
    ]
    assert pairs_table(pairs).splitlines()[2:] == ["| run | 0 | | | 27.0 / 18.0 (+50 %) | | |"]


def test_chunks_of_a_stage_are_added_up_and_their_programs_are_not():
    chunk = {"held_after_forward_bytes": 3, "temporary_bytes": {"F": 5, "B": 7}}
    parts = ("weight", "optimizer", "accumulator", "parked_gradient")
    fixed = {f"{part}_bytes": 1 for part in parts}
    (stage,) = stages_of({2: {**fixed, "buckets": {"a": {"chunks": [chunk, chunk]}}}}).values()
    assert stage == {"fixed": 4, "buckets": {"a": {"held": 6, "temporaries": {"F": 5, "B": 7}}}}


def test_unknown_runs_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        harness.run("gpu_bytes", ["--cases=gpt3,gpt4"])
    assert "'gpt4' is none of quickstart" in capsys.readouterr().err
