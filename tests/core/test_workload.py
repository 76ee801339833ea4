"""Workloads: what a file may hold, what is refused and how, and the statistics of those that are made."""

import json
import math
from dataclasses import replace
from statistics import correlation, fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core.tasks import BACKWARD, FORWARD, Placement, Task
from rrfp_jax.trace.costs import Workload, WorkloadCosts, constant, log_normal

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


def test_bytes_are_kept_if_they_are_given():
    rows = [[1.0, 2.0], [3.0, 4.0]]
    data = dict.fromkeys(("forward", "backward_input", "backward_weight"), rows)
    assert "activation_bytes" not in Workload.from_json_object(data).as_json_object()
    read = Workload.from_json_object({**data, "activation_bytes": [[8, 0], [2**40, 1]]})
    assert read.activation_bytes == ((8, 0), (2**40, 1))
    assert Workload.from_json_object(read.as_json_object()) == read
    with pytest.raises(ValueError, match=r"activation_bytes\[1\]\[0\] = -1: give a finite number of bytes"):
        Workload.from_json_object({**data, "activation_bytes": [[8, 0], [-1, 1]]})
