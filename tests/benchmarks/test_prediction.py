"""What a run predicts of another one: exact where nothing is left to chance, and aims that can be missed."""

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.observed import Observed
from benchmarks.predict import (
    CASES,
    LENGTHS,
    Pair,
    Row,
    aims_of,
    markdown,
    microbatches,
    paced_runs,
    pairs,
    swapped,
)
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import WorkloadCosts, constant
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.records import Part, RecordedStep

STAGES, HOP = 4, 0.3
SHORT, LONG = "0.5", "2"
LENGTHS_OF_A_STEP = (SHORT, LONG, SHORT, SHORT, LONG, SHORT, LONG, SHORT)
OTHERS = (LONG, LONG, SHORT, LONG, SHORT, LONG, LONG, SHORT)


def step(schedule, split=(2, 2, 2, 2), lengths=LENGTHS_OF_A_STEP, limit=2 * STAGES, slow=1.0):
    """One that takes as long as its blocks say; the third stage is slow."""
    found = by_name(schedule)
    placement = found.placement_for(STAGES)
    mean = constant(STAGES, len(lengths), 1.0, transfer=HOP)
    speeds = [1.0, 1.0, slow, 1.0]
    factors = [
        [blocks * speed * float(n) for n in lengths] for blocks, speed in zip(split, speeds, strict=True)
    ]
    rules = StepRules(placement=placement, microbatches=len(lengths), schedule=found, limit=limit)
    trace = simulate(rules, WorkloadCosts(mean.scaled(factors, factors), placement))
    halves = [2 * split[placement.place(v)[0]] // placement.chunks for v in range(placement.last + 1)]
    work = Work([LayerWork("Block", 1.0, 1)] * sum(halves), halves)
    return RecordedStep(trace=trace, rules=rules, buckets=lengths, work=lambda: work)


@pytest.mark.parametrize("known", ["1f1b", "bf", "bfw", "zb-v"])
@pytest.mark.parametrize(
    "other",
    [
        step("1f1b", lengths=OTHERS, slow=1.5),
        step("bfw", limit=4, slow=1.5),
        step("bf", split=(3, 2, 1, 2), slow=1.5),
        step("ranked:zb-v", slow=1.5),
    ],
    ids=["1f1b, other lengths", "bfw, limit 4", "bf, another split", "ranked:zb-v"],
)
def test_a_run_without_noise_predicts_another(known, other):
    observed = Observed([step(known, slow=1.5)])
    assert observed.predicted(other) == pytest.approx(other.trace.makespan, rel=1e-6)


def test_what_is_noticed_late_by_a_stage_that_computes_costs_nothing():
    """Hosts without a core of their own notice messages when a task has ended."""
    ran = step("1f1b")
    late = {}
    for stage in range(STAGES):
        for last, record in pairwise(ran.trace.stage_records(stage)):
            if record.ready < last.end:
                late[stage, record.task] = last.end - 1e-6
    records = [r._replace(ready=late.get((r.stage, r.task), r.ready)) for r in ran.trace.records]
    noticed = replace(ran, trace=replace(ran.trace, parts=[Part.of(records)]))
    other = step("bfw")
    assert Observed([noticed]).predicted(other) == pytest.approx(other.trace.makespan, rel=1e-5)


def test_what_a_run_has_not_seen_it_does_not_predict():
    with pytest.raises(ValueError, match="no microbatch of the bucket 2"):
        Observed([step("bf", lengths=(SHORT,) * 8)]).predicted(step("bf"))


def test_every_run_is_predicted_from_every_other_one():
    runs = {"bf": [step("bf")], "1f1b": [step("1f1b")], "slow 1f1b": [step("1f1b", slow=1.5)]}
    found = pairs(runs)
    assert {(pair.known, pair.of) for pair in found} == {(a, b) for a in runs for b in runs if a != b}
    assert [
        aim.met for aim in aims_of("paced", [pair for pair in found if "slow" not in pair.known + pair.of])
    ] == [
        True,
        True,
    ]
    assert not aims_of("paced", found)[1].met  # nobody told of the slow stage
    assert markdown(found).count("\n") == 5


def test_the_paced_runs_differ_from_each_other():
    runs = [replace(run, seed=0) for _, run in paced_runs()]
    assert len(set(runs)) == len(runs)


def test_computed_microbatches_have_all_lengths_and_are_the_same_for_all():
    for case in CASES:
        drawn = microbatches(case.microbatches, 3)
        assert {mb["tokens"].shape[1] for mb in drawn} == set(LENGTHS)
        again = microbatches(case.microbatches, 3)
        assert all((one["tokens"] == other["tokens"]).all() for one, other in zip(drawn, again, strict=True))


def test_schedules_in_another_order_are_named_unless_alike():
    def row(schedule, real, simulated):
        return Row(schedule=schedule, microbatches=8, real=real, simulated=simulated, held=1.0)

    assert swapped([row("bf", 1.0, 1.0), row("1f1b", 1.1, 1.1)]) == []
    assert swapped([row("bf", 1.0, 1.1), row("1f1b", 1.1, 1.0)]) == ["bf and 1f1b, 8 microbatches"]
    assert swapped([row("bf", 1.0, 1.1), row("1f1b", 1.01, 1.0)]) == []


def test_a_pair_says_how_far_it_is_off():
    assert Pair("bf", "1f1b", 1.1, 1.0).off == pytest.approx(10.0)
