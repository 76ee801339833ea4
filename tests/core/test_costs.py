"""Costs of steps: tables, workloads, what layers have to do, and fits of what they take."""

import json
import math
from dataclasses import replace
from statistics import correlation, fmean, pstdev
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lateness import LateReadiness
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement, Task
from rrfp_jax.sim.engine import simulate
from rrfp_jax.studies.disturbances import Jittered
from rrfp_jax.trace.costs import (
    CostTable,
    TableCosts,
    Workload,
    WorkloadCosts,
    constant,
    log_normal,
    recorded,
)
from rrfp_jax.trace.jitter import LEVELS, Jitter
from rrfp_jax.trace.layers import BusySample, LayerWork, Work, fitted_shares, layer_shares, least_largest
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
        traces = [step(Jittered(COSTS, LEVELS["J2"], seed=7), name) for name in ("1f1b", "1f1b", "gpipe")]
        assert durations(traces[0]) == durations(traces[1])
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

    def test_the_parts_of_a_fused_backward_take_half_of_it_each(self):
        costs = recorded(step(COSTS, "1f1b"))
        fused, parts = Task(BACKWARD, 0, 5), [Task(kind, 0, 5) for kind in (INPUT, WEIGHT)]
        assert [costs.duration(1, part) for part in parts] == [costs.duration(1, fused) / 2] * 2
        assert costs.transfer(1, parts[0]) == costs.transfer(1, fused) > 0

    def test_a_task_that_was_not_there_is_named(self):
        with pytest.raises(ValueError, match="no duration of F40 on stage 3"):
            recorded(step(COSTS, "1f1b")).duration(3, Task(FORWARD, 0, 40))

    def test_tables(self):
        task = Task(FORWARD, 0, 0)
        costs = TableCosts({(0, task): 1.5}, {(0, task): 0.5})
        assert (costs.duration(0, task), costs.transfer(0, task), costs.transfer(1, task)) == (1.5, 0.5, 0)


TIMES = st.floats(0, 1e6)


@st.composite
def workloads(draw):
    stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    row = st.tuples(*[TIMES] * microbatches)
    return Workload(*(draw(st.tuples(*[row] * stages)) for _ in range(5)))


def file(**changes):
    """A file of 2 stages and 3 microbatches, its entries all different; None leaves a table out."""
    names = ["forward", "backward_input", "backward_weight", "transfer_forward", "transfer_backward"]
    tables = {name: [[k, k + 0.1, k + 0.2], [k + 0.3, k + 0.4, k + 0.5]] for k, name in enumerate(names)}
    return {name: table for name, table in (tables | changes).items() if table is not None}


def read(**changes):
    return Workload.from_json_object(file(**changes))


@given(workloads())
def test_json_round_trip(workload):
    assert Workload.from_json_object(json.loads(json.dumps(workload.as_json_object()))) == workload


def test_times_are_those_of_the_file():
    workload = read()
    assert (workload.stages, workload.microbatches) == (2, 3)
    assert (workload.forward[0][2], workload.backward_input[1][2]) == (0.2, 1.5)
    assert workload.backward_weight[1][2] == 2.5
    assert (workload.transfer_forward[0][2], workload.transfer_backward[1][2]) == (3.2, 4.5)


def test_transfers_may_be_left_out():
    workload = read(transfer_forward=None, transfer_backward=None)
    assert workload.transfer_forward == workload.transfer_backward == ((0.0,) * 3,) * 2


def test_the_last_stage_needs_no_forward_transfer():
    assert read(transfer_forward=[[1, 2, 3]]).transfer_forward == ((1, 2, 3), (0, 0, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"foward": [[1]]}, "'foward' is not a table .* use forward, "),
        ({"backward_weight": None}, "backward_weight is missing"),
        ({"forward": "abc"}, "forward is a str: give a list"),
        ({"forward": [[1, 2, 3], {"0": 1}]}, r"forward\[1\] is a dict: give a list"),
        ({"forward": []}, "forward is empty"),
        ({"forward": [[], []]}, "forward is empty"),
        ({"forward": [[1, 2, 3], [4, 5]]}, r"forward\[1\] has 2 entries, forward\[0\] has 3"),
        ({"backward_input": [[1, 2, 3]]}, "backward_input has 1 rows, forward has 2"),
        ({"transfer_backward": [[1, 2, 3]]}, "transfer_backward has 1 rows"),
        ({"transfer_forward": []}, "transfer_forward has 0 rows"),
        ({"transfer_forward": [[1, 2]]}, r"transfer_forward\[0\] has 2 entries"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


@pytest.mark.parametrize("time", [-0.1, math.nan, math.inf, 10**400, True, "1", None, [1]])
def test_refuses_what_is_not_a_time(time):
    with pytest.raises(ValueError, match=r"backward_input\[1\]\[2\] = .*: give a finite number of seconds"):
        read(backward_input=[[1, 2, 3], [4, 5, time]])


def test_refuses_another_document():
    with pytest.raises(ValueError, match="a workload is a list: give an object"):
        Workload.from_json_object([[1.0]])


def test_constant():
    workload = constant(2, 3, 0.5, backward_ratio=3.0, transfer=0.125)
    assert workload.forward == ((0.5,) * 3,) * 2
    assert workload.backward_input == workload.backward_weight == ((0.75,) * 3,) * 2
    assert workload.transfer_forward == workload.transfer_backward == ((0.125,) * 3,) * 2


def times(workload, kind, stage):
    costs = WorkloadCosts(workload, Placement(workload.stages))
    return [costs.duration(stage, Task(kind, 0, j)) for j in range(workload.microbatches)]


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_log_normal_has_the_mean_the_spread_and_the_correlation_asked_for(shared):
    workload = log_normal(2, 4000, forward=0.02, sigma=0.3, shared=shared, seed=1, backward_ratio=3.0)
    rows = [times(workload, kind, stage) for kind in (FORWARD, BACKWARD) for stage in (0, 1)]
    logs = [[math.log(time) for time in row] for row in rows]
    assert [fmean(row) for row in rows] == pytest.approx([0.02, 0.02, 0.06, 0.06], rel=0.02)
    assert [pstdev(row) for row in logs] == pytest.approx([0.3] * 4, rel=0.05)
    pairs = [correlation(logs[a], logs[b]) for a in range(4) for b in range(a)]
    assert pairs == pytest.approx([shared] * 6, abs=0.05)
    assert workload.backward_input == workload.backward_weight


def test_log_normal_is_the_same_on_every_stage_if_all_is_shared():
    workload = log_normal(3, 5, forward=1.0, sigma=0.4, shared=1.0, seed=2)
    assert workload.forward == workload.backward_input == (workload.forward[0],) * 3
    assert len(set(workload.forward[0])) == 5


def test_log_normal_without_spread_is_constant():
    arguments = {"forward": 0.01, "backward_ratio": 1.5, "transfer": 0.002}
    assert log_normal(2, 3, sigma=0.0, shared=0.5, seed=3, **arguments) == constant(2, 3, **arguments)


def test_log_normal_gives_the_same_file_again():
    workload = log_normal(2, 2, forward=1.0, sigma=0.5, shared=0.25, seed=7)
    golden = [1.0330197086072068, 1.3541160266264547, 0.7222393387220682, 1.3108244948701904]
    assert [*workload.forward[0], *workload.forward[1]] == pytest.approx(golden, rel=1e-12)
    golden = [0.7506073626483283, 1.0053496735098026, 0.5533969287031807, 0.931883525970662]
    assert [*workload.backward_weight[0], *workload.backward_weight[1]] == pytest.approx(golden, rel=1e-12)


def test_more_microbatches_keep_the_first():
    few, many = (log_normal(2, n, forward=1.0, sigma=0.5, shared=0.25, seed=7) for n in (2, 5))
    assert few.forward == tuple(row[:2] for row in many.forward)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sigma": -1.0}, "sigma=-1.0: "),
        ({"sigma": math.nan}, "sigma=nan: "),
        ({"shared": 1.5}, r"shared=1.5: .* from 0 to 1"),
        ({"forward": -1.0}, r"forward\[0\]\[0\] = -1.0"),
        ({"backward_ratio": -2.0}, r"backward_input\[0\]\[0\] = -1.0"),
        ({"transfer": math.inf}, r"transfer_forward\[0\]\[0\] = inf"),
        ({"stages": 0}, "at least one stage"),
        ({"microbatches": 0}, "at least one stage and one microbatch"),
    ],
)
def test_log_normal_refuses(changes, message):
    arguments = {"stages": 2, "microbatches": 2, "forward": 1.0, "sigma": 0.1, "shared": 0.5, "seed": 0}
    with pytest.raises(ValueError, match=message):
        log_normal(**(arguments | changes))


def test_a_changed_copy_is_checked_too():
    with pytest.raises(ValueError, match=r"forward\[0\]\[1\] = -1: "):
        replace(constant(1, 2, 1.0), forward=((1, -1),))


def test_bytes_of_buckets_are_kept_if_all_have_them():
    given = {"short": replace(WORKLOAD, activation_bytes=table(5)), "long": WORKLOAD}
    assert CostTable(given).workload(["short", "short"]).activation_bytes == ((5, 5), (6, 6), (7, 7))
    assert CostTable(given).workload(["short", "long"]).activation_bytes is None


def test_bytes_are_kept_if_they_are_given():
    rows = [[1.0, 2.0], [3.0, 4.0]]
    data = dict.fromkeys(("forward", "backward_input", "backward_weight"), rows)
    assert "activation_bytes" not in Workload.from_json_object(data).as_json_object()
    read = Workload.from_json_object({**data, "activation_bytes": [[8, 0], [2**40, 1]]})
    assert read.activation_bytes == ((8, 0), (2**40, 1))
    assert Workload.from_json_object(read.as_json_object()) == read
    with pytest.raises(ValueError, match=r"activation_bytes\[1\]\[0\] = -1: give a finite number of bytes"):
        Workload.from_json_object({**data, "activation_bytes": [[8, 0], [-1, 1]]})


FOUR = Placement(4, 1)


def work(*split, first="Block", last="Block", estimate=1.0):
    layers = [LayerWork("Block", 1.0, 10) for _ in range(sum(split))]
    layers[0] = LayerWork(first, estimate, 10)
    layers[-1] = LayerWork(last, estimate, 10)
    return Work(layers, split)


def found(work, *busy):
    return layer_shares(work, dict(enumerate(busy)), FOUR)


def test_more_to_do_is_not_slow():
    shares = found(work(7, 3, 3, 3), 7.0, 3.0, 3.0, 3.0)
    assert shares.slowness == pytest.approx([1, 1, 1, 1])
    assert shares.seconds == pytest.approx([1.0] * 16)


def test_the_same_work_takes_longer():
    shares = found(work(4, 4, 4, 4), 4.0, 4.0, 6.4, 4.0)
    assert shares.slowness == pytest.approx([1, 1, 1.6, 1])
    assert shares.seconds == pytest.approx([1.0] * 16), "on a stage that is not slow"


def test_both_at_once():
    shares = found(work(7, 3, 3, 3), 7.0, 4.5, 3.0, 3.0)
    assert shares.slowness == pytest.approx([1, 1.5, 1, 1])


def test_other_layers_take_the_rest():
    own = work(4, 4, 4, 4, first="Embed", last="Head", estimate=0.5)
    shares = found(own, 3.2, 4.0, 4.0, 4.4)
    assert shares.slowness == pytest.approx([1, 1, 1, 1])
    assert shares.seconds[0] == pytest.approx(0.2) and shares.seconds[-1] == pytest.approx(1.4)
    assert shares.of_time[:4] == pytest.approx([0.2 / 3.2, *[1 / 3.2] * 3])


def test_up_to_three_times_what_shapes_say():
    shares = found(work(4, 4, 4, 4, first="Embed", last="Head"), 4.0, 4.0, 4.0, 9.0)
    assert shares.slowness == pytest.approx([1, 1, 1, 1.5]), "three blocks, and a head of three more"


def test_nothing_is_known_of_two_unlike_stages():
    own = Work([LayerWork("Embed", 1.0, 0), LayerWork("Head", 1.0, 0)], (1, 1))
    shares = layer_shares(own, {0: 1.0, 1: 5.0}, Placement(2, 1))
    assert shares.slowness == [1.0, 1.0] and shares.of_bytes == [1.0, 1.0]


def test_a_stage_with_two_chunks():
    own = Work([LayerWork("Block", 1.0, 1)] * 8, (1,) * 8)
    placement = Placement(4, 2, "v")
    slow = {v: 3.0 if placement.place(v)[0] == 1 else 1.0 for v in range(8)}
    assert layer_shares(own, slow, placement).slowness == pytest.approx([1, 3, 1, 1])


def test_cuts_whose_largest_cost_is_least():
    seconds = [4, 1, 1, 1, 1]
    assert least_largest(lambda v, a, b: sum(seconds[a:b]), 5, 2) == (4, [1, 4])
    doubled = least_largest(lambda v, a, b: sum(seconds[a:b]) * (2 if v == 1 else 1), 5, 2)
    assert doubled == (6, [2, 3])


EVEN = (4, 4, 4, 4)


def even_work(split=EVEN, first="Block", last="Block", estimate=1.0):
    layers = [LayerWork("Block", 1.0, 3)] * sum(split)
    layers[0] = LayerWork(first, estimate, 3)
    layers[-1] = LayerWork(last, estimate, 3)
    return Work(layers, split)


def busy(work, seconds, slowness, split):
    ranges = work.ranges(split)
    return [s * sum(seconds[i] for i in own) for s, own in zip(slowness, ranges, strict=True)]


def said(work, shares, split):
    """What the stages take with a split, in all 1."""
    found = busy(work, shares.seconds, shares.slowness, split)
    return [one / sum(found) for one in found]


def test_alike_layers_that_take_longer_are_on_a_slow_stage():
    shares = fitted_shares(even_work(), [BusySample(EVEN, [4, 4, 6, 4])], FOUR)
    relative = [one / shares.slowness[0] for one in shares.slowness]
    assert relative == pytest.approx([1, 1, 1.5, 1], rel=0.04)
    assert shares.of_time == pytest.approx([1 / 4] * 16) and shares.of_bytes == pytest.approx([1 / 4] * 16)


def test_another_layer_is_heavier_than_its_shapes_say_rather_than_its_stage_slow():
    own = even_work(first="Embed", last="Head", estimate=0.5)
    shares = fitted_shares(own, [BusySample(EVEN, [3.5, 4, 4, 6.2])], FOUR)
    assert shares.seconds[-1] / shares.seconds[4] > 2
    assert shares.slowness[3] / shares.slowness[1] < 1.15


@pytest.mark.parametrize("slow", [True, False])
def test_a_layer_that_has_moved_tells_which_it_was(slow):
    """A last stage with a heavy head, or a slow one: both take 6.2 at first."""
    own, later = even_work(first="Embed", last="Head", estimate=0.5), (4, 5, 4, 3)
    seconds = [0.5, *[1.0] * 14, 0.5 if slow else 3.2]
    slowness = [1, 1, 1, 6.2 / 3.5 if slow else 1]
    seen = [BusySample(split, busy(own, seconds, slowness, split)) for split in (EVEN, later)]
    shares = fitted_shares(own, seen, FOUR)
    third = (5, 5, 4, 2)
    truth = busy(own, seconds, slowness, third)
    assert said(own, shares, third) == pytest.approx([one / sum(truth) for one in truth], rel=0.07)


@given(
    st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4),
    st.lists(st.integers(1, 6), min_size=4, max_size=4).filter(lambda split: sum(split) < 17),
    st.floats(0.1, 100),
)
def test_what_was_measured_is_what_it_says(slowness, split, scale):
    """Whatever the cause is taken to be: stages are as busy as they were, in any unit of time."""
    own = even_work(tuple(split))
    measured = [scale * one for one in busy(own, [1.0] * sum(split), slowness, split)]
    shares = fitted_shares(own, [BusySample(tuple(split), measured)], FOUR)
    found = busy(own, shares.seconds, shares.slowness, split)
    assert found == pytest.approx(measured, rel=0.03)
    assert sum(shares.of_time) == pytest.approx(4)


def test_chunks_of_one_stage_are_slow_together():
    placement, own = Placement(4, 2, "v"), Work([LayerWork("Block", 1.0, 3)] * 8, (1,) * 8)
    measured = [3.0 if placement.place(v)[0] == 1 else 1.0 for v in range(8)]
    shares = fitted_shares(own, [BusySample(own.split, measured)], placement)
    assert shares.slowness[1] / shares.slowness[0] == pytest.approx(3, rel=0.15)


@pytest.mark.parametrize("split", [(1, 7, 4, 4), (16,)])
def test_layers_that_have_nothing_to_do_by_their_shapes(split):
    layers = [LayerWork("Pass", 0.0, 0), *[LayerWork("Block", float(len(split) > 1), 3)] * 15]
    placement = Placement(len(split), 1)
    shares = fitted_shares(Work(layers, split), [BusySample(split, [float(n) for n in split])], placement)
    assert all(0 < one < float("inf") for one in shares.seconds)


def test_many_virtual_stages_under_several_splits_take_a_part_of_a_second():
    """It took 15 s with as many equations as virtual stages and splits."""
    placement, seen = Placement(8, 8), []
    for moved in range(6):
        split = tuple(2 + (v == moved) - (v == moved + 20) for v in range(64))
        seen.append(BusySample(split, [size * (1.0 + 0.01 * (v % 7)) for v, size in enumerate(split)]))
    began = process_time()
    fitted_shares(Work([LayerWork("Block", 1.0, 3)] * 128, split), seen, placement)
    assert process_time() - began < 3
