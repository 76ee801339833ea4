"""Traces for Perfetto: what is in them."""

import json

import pytest

from rrfp_jax.errors import UsageError
from rrfp_jax.json_files import write_json
from rrfp_jax.report.legend import DELAY
from rrfp_jax.report.perfetto import write_trace
from rrfp_jax.report.store import read_steps
from tests.report.test_store import delayed, step


def test_injected_delays_are_seen(tmp_path):
    written = delayed(step("bf"), delayed=1e-3, late=2e-3)
    write_trace(tmp_path / "trace.json", {"run": [written]})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tasks = {(e["tid"], e["name"]): e for e in events if e["ph"] == "X"}
    delays = [e for e in events if e["name"] == DELAY]
    assert len(delays) == 12  # of 3 stages, 2 chunks, F and B
    for event in delays:
        task = tasks[event["tid"], event["args"]["of"]]
        assert event["dur"] == 1000 and event["ts"] + 1000 == pytest.approx(
            task["ts"] + task["dur"], abs=2e-3
        )
    assert all("delayed" not in e["args"] for e in tasks.values() if e["args"].get("microbatch") != 1)


def test_groups_have_tracks_of_their_own_and_all_tasks(tmp_path):
    written = {"hint": [step("bfw", 3)], "order": [step("zb-v")], "none": []}
    write_trace(tmp_path / "trace.json", written)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == list(written)
    for pid, name in enumerate(("hint", "order")):
        tasks = [e for e in events if e["pid"] == pid and "kind" in e.get("args", {})]
        (own,) = written[name]
        records = {(r.stage, str(r.task)): r for r in own.trace.records}
        assert len(tasks) == len(records)
        for task in tasks:
            record = records[task["tid"], task["name"]]
            assert task["ts"] == pytest.approx((record.start - own.trace.start) * 1e6, abs=2e-3)
            assert task["dur"] == pytest.approx((record.end - record.start) * 1e6, abs=2e-3)


def test_a_name_of_messagepack_is_given_steps(tmp_path):
    written = step("bf")
    write_trace(tmp_path / "a.msgpack", {"run": [written]})
    assert read_steps(tmp_path / "a.msgpack")["run"][0].trace.records == written.trace.records


def test_a_number_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be written as JSON: Out of range float"):
        write_json(tmp_path / "o.json", [float("nan")])
    assert not (tmp_path / "o.json").exists()
