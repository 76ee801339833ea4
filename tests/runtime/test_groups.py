"""Which processes share a stage, and that they dispatch one order."""

from types import SimpleNamespace

import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Task
from rrfp_jax.errors import Disagreement
from rrfp_jax.runtime.mesh.topology import Layout
from rrfp_jax.runtime.run.consensus import OrderHash, check_orders
from rrfp_jax.runtime.run.world import World


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
