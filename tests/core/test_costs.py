"""What tasks and transfers cost in simulations."""

import pytest

from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement, Task
from rrfp_jax.sim.disturbances import Jittered, LateReadiness
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import TableCosts, Workload, WorkloadCosts, log_normal, recorded
from rrfp_jax.trace.jitter import LEVELS, Jitter
from tests.support.spoilt import Straggler


def table(first, stages=3):
    """Stage i's one microbatch takes `first` + i."""
    return tuple((float(first + i),) for i in range(stages))


WORKLOAD = Workload(table(12), table(24), table(36), table(100), table(200))


class TestWorkload:
    def test_chunks_share_an_entry(self):
        costs = WorkloadCosts(WORKLOAD, Placement(3, 2))
        kinds = (FORWARD, INPUT, WEIGHT, BACKWARD)
        assert [costs.duration(1, Task(kind, 1, 0)) for kind in kinds] == [6.5, 12.5, 18.5, 31]

    def test_looped_placements_wrap_around_by_the_unused_rows(self):
        costs = WorkloadCosts(WORKLOAD, Placement(3, 2))
        assert [costs.transfer(i, Task(FORWARD, 0, 0)) for i in range(3)] == [100, 101, 102]
        assert [costs.transfer(i, Task(BACKWARD, 1, 0)) for i in range(3)] == [200, 201, 202]

    def test_a_v_uses_the_same_links_the_other_way(self):
        costs = WorkloadCosts(WORKLOAD, Placement(3, 2, "v"))
        assert [costs.transfer(i, Task(FORWARD, 0, 0)) for i in range(3)] == [100, 101, 0]
        assert [costs.transfer(i, Task(FORWARD, 1, 0)) for i in range(3)] == [0, 100, 101]
        assert [costs.transfer(i, Task(INPUT, 1, 0)) for i in range(3)] == [201, 202, 0]
        assert [costs.transfer(i, Task(INPUT, 0, 0)) for i in range(3)] == [0, 201, 202]

    def test_other_stages_are_refused(self):
        with pytest.raises(ValueError, match="3 stages, the placement 4"):
            WorkloadCosts(WORKLOAD, Placement(4))


PLACEMENT = Placement(4)
COSTS = WorkloadCosts(
    log_normal(4, 40, forward=0.01, sigma=0.3, shared=0.5, seed=0, transfer=0.002), PLACEMENT
)


def step(costs, schedule="bf", **kwargs):
    rules = StepRules(placement=PLACEMENT, microbatches=40, schedule=by_name(schedule), limit=8)
    return simulate(rules, costs, **kwargs)


def durations(trace):
    return {(r.stage, r.task): r.end - r.start for r in trace.records}


class TestDisturbances:
    def test_a_straggler_is_slow_from_one_microbatch_to_another(self):
        costs = Straggler(COSTS, stage=1, factor=2.5, first=3, last=4)
        slow = [
            (stage, j)
            for stage in range(4)
            for j in range(40)
            if costs.duration(stage, Task(FORWARD, 0, j)) != COSTS.duration(stage, Task(FORWARD, 0, j))
        ]
        assert slow == [(1, 3), (1, 4)]
        assert costs.duration(1, Task(FORWARD, 0, 3)) == 2.5 * COSTS.duration(1, Task(FORWARD, 0, 3))

    def test_jitter_is_that_of_the_runtime_and_paired(self):
        costs = Jittered(COSTS, LEVELS["J2"], seed=7)
        traces = [step(costs, schedule) for schedule in ("1f1b", "1f1b", "gpipe")]
        assert durations(traces[0]) == durations(traces[1])  # each simulation has running means of its own
        for trace in traces:
            jitter, delayed = Jitter(LEVELS["J2"], 7), set()
            for record in sorted(trace.records, key=lambda r: r.start):
                own = COSTS.duration(record.stage, record.task)
                delay = jitter.delay(0, record.stage, record.task, own)
                assert record.end - record.start == pytest.approx(own + delay, abs=1e-12)
                delayed |= {(record.stage, record.task)} if delay else set()
            assert len(delayed) == pytest.approx(0.2 * 320, rel=0.3)
        assert traces[0].makespan > step(COSTS, "1f1b").makespan

    def test_late_readiness_keeps_no_link(self):
        late = step(LateReadiness(COSTS, 0.005), links="serial")
        ends = {(r.stage, r.task): r.end for r in late.records}
        for record in late.records:
            if record.stage > 0 and record.task.kind is FORWARD:
                hop = record.ready - ends[record.stage - 1, record.task]
                assert hop == pytest.approx(0.007, abs=1e-9)

    @pytest.mark.parametrize(
        ("match", "make"),
        [
            ("factor=-1", lambda: Straggler(COSTS, stage=0, factor=-1)),
            ("late readiness=inf", lambda: LateReadiness(COSTS, float("inf"))),
        ],
    )
    def test_nonsense_is_refused(self, match, make):
        with pytest.raises(ValueError, match=match):
            make()


class TestRecorded:
    @pytest.mark.parametrize("schedule", ["1f1b", "bf", "bfw"])
    def test_a_recorded_step_costs_the_same_again(self, schedule):
        trace = step(LateReadiness(COSTS, 0.001), schedule)
        again = step(recorded(trace), schedule)
        assert again.makespan == pytest.approx(trace.makespan, rel=1e-9)
        assert [again.order(stage) for stage in range(4)] == [trace.order(stage) for stage in range(4)]

    def test_a_fused_backward_takes_as_long_as_its_parts(self):
        costs = recorded(step(COSTS, "zb-h1"))
        task = Task(BACKWARD, 0, 5)
        assert costs.duration(1, task) == pytest.approx(COSTS.duration(1, task))

    def test_a_task_that_was_not_there_is_named(self):
        with pytest.raises(ValueError, match="no duration of I0 on stage 3"):
            step(recorded(step(COSTS, "1f1b")), "bfw")

    def test_tables(self):
        task = Task(FORWARD, 0, 0)
        costs = TableCosts({(0, task): 1.5}, {(0, task): 0.5})
        assert (costs.duration(0, task), costs.transfer(0, task), costs.transfer(1, task)) == (1.5, 0.5, 0)
