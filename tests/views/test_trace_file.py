"""Trace files: what is written is read again."""

import pytest

from rrfp_jax.core.measure.costs import WorkloadCosts
from rrfp_jax.core.measure.workload import log_normal
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.sim.engine import simulate
from rrfp_jax.views.trace_file import write_trace
from rrfp_jax.views.trace_reading import read_trace


def step(schedule):
    placement = by_name(schedule).placement_for(3, 2)
    rules = StepRules(placement=placement, microbatches=6, schedule=by_name(schedule))
    workload = log_normal(3, 6, forward=0.01, sigma=0.3, shared=0.5, seed=0, transfer=0.001)
    return simulate(rules, WorkloadCosts(workload, placement))


def test_groups_of_steps_are_read_again(tmp_path):
    written = {"hint": [step("bfw")], "order": [step("zb-v")], "none": []}
    write_trace(tmp_path / "trace.json", written)
    read = read_trace(tmp_path / "trace.json")
    assert list(read) == ["hint", "order", "none"] and read["none"] == []
    for name in ("hint", "order"):
        (before,), (after,) = written[name], read[name]
        assert after.placement == before.placement
        assert after.makespan == pytest.approx(before.makespan, abs=1e-8)
        for one, other in zip(before.records, after.records, strict=True):
            assert one[:3] == other[:3]
            assert other[3:] == pytest.approx(one[3:], abs=2e-9)


@pytest.mark.parametrize("text", ["[", "{}", '{"traceEvents": [{"ph": "X", "cat": "task"}]}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=r"trace.json is not a trace.json of rrfp-train or rrfp-sim"):
        read_trace(tmp_path / "trace.json")
