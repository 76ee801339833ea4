"""Devices that a host drives, which takes its time, and foresees what comes."""

from itertools import pairwise
from math import inf
from statistics import mean
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.foresight import KINDS, losses
from benchmarks.hosted import Host, HostSimulation
from rrfp_jax.core.events import ROOM, Room
from rrfp_jax.core.foresight import (
    DEEPEST,
    MARGIN,
    SECOND,
    SPREAD,
    expected_end,
    foreseen_from,
    ordered_from,
    room_from,
    rooms,
    spread_of,
)
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import TableCosts
from tests.support.small_step import B, F, rules
from tests.support.steps import steps

ROUND_TRIP = 0.2
HOW = pytest.mark.parametrize("dispatch", ["ready", "foreseen"])


def hosted(own, costs, **host):
    return HostSimulation(
        own, costs, costs, Host(**{"round_trip": ROUND_TRIP, "lead": 0.0, "varies": 0.0} | host)
    ).run()


@given(steps())
@settings(max_examples=100, deadline=None)
def test_without_latency_it_is_the_simulator(drawn):
    own, costs = drawn
    assert hosted(own, costs, round_trip=0.0).makespan == pytest.approx(simulate(own, costs).makespan)


@HOW
@given(drawn=steps())
@settings(max_examples=50, deadline=None)
def test_devices_run_in_order_what_is_there(dispatch, drawn):
    own, costs = drawn
    trace = hosted(own, costs, dispatch=dispatch)
    assert trace == hosted(own, costs, dispatch=dispatch), "it is the same again"
    for stage in range(own.placement.stages):
        records = trace.stage_records(stage)
        assert all(a.end <= b.start and a.dispatched <= b.dispatched for a, b in pairwise(records))
        assert all(r.start >= r.dispatched + ROUND_TRIP / 2 - 1e-9 for r in records)
        if isinstance(own.schedule, FixedOrder):
            assert [r.task for r in records] == own.stages[stage].order
    for sender, receiver in trace.transfers():
        took = costs.transfer(sender.stage, sender.task)
        assert receiver.start >= sender.end + (took if sender.stage != receiver.stage else 0.0) - 1e-9


def two_stages(late=0.0):
    """F 1 s on both stages, B 2 s; F1 comes as much later than it is expected."""
    durations = {(s, task(j)): float(n) for s in range(2) for task, n in ((F, 1), (B, 2)) for j in range(2)}
    return TableCosts(durations, {(0, F(1)): late})


def test_what_is_foreseen_waits_on_the_device_and_not_for_the_host():
    own, costs = rules(microbatches=2), two_stages()
    start = {how: hosted(own, costs, dispatch=how).stage_records(1)[0].start for how in ("ready", "foreseen")}
    assert start["foreseen"] == pytest.approx(1.0 + ROUND_TRIP / 2)  # F0 of the first stage was launched
    assert start["ready"] == pytest.approx(1.0 + 3 * ROUND_TRIP / 2)


def test_what_is_far_away_is_not_foreseen():
    own, costs, late = rules(microbatches=2), two_stages(), two_stages(late=5.0)
    trace = HostSimulation(own, late, late, Host(round_trip=ROUND_TRIP, dispatch="foreseen")).run()
    assert [r.task for r in trace.stage_records(1)] == [F(0), B(0), F(1), B(1)]
    deceived = HostSimulation(own, late, costs, Host(round_trip=ROUND_TRIP, dispatch="foreseen")).run()
    assert deceived.makespan <= trace.makespan + ROUND_TRIP


@given(*[st.floats(0.0, 10.0) for _ in range(3)], st.floats(0.01, 1.0))
def test_the_moment_solves_the_condition(now, arrival, end, round_trip):
    def holds(now):
        return now + MARGIN * (arrival - now) <= max(end, now) + round_trip

    at = foreseen_from(arrival, end, round_trip)
    assert holds(at + 1e-6) and not holds(at - 1e-6)


def test_what_is_unknown_is_never_foreseen():
    class Unknown:
        dispatched, usual, after = 1.0, None, None

    assert expected_end(SimpleNamespace(flights=[Unknown()], free=0.0), 2.0) == inf == foreseen_from(inf, 2.0)
    assert expected_end(SimpleNamespace(flights=[], free=3.0), 2.0) == 3.0


def test_a_queue_is_filled_by_time():
    flights = [SimpleNamespace(usual=1.0, varies=0.02)] * 8
    assert room_from([], 9.0) == -inf and room_from(flights, 9.0) == inf
    assert room_from(flights[:1], 9.0, ROUND_TRIP) == pytest.approx(9.0 - 0.04 - 5 * ROUND_TRIP)
    assert room_from(flights[:2], 9.0, ROUND_TRIP) == pytest.approx(9.0 - 2 * ROUND_TRIP)


def test_programs_may_end_early():
    flights = [SimpleNamespace(usual=usual, varies=varies) for usual, varies in ((2.0, 0.01), (1.0, 0.2))]
    assert spread_of([*flights, SimpleNamespace(usual=None, varies=0.0)]) == pytest.approx(0.02 + SPREAD)


def coming_from(late, end=0.0, microbatch=0, copy=0.0):
    """An input; its producer is on a device that is so late in the mean, and ends at 1 s, as is expected."""
    line = SimpleNamespace(late=late, free=0.0)
    flight = SimpleNamespace(end=end, dispatched=0.0, usual=1.0, after=None, line=line)
    line.flights = [flight]
    return F(microbatch).input, flight, copy


def test_what_may_come_late_goes_ahead_of_nothing_that_is_here():
    """Inputs are expected at 1 s, when the device's queue ends, too."""
    late = [(ROUND_TRIP, 0.0), (1.1 * ROUND_TRIP, 0.0), (1.0, 0.9)]
    coming = [coming_from(*own, j, 0.1 * bool(own[1])) for j, own in enumerate(late)]
    sure, possible, ended = (one for one, *_ in coming)
    foreseen = [room.foreseen for room in rooms(coming, 1.0, 0.95, ROUND_TRIP)[0]]
    assert foreseen == [[sure, ended], [sure, ended, possible]]
    assert rooms(coming[1:2], 1.0, 0.95, ROUND_TRIP) == ([ROOM, Room(foreseen=[possible])], inf)
    near = 1.0 - SECOND * ROUND_TRIP
    assert rooms(coming[1:2], 1.0, near - 0.01, ROUND_TRIP) == ([ROOM], near)


def test_what_is_near_is_foreseen_where_nothing_else_can_run():
    coming = [coming_from(0.0)]
    near, sure = 1.0 - SECOND * ROUND_TRIP, foreseen_from(1.0, 0.0, ROUND_TRIP)
    assert near < sure
    assert rooms(coming, 0.0, near - 0.01, ROUND_TRIP) == ([ROOM], near)
    assert rooms(coming, 0.0, near, ROUND_TRIP) == ([ROOM, Room(foreseen=[F(0).input])], inf)
    assert rooms(coming, 0.0, sure, ROUND_TRIP) == ([Room(foreseen=[F(0).input])], inf)
    # Not while another stage of the device can run.
    assert rooms(coming, 0.0, near, ROUND_TRIP, others=True) == ([ROOM], sure)


@pytest.mark.parametrize(
    "usual, expected",
    [([], -inf), ([0.02, 0.02], -inf), ([0.03, 0.03], inf), ([1e-6] * DEEPEST, inf), ([None], inf)],
)
def test_a_fixed_orders_queue_is_filled_by_work(usual, expected):
    assert ordered_from([SimpleNamespace(usual=own) for own in usual]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_foresight_gains(kind):
    found = losses((kind, (4, 8), "bf", 0.1), range(2))
    assert mean(found["foreseen"]) < mean(found["ready"])
