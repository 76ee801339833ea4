"""Groups in virtual time: messages that cost nothing expose nothing, and a store can do only so much."""

import pytest

from benchmarks.studies.scale.carriers import Processors, Socket, Store
from benchmarks.studies.scale.costs import MessageCosts
from benchmarks.studies.scale.groups import Grouped, simulate
from rrfp_jax.core.group import ArrivalReport, Decision, recipients
from rrfp_jax.core.tasks import FORWARD, Task
from rrfp_jax.sim.engine import EventQueue

NOTHING = {"store_ways": [0.0], "socket_ways": [0.0], "set": 0, "get": 0, "driver": 0, "post": 0, "take": 0}

FREE = MessageCosts(**NOTHING)


def costs(**kwargs):
    return MessageCosts(**{**NOTHING, "store_ways": [1e-3], "socket_ways": [1e-4], **kwargs})


def steps(carrier, costs, count=3, **kwargs):
    run = Grouped(**{"stages": 2, "tp": 4, "task_seconds": 0.01, **kwargs})
    return simulate(run, carrier, costs, 0, count)


def posted(carrier, costs, size, *posts):
    """When (s) messages are heard, by receiver, after posts of (time, sender, message)."""
    heard, agenda = {}, EventQueue()

    def deliver(now, number, sent):
        heard.setdefault(number, []).append(now)

    made = carrier(agenda, size, costs, Processors(costs.servers), 0, deliver)
    for at, sender, message in posts:
        agenda.add(at, made.post, sender, message)
    list(agenda)
    return heard, made


DECISIONS = [Decision(j, Task(FORWARD, 0, j)) for j in range(3)]


class TestCarriers:
    def test_by_socket_posting_keeps_the_sender_and_taking_the_receiver(self):
        heard, _ = posted(
            Socket, costs(post=2.0, take=5.0), 3, (0.0, 0, DECISIONS[0]), (0.0, 0, DECISIONS[1])
        )
        assert heard == {1: [7.0001, 12.0001], 2: [9.0001, 14.0001]}

    def test_by_the_store_a_message_takes_its_way_where_nobody_else_calls(self):
        heard, store = posted(Store, costs(set=2e-4, get=1e-4), 2, (0.0, 0, DECISIONS[0]))
        assert heard == {1: [pytest.approx(1e-3)]}
        assert store.calls == 3  # writing, reading, asking for the next

    def test_what_collects_while_a_batch_is_written_makes_one_batch(self):
        apart = [(at, 0, decision) for at, decision in zip((0.0, 1e-4, 2e-4), DECISIONS, strict=True)]
        heard, store = posted(Store, costs(), 2, *apart)
        assert len(heard[1]) == 3 and heard[1][1] == heard[1][2] and store.calls == 5

    def test_all_groups_queue_up_at_one_server(self):
        reports = [(0.0, sender, ArrivalReport(1, DECISIONS[0].task)) for sender in (1, 3, 5, 7)]
        heard, _ = posted(Store, costs(store_ways=[0.0], set=1.0), 2, *reports)
        assert sorted(at for times in heard.values() for at in times) == [1.0, 2.0, 3.0, 4.0]
        heard, _ = posted(Store, costs(store_ways=[0.0], set=1.0, servers=2), 2, *reports)
        assert sorted(at for times in heard.values() for at in times) == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("carrier", [Socket, Store])
@pytest.mark.parametrize("protocol", ["leader", "unanimous"])
@pytest.mark.parametrize("held", [True, False])
def test_messages_that_cost_nothing_leave_the_step_as_it_is_without_groups(carrier, protocol, held):
    alone = steps(Socket, FREE, tp=1)
    for step, expected in zip(steps(carrier, FREE, protocol=protocol, held=held), alone, strict=True):
        assert step.seconds == pytest.approx(expected.seconds)
        assert sum(step.exposed) == pytest.approx(0.0, abs=1e-9)


def test_a_way_longer_than_a_task_is_exposed_more_than_a_short_one():
    short, long = (steps(Socket, costs(socket_ways=[way]))[-1] for way in (1e-4, 2e-2))
    assert sum(short.exposed) < 0.1 * sum(long.exposed) and short.seconds < long.seconds


def test_decisions_are_made_as_far_ahead_as_messages_took():
    first, *others = steps(Store, costs())
    assert first.lead == pytest.approx(2e-3) and [step.lead for step in others] == pytest.approx([1e-3] * 2)


def test_calls_of_the_store_per_task():
    tp, step = 4, steps(Store, costs(), schedule="bf")[-1]
    # A decision is written once and read by the others; half of the tasks have inputs that these report.
    expected = tp + 2 * (tp - 1) / 2
    assert step.calls / step.tasks == pytest.approx(expected, rel=0.05)


def test_a_store_that_is_full_sets_the_pace():
    one, two = (steps(Store, costs(set=8e-3, get=4e-3, servers=servers))[-1] for servers in (1, 2))
    assert one.seconds > 1.5 * two.seconds > 2 * steps(Store, costs())[-1].seconds


def test_a_run_is_the_same_again():
    ways = costs(store_ways=[1e-3, 2e-3, 9e-3])
    assert steps(Store, ways, skew=5e-3, replicas=2) == steps(Store, ways, skew=5e-3, replicas=2)


def test_recipients_of_a_sender_are_always_the_same():
    """As the store takes it: a reader for each, from the beginning."""
    assert {tuple(recipients(d, 3)) for d in DECISIONS} == {(1, 2)}


def test_a_driver_at_work_hears_nothing():
    quick, busy = (steps(Socket, costs(driver=driver))[-1] for driver in (0.0, 2e-2))
    assert sum(busy.exposed) > 2 * sum(quick.exposed) and busy.lead > quick.lead


def test_drivers_take_turns_where_processors_are_shared():
    own, shared = (
        steps(Socket, costs(driver=2e-3, servers=1, shared=shared))[-1] for shared in (False, True)
    )
    assert shared.seconds > own.seconds
