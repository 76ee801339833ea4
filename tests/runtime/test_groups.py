"""Which processes share a stage, that they dispatch one order, and what carries their messages."""

import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Task
from rrfp_jax.errors import Disagreement, TrainingError
from rrfp_jax.runtime.mesh.topology import Layout
from rrfp_jax.runtime.run import consensus
from rrfp_jax.runtime.run.consensus import (
    BLOCK,
    LOOK_SECONDS,
    OrderHash,
    SocketCarrier,
    StoreCarrier,
    check_orders,
)
from rrfp_jax.runtime.run.world import Compared, World
from tests.support.mailboxes import all_joined


@pytest.mark.parametrize(
    ("pp", "tp", "processes", "groups"),
    [
        (4, 1, 2, [[0], [0], [1], [1]]),
        (2, 2, 1, [[0], [0]]),
        (2, 2, 2, [[0], [1]]),
        (2, 2, 4, [[0, 1], [2, 3]]),
        (2, 4, 4, [[0, 1], [2, 3]]),
        (1, 2, 2, [[0, 1]]),
        (4, 2, 2, [[0], [0], [1], [1]]),
        (3, 4, 12, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_groups(pp, tp, processes, groups):
    assert rrfp.Mesh(pp=pp, tp=tp).groups(processes) == groups


@pytest.mark.parametrize(("pp", "tp", "processes"), [(4, 1, 3), (2, 2, 3), (3, 4, 2), (2, 2, 8)])
def test_devices_that_cannot_be_shared_out_are_refused(pp, tp, processes):
    said = rf"Mesh\(pp={pp}.*on {processes} processes.*so start {pp * tp},? .*or 1 processes"
    with pytest.raises(rrfp.UsageError, match=said):
        rrfp.Mesh(pp=pp, tp=tp).groups(processes)


def test_a_mesh_of_one_device_takes_one_process():
    with pytest.raises(rrfp.UsageError, match=r"so start 1 processes$"):
        rrfp.Mesh().groups(2)


@pytest.mark.parametrize("wrong", [{"tp": 0}, {"dp": 0}, {"pp": True}, {"chunks": True}, {"dp": 1.5}])
def test_sizes_are_whole_numbers(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(rrfp.UsageError, match=f"{name}={value}"):
        rrfp.Mesh(**wrong)


@pytest.mark.parametrize(
    ("pp", "tp", "dp", "processes", "groups"),
    [
        (2, 1, 2, 4, [[0], [2], [1], [3]]),
        (2, 2, 2, 8, [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (2, 2, 2, 2, [[0], [1], [0], [1]]),
        (2, 2, 2, 4, [[0], [2], [1], [3]]),
    ],
)
def test_replicas_of_a_stage_are_neighbours(pp, tp, dp, processes, groups):
    """By stage replica: the stages of replica 0, then those of replica 1."""
    assert rrfp.Mesh(pp=pp, tp=tp, dp=dp).groups(processes) == groups


def test_processes_are_named_by_stages_and_replicas():
    mesh = rrfp.Mesh(pp=2, dp=3)
    named = [mesh._name(stage_replicas) for stage_replicas in ([0], [2], [0, 2, 4], [0, 1], [4, 1])]
    assert named == [
        "stage 0 of replica 0",
        "stage 0 of replica 1",
        "stage 0 of replicas 0-2",
        "stages 0-1 of replica 0",
        "stage 0 of replica 2, stage 1 of replica 0",
    ]


def test_messages_go_to_the_like_in_the_other_groups():
    layout = Layout(world=World(3, 4), widths=[2, 2], groups=[[0, 1], [2, 3]], stage_meshes={1: None})
    assert (layout.member, layout.group, layout.receivers) == (1, [2, 3], [[1], [3]])


@pytest.mark.parametrize(
    ("stages", "groups", "crossed"),
    [
        (2, [[0], [1], [2], [3]], False),  # a stage a process
        (2, [[0], [1], [0], [1]], False),  # all replicas of a stage on one
        (2, [[0], [0], [1], [1]], True),
        (3, [[0], [0], [1], [0], [1], [1]], True),
    ],
)
def test_stages_whose_sums_may_wait_for_each_other(stages, groups, crossed):
    layout = Layout(world=World(0, 4), widths=[1] * stages, groups=groups, stage_meshes={0: None})
    assert layout.crossed == crossed


def test_where_stages_differ_each_rank_gets_its_copy_from_one():
    groups = [[0, 1], [2], [3, 4, 5, 6]]
    stage_meshes = [0, 0, 1, 2, 2, 2, 2]  # stage replicas by rank
    sent = [
        Layout(
            world=World(rank, 7), widths=[2, 1, 4], groups=groups, stage_meshes={stage_replica: None}
        ).receivers
        for rank, stage_replica in enumerate(stage_meshes)
    ]
    assert [of[1] for of in sent[:2]] == [[2], []]  # the second has nothing to send
    assert [of[0] for of in sent[2:3]] == [[0, 1]]
    assert [of[2] for of in sent[2:3]] == [[3, 4, 5, 6]]
    assert [of[1] for of in sent[3:]] == [[2], [], [], []]


@pytest.mark.parametrize(
    ("tp", "dp", "processes", "groups"),
    [
        ((2, 1), 1, 3, [[0, 1], [2]]),
        ((2, 1, 1), 1, 2, [[0], [1], [1]]),
        ((4, 2, 2), 1, 4, [[0, 1], [2], [3]]),
        ((4, 1, 1, 2), 1, 4, [[0, 1], [2], [2], [3]]),
        ((2, 1), 2, 6, [[0, 1], [4], [2, 3], [5]]),
        ((2, 1), 2, 3, [[0], [2], [1], [2]]),
        ((2, 1), 2, 2, None),
        ((2, 1), 1, 2, None),
    ],
)
def test_stages_may_have_different_numbers_of_devices(tp, dp, processes, groups):
    mesh = rrfp.Mesh(pp=len(tp), tp=tp, dp=dp)
    if groups is None:
        with pytest.raises(rrfp.UsageError, match=f"on {processes} .* {mesh.devices},? .*or 1 processes"):
            mesh.groups(processes)
    else:
        assert mesh.groups(processes) == groups


def test_unknown_terms_are_refused():
    for wrong in ({"agreement": "pigeon"}, {"protocol": "dictator"}):
        with pytest.raises(rrfp.UsageError, match=next(iter(wrong.values()))):
            rrfp.Settings(**wrong)


def test_ranks_of_a_stage_that_dispatched_different_tasks_are_named():
    """Rank 0 has a stage to itself; ranks 1 and 2 share one, and differ in the second step."""
    alike, other = [Task(FORWARD, 0, 0), Task(BACKWARD, 0, 0)], [Task(FORWARD, 0, 1), Task(BACKWARD, 0, 0)]
    orders = [OrderHash() for _ in range(3)]
    for step, taken in enumerate([[other, alike, alike], [other, alike, other]]):
        hashes = [order.add(tasks) for order, tasks in zip(orders, taken, strict=True)]
        told = [list(map(str, tasks)) for tasks in taken]
        world = SimpleNamespace(gather=lambda what, value, told=told: told, describe="rank {}".format)
        if step == 0:
            check_orders(world, [[0], [1, 2]], hashes, orders[1], step)
    said = "rank 1 and rank 2 dispatched different tasks as number 3, in step 1: the first F0, the second F1;"
    with pytest.raises(Disagreement, match=said):
        check_orders(world, [[0], [1, 2]], hashes, orders[1], 1)


def test_ranks_that_call_different_methods_of_a_trainer_are_told_what_each_is_at():
    world = World(0, 2)
    world._on_compared(0, Compared(0, "the plan of evaluate step 0", {"": "b414"}))
    said = "rank 0 is at the plan of evaluate step 0, rank 1 at the plan of train step 0: .* same calls"
    with pytest.raises(Disagreement, match=said):
        world._on_compared(1, Compared(0, "the plan of train step 0", {"": "b414"}))


def test_a_rank_that_is_past_a_gather_is_named_at_once(all_closed):
    first, second = (World(rank, 2, box) for rank, box in enumerate(all_joined(2)))
    second.agree("the plan of train step 2", "b414")
    said = "rank 0 is at the steps of checkpoints, rank 1 at the plan of train step 2: .* same calls"
    with pytest.raises(Disagreement, match=said):
        first.gather("the steps of checkpoints", [], 10.0)


RANKS = 3

SILENCE = 0.3


class FakeStore:
    """A key-value store in this process; unless `awake` it answers nobody, `broken` it refuses everybody."""

    def __init__(self):
        self.keys, self.changed = {}, threading.Condition()
        self.awake, self.broken = threading.Event(), False
        self.awake.set()

    def key_value_set_bytes(self, key, value):
        self._answer()
        with self.changed:
            assert key not in self.keys
            self.keys[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.keys or self.broken, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            if self.broken:
                raise RuntimeError("UNAVAILABLE: it is gone")
            return self.keys[key]

    def key_value_dir_get_bytes(self, key):
        self._answer()
        return []

    def key_value_delete(self, key):
        with self.changed:
            self.keys = {k: v for k, v in self.keys.items() if not k.startswith(f"{key}/")}

    def _answer(self):
        self.awake.wait()
        if self.broken:
            raise RuntimeError("UNAVAILABLE: it is gone")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Threads that are told to end do so soon."""
    monkeypatch.setattr(consensus, "POLL_SECONDS", 0.2)


def partners(rank):
    """As of a leader and its followers."""
    return [0] if rank else list(range(1, RANKS))


def store_carriers(stack, store, silence=5.0):
    rung = [threading.Event() for _ in range(RANKS)]
    made = [StoreCarrier(store, "n", r, partners(r), rung[r].set, silence) for r in range(RANKS)]
    for carrier in made:
        stack.callback(carrier.leave)
        stack.enter_context(carrier)
    stack.callback(store.awake.set)
    return made, rung


@pytest.fixture(params=["kv", "socket"])
def carriers(request, all_closed):
    """One a rank: rank 0's partners are all others, theirs is rank 0."""
    with ExitStack() as stack:
        if request.param == "kv":
            yield store_carriers(stack, FakeStore())[0]
        else:
            worlds = [World(r, RANKS, box) for r, box in enumerate(all_joined(RANKS))]
            yield [SocketCarrier(world, partners(world.rank)) for world in worlds]


def come(carrier, count):
    """The next messages, so many."""
    found, deadline = [], time.monotonic() + 10.0
    while len(found) < count and time.monotonic() < deadline:
        found += [list(message) for message in carrier.poll()]
        time.sleep(0.005)
    return found


class TestConformance:
    def test_all_partners_hear_everything_once_and_in_order(self, carriers):
        sent = [[7, 0.25, 1, number, [0, 0, number]] for number in range(2 * BLOCK)]
        for message in sent:
            carriers[0].post(message)
        for follower in carriers[1:]:
            assert come(follower, len(sent)) == sent
        assert [carrier.poll() for carrier in carriers] == [[]] * RANKS

    def test_nobody_else_does(self, carriers):
        carriers[1].post([1, None])
        assert come(carriers[0], 1) == [[1, None]]
        carriers[0].post([2])  # whatever came before would have come by now
        assert come(carriers[2], 1) == [[2]]

    def test_a_sender_that_is_ahead_is_heard_later(self, carriers):
        with carriers[0]:
            carriers[0].post([1])
        carriers[0].post([2])
        with carriers[1]:
            assert come(carriers[1], 2) == [[1], [2]]

    def test_what_all_have_need_not_be_kept(self, carriers):
        for number in range(3):
            carriers[0].post([number])
            for follower in carriers[1:]:
                come(follower, 1)
            carriers[0].forget(min((f.heard().get(0, 0) for f in carriers[1:]), default=0))
        carriers[0].post(["last"])
        assert [come(follower, 1) for follower in carriers[1:]] == [[["last"]]] * 2


class TestStore:
    def test_a_message_wakes_the_driver(self):
        with ExitStack() as stack:
            made, rung = store_carriers(stack, FakeStore())
            made[0].post([1])
            assert all(event.wait(5.0) for event in rung[1:]) and not rung[0].is_set()

    def test_what_was_read_by_all_is_deleted_by_the_block(self):
        store = FakeStore()
        with ExitStack() as stack:
            made, _ = store_carriers(stack, store)
            for number in range(BLOCK + 2):
                made[0].post([number])
                come(made[1], 1)
            come(made[2], BLOCK + 2)
            assert made[1].heard() == {0: BLOCK + 2} and len(store.keys) == BLOCK + 2
            made[0].forget(BLOCK - 1)
            made[0].forget(BLOCK + 1)
            made[0].post(["after"])
            assert come(made[1], 1) == [["after"]]
            assert len(store.keys) == 3

    def test_a_silent_store_is_given_up(self):
        store = FakeStore()
        with ExitStack() as stack:
            made, _ = store_carriers(stack, store, silence=0.1)
            store.awake.clear()
            made[0].post([1])
            with pytest.raises(TrainingError, match=r"store.* has not answered for 0.1 s"):
                come(made[0], 1)

    def test_so_it_is_by_who_only_listens(self):
        store = FakeStore()
        with ExitStack() as stack:
            made, _ = store_carriers(stack, store, silence=0.1)
            store.awake.clear()
            with pytest.raises(TrainingError, match=r"store.* has not answered for 0.1 s"):
                come(made[1], 1)

    def test_a_broken_store_is_told(self):
        store = FakeStore()
        with ExitStack() as stack:
            made, _ = store_carriers(stack, store)
            store.broken = True
            made[0].post([1])
            with pytest.raises(TrainingError, match=r"store.* failed: UNAVAILABLE: it is gone"):
                come(made[0], 1)

    def test_who_stood_still_itself_does_not_judge(self):
        store = FakeStore()
        with ExitStack() as stack:
            made, _ = store_carriers(stack, store, silence=SILENCE)
            store.awake.clear()
            made[0].post([1])
            time.sleep(LOOK_SECONDS + 2 * SILENCE)  # as in Ctrl-Z
            assert made[0].poll() == []
            with pytest.raises(TrainingError, match="has not answered"):
                come(made[0], 1)

    def test_closed_it_ends_its_threads_and_leaves_nothing_behind(self):
        store, before = FakeStore(), threading.active_count()
        with ExitStack() as stack:
            made, _ = store_carriers(stack, store)
            for carrier in made:
                carrier.post([1])
            come(made[0], RANKS - 1)
            for carrier in made:
                carrier.close()
                carrier.close()
            deadline = time.monotonic() + 5.0
            while (store.keys or threading.active_count() > before) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not store.keys and threading.active_count() == before
