"""The latest step in a file: what is written is read, at most once a second, and nothing else."""

import json

import pytest

from rrfp_jax.json_files import Unreadable
from rrfp_jax.report import step_file
from rrfp_jax.report.step_file import NAME, StepFile, read_step
from rrfp_jax.trace.records import RECORD
from tests.support.spoilt import spoilt
from tests.support.watched import latest, step_of, told


def test_what_is_written_is_read(tmp_path):
    recorded = spoilt("stage")[0]
    found = latest(tmp_path, told(recorded, replicas=2, wide=2))
    assert found.trace.records == recorded.trace.records
    assert (found.trace.start, found.trace.end) == (recorded.trace.start, recorded.trace.end)
    assert (found.trace.step, found.trace.placement) == (recorded.trace.step, recorded.trace.placement)
    assert (found.fixed_order, found.grouped) == (False, False)
    assert (found.trace.replica, len(found.trace.busy_seconds)) == (1, 2) and found.ranks[7] == [14, 15]
    assert [path.name for path in tmp_path.iterdir()] == [NAME], "nothing else is left"


def test_at_most_once_a_second_and_the_last_one_at_the_end(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(step_file, "monotonic", lambda: now)
    file, reports = StepFile(tmp_path), [told(step_of(stages)) for stages in (1, 2, 3)]
    file.add(reports[0])
    now += 0.9
    file.add(reports[1])
    assert read_step(tmp_path / NAME).trace.stages == 1
    now += 0.2
    file.add(reports[2])
    assert read_step(tmp_path / NAME).trace.stages == 3
    file.add(reports[1])
    file.flush()
    assert read_step(tmp_path / NAME).trace.stages == 2
    (tmp_path / NAME).unlink()
    file.flush()
    assert not (tmp_path / NAME).exists(), "it was written already"


def changed(content, **head):
    line, _, packed = content.partition(b"\n")
    return json.dumps(json.loads(line) | head).encode() + b"\n" + packed


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda content: b"", "no JSON"),
        (lambda content: content[:40], "no JSON"),
        (lambda content: content[:-1], "are not 96 records"),
        (lambda content: content[: content.index(b"\n") + 1], "0 bytes are not 96 records"),
        (lambda content: changed(content, form="<i"), "records of the form '<i'"),
        (lambda content: changed(content, records=-1), "Expected `int` >= 0"),
        (lambda content: changed(content, more=1), "unknown field"),
        (lambda content: changed(content, busy_by_replica=[[1.0]]), "times of other than 4 stages"),
        (lambda content: changed(content, replica=1), "replica 1 of 1"),
        (lambda content: changed(content, ranks=[[0]]), "ranks of 1 stages for 1 replicas"),
        (lambda content: changed(content, placement={"stages": 0, "chunks": 1, "shape": "v"}), "stages=0"),
        (lambda content: content[: -RECORD.size] + b"\xff" * RECORD.size, "is not a valid Kind"),
        (
            lambda content: content[: -RECORD.size] + b"\0" * 4 + b"\xf0" + b"\0" * (RECORD.size - 5),
            "15 is not a cause of waiting",
        ),
        (
            lambda content: content[: -RECORD.size] + b"\1" * 4 + b"\0" * (RECORD.size - 4),
            "a record of stage",
        ),
    ],
)
def test_anything_else_is_refused(tmp_path, spoil, said):
    path = tmp_path / NAME
    latest(tmp_path, told(spoilt("stage")[0]))
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(Unreadable, match=f"{NAME} is not a step of this version") as refused:
        read_step(path)
    assert said in str(refused.value)


def test_no_file(tmp_path):
    with pytest.raises(Unreadable, match="cannot be read: No such file"):
        read_step(tmp_path / NAME)
