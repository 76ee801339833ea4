"""The discrete-event engine against an independent simulator, and what it does at single instants."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import by_name, read_csv
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import StepCosts, Workload, WorkloadCosts, constant
from tests.support.reference_simulator import Reference

LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT: "I", WEIGHT: "W"}


def lettered(task):
    return LETTERS[task.kind], task.chunk, task.microbatch


class Spelled(StepCosts):
    """A workload's costs, spelled out once more: by link, and equal shares for chunks."""

    def __init__(self, workload, placement):
        self.workload, self.placement = workload, placement

    def duration(self, stage, task):
        w, (kind, _, j) = self.workload, task
        own = {
            "F": w.forward[stage][j],
            "I": w.backward_input[stage][j],
            "W": w.backward_weight[stage][j],
            "B": w.backward_input[stage][j] + w.backward_weight[stage][j],
        }
        return own[kind if isinstance(kind, str) else LETTERS[kind]] / self.placement.chunks

    def transfer(self, stage, task):
        kind, chunk, j = task
        last = self.placement.stages - 1
        if kind in ("F", FORWARD):
            up = self.placement.shape == "v" and chunk % 2 == 1
            return self.workload.transfer_forward[stage - 1 if up else stage][j]
        down = self.placement.shape == "v" and chunk % 2 == 1
        return self.workload.transfer_backward[min(stage + 1, last) if down else stage][j]


@st.composite
def steps(draw):
    name = draw(st.sampled_from(["bf", "bfw", "1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b"]))
    stages, chunks = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2]))
    schedule = by_name(name)
    placement = schedule.placement_for(stages, chunks)
    if name in ("bf", "bfw") and chunks == 2 and draw(st.booleans()):
        placement = Placement(stages, 2, "v")
    microbatches = draw(st.integers(1, 6))
    if name == "interleaved-1f1b":
        microbatches *= stages
    # Small integers, so that many things happen at the same instant, and some tasks take no time at all.
    times = st.integers(0, 3).map(float) if draw(st.booleans()) else st.floats(0.1, 3.0)
    table = st.lists(
        st.lists(times, min_size=microbatches, max_size=microbatches), min_size=stages, max_size=stages
    )
    workload = Workload(*(tuple(map(tuple, draw(table))) for _ in range(5)))
    limit = draw(st.none() | st.integers(1, 4))
    rules = StepRules(placement=placement, microbatches=microbatches, schedule=schedule, limit=limit)
    return name, rules, workload


@pytest.mark.slow(reason="thousands of simulated steps by a slow reference")
@settings(max_examples=300, deadline=None)
@given(steps())
def test_two_simulators_agree_to_the_bit(case):
    name, rules, workload = case
    placement, costs = rules.placement, Spelled(workload, rules.placement)
    policy = name
    if isinstance(rules.schedule, FixedOrder):
        policy = [
            [lettered(task) for task in rules.schedule.order(stage, placement, rules.microbatches)]
            for stage in range(placement.stages)
        ]
    expected = Reference(
        chain=[placement.place(v) for v in range(placement.last + 1)],
        microbatches=rules.microbatches,
        policy=policy,
        duration=costs.duration,
        transfer=costs.transfer,
        limit=float("inf") if rules.limit is None else rules.limit,
    ).run()
    trace = simulate(rules, WorkloadCosts(workload, placement))
    found = [[r for r in trace.parts[0].records() if r.stage == s] for s in range(placement.stages)]
    assert [[lettered(r.task) for r in own] for own in found] == [stage.order for stage in expected]
    assert [[(r.start, r.end) for r in own] for own in found] == [stage.times for stage in expected]
    assert trace.makespan == max(stage.free for stage in expected)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_links_can_only_delay_a_fixed_order(case):
    _, rules, workload = case
    if not isinstance(rules.schedule, FixedOrder):
        return  # a hint may gain by a delay
    costs = WorkloadCosts(workload, rules.placement)
    parallel, serial, synchronous = (
        simulate(rules, costs, links=links).makespan for links in ("parallel", "serial", "synchronous")
    )
    assert serial >= parallel * (1 - 1e-12)
    assert synchronous >= parallel * (1 - 1e-12)


def step(schedule, workload, **kwargs):
    placement = Placement(workload.stages)
    rules = StepRules(placement=placement, microbatches=workload.microbatches, schedule=by_name(schedule))
    return simulate(rules, WorkloadCosts(workload, placement), **kwargs)


def spans(trace, stage, kind):
    return [(r.start, r.end) for r in trace.stage_records(stage) if r.task.kind is kind]


class TestLead:
    """A second task is queued shortly before the running one ends, as the runtime's driver does."""

    def test_of_less_than_a_task(self):
        records = step("gpipe", constant(1, 3, 4.0, 0.0), lead=1.0).stage_records(0)[:3]
        assert [(r.dispatched, r.start, r.end) for r in records] == [(0, 0, 4), (3, 4, 8), (7, 8, 12)]

    def test_of_more_than_a_task_queues_one(self):
        records = step("gpipe", constant(1, 4, 1.0, 0.0), lead=9.0).stage_records(0)[:4]
        assert [(r.dispatched, r.start) for r in records] == [(0, 0), (0, 1), (1, 2), (2, 3)]

    def test_binds_a_hint_to_what_was_ready_then(self):
        """Stage 0 has queued F2 when B0 comes, half a second before the end of F1."""
        times = ((1.0, 2.0, 1.0), (1.0, 1.0, 1.0))
        zeros = ((0.0,) * 3,) * 2
        workload = Workload(times, ((0.25,) * 3,) * 2, ((0.25,) * 3,) * 2, zeros, zeros)
        orders = [" ".join(map(str, step("bf", workload, lead=lead).order(0))) for lead in (0.0, 1.0)]
        assert orders == ["F0 F1 B0 F2 B1 B2", "F0 F1 F2 B0 B1 B2"]


class TestLinks:
    """Two stages, forwards of 1 s and 5 s, and three microbatches."""

    def forwards(self, links, transfer):
        times = ((1.0,) * 3, (5.0,) * 3)
        zeros, transfers = ((0.0,) * 3,) * 2, ((transfer,) * 3,) * 2
        trace = step("gpipe", Workload(times, zeros, zeros, transfers, zeros), links=links)
        return [start for start, _ in spans(trace, 0, FORWARD)], [s for s, _ in spans(trace, 1, FORWARD)]

    def test_parallel(self):
        assert self.forwards("parallel", 7.0) == ([0, 1, 2], [8, 13, 18])

    def test_serial(self):
        assert self.forwards("serial", 7.0) == ([0, 1, 2], [8, 15, 22])

    def test_synchronous_senders_wait_for_busy_receivers(self):
        assert self.forwards("synchronous", 0.0) == ([0, 1, 6], [1, 6, 11])

    def test_synchronous_transfers_hold_both(self):
        assert self.forwards("synchronous", 2.0) == ([0, 3, 10], [3, 10, 17])

    def test_synchronous_stages_can_exchange(self):
        """Both end at 4, one with an activation for the other, one with a gradient: no deadlock."""
        trace = step("1f1b", constant(2, 3, 2.0, 1.0, 1.0), links="synchronous")
        assert len(trace.records) == 12

    def test_refused(self):
        with pytest.raises(ValueError, match="links='serialised'"):
            step("bf", constant(2, 2, 1.0), links="serialised")


def test_orders_that_cannot_end_are_named():
    order = read_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
    rules = StepRules(placement=order.placement, microbatches=2, schedule=order)
    with pytest.raises(RuntimeError, match=r"stage 0 waits for B0.*; stage 1 waits for F1"):
        simulate(rules, WorkloadCosts(constant(2, 2, 1.0), order.placement))


def test_budgets_in_bytes_bound_what_is_in_flight():
    placement = Placement(2)
    rules = StepRules(placement=placement, microbatches=4, schedule=by_name("f-priority"))
    costs = WorkloadCosts(constant(2, 4, 1.0), placement)
    order = [str(task) for task in simulate(rules, costs, budgets=[Budget([[2, 2, 2, 2]], 5), None]).order(0)]
    assert order == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]


def test_ready_times():
    records = {(r.stage, str(r.task)): r for r in step("bfw", constant(2, 2, 1.0, 2.0, 0.25)).records}
    assert records[0, "F1"].ready == 0
    assert records[1, "F0"].ready == 1.25  # its activation has arrived
    assert records[1, "I0"].ready == records[1, "F0"].dispatched  # the device is in order
    assert records[1, "W0"].ready == records[1, "I0"].dispatched
    assert records[0, "B0"].ready == records[1, "I0"].end + 0.25


FORMULAS = {
    # arXiv:2104.04473, section 2.2.1: (p - 1)(t_F + t_B)
    ("1f1b", 1): lambda p, f, i, w: (p - 1) * (f + i + w),
    # arXiv:2104.04473, section 2.2.2: (p - 1)(t_F + t_B) / v for v chunks
    ("interleaved-1f1b", 2): lambda p, f, i, w: (p - 1) * (f + i + w) / 2,
    ("interleaved-1f1b", 4): lambda p, f, i, w: (p - 1) * (f + i + w) / 4,
    # arXiv:2401.10241, table 2; there B is what is I here
    ("zb-h1", 1): lambda p, f, i, w: (p - 1) * (f + i - w),
    ("zb-h2", 1): lambda p, f, i, w: (p - 1) * (f + i - 2 * w),
}


def made(name, chunks, stages, microbatches, times):
    schedule = by_name(name)
    placement = schedule.placement_for(stages, chunks)
    tables = [((float(time),) * microbatches,) * stages for time in (*times, 0, 0)]
    rules = StepRules(placement=placement, microbatches=microbatches, schedule=schedule)
    return simulate(rules, WorkloadCosts(Workload(*tables), placement))


def bubble(trace):
    tasks = [trace.stage_records(stage) for stage in range(trace.stages)]
    return max(own[-1].end - own[0].start - sum(r.end - r.start for r in own) for own in tasks)


@pytest.mark.parametrize(("name", "chunks"), FORMULAS)
@pytest.mark.parametrize("stages", [2, 4, 7])
@pytest.mark.parametrize("times", [(4, 4, 4), (8, 8, 4), (8, 12, 8)])
def test_formula(name, chunks, stages, times):
    trace = made(name, chunks, stages, 4 * stages, times)
    assert bubble(trace) == FORMULAS[name, chunks](stages, *times)


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_a_v_has_none_if_all_parts_take_equally_long(stages):
    """arXiv:2405.15362, section 3: V-ZB, at t_F = t_I = t_W."""
    assert bubble(made("zb-v", 2, stages, 4 * stages, (4, 4, 4))) == 0


@pytest.mark.parametrize("stages", [2, 5, 8, 16])
def test_blocks_that_hold_less_have_bubbles(stages):
    """arXiv:2405.15362: more than V-ZB, less than 1F1B."""
    bubbles = {name: bubble(made(name, 2, stages, 4 * stages, (4, 4, 4))) / 4 for name in ("v-min", "v-half")}
    assert 0 < bubbles["v-min"] <= 2 * stages
    assert 0 < bubbles["v-half"] <= 1.8 * stages
    assert max(bubbles.values()) < FORMULAS["1f1b", 1](stages, 1, 1, 1)


@pytest.mark.parametrize("stages", [2, 5, 8])
def test_dual_pipe_in_a_v(stages):
    """At most DualPipe's published (p - 1)(F&B + B - 3 W) of a chunk, with F&B as F and then B."""
    f = w = 4 / 2
    b = 2 * w
    assert bubble(made("dualpipe-v", 2, stages, 4 * stages, (4, 4, 4))) <= (stages - 1) * (f + 2 * b - 3 * w)


@pytest.mark.parametrize(
    ("name", "chunks"), [*FORMULAS, ("zb-v", 2), ("v-half", 2), ("v-min", 2), ("v-zb", 2), ("dualpipe-v", 2)]
)
def test_the_bubble_does_not_grow_with_the_step(name, chunks):
    assert len({bubble(made(name, chunks, 4, microbatches, (4, 4, 4))) for microbatches in (8, 16, 40)}) == 1


@pytest.mark.parametrize("microbatches", [1, 4, 9])
def test_gpipe_lasts_as_long_as_1f1b(microbatches):
    """arXiv:2104.04473, section 2.2.1: the same bubble, at more memory."""
    spans = {made(name, 1, 4, microbatches, (4, 5, 3)).makespan for name in ("gpipe", "1f1b")}
    assert spans == {(microbatches + 3) * 12}
