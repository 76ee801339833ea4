"""What a process makes of SLURM's variables, its GPUs and proxies; variables as SLURM 22.05 sets them."""

import pytest

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.run.place import (
    MEMORY,
    Address,
    SlurmStep,
    directly,
    first_host,
    proxy_for,
    step_gpus,
    tasks_per_node,
)

JOB = {
    "SLURM_JOB_ID": "6",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
"""Of a job of four tasks on two nodes, in whatever shell."""

BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
"""In the batch script."""

STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
LAST = {**STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}


def test_a_task_knows_its_place():
    assert SlurmStep.of(LAST) == SlurmStep("6-0-0", Address("n1", 61446), 4, 3, 1, 1, (2, 2))
    assert SlurmStep.of(LAST).tasks_here == 2


def test_a_step_on_one_node_needs_no_port_that_others_reach():
    one = {**LAST, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    assert str(SlurmStep.of(one).coordinator) == "127.0.0.1:61446"
    assert str(SlurmStep.of({**one, "SLURM_STEP_NUM_NODES": "2"}).coordinator) == "n1:61446"


def test_every_attempt_of_a_step_has_a_name_of_its_own():
    steps = [LAST, {**LAST, "SLURM_STEP_ID": "1"}, {**LAST, "SLURM_RESTART_COUNT": "1"}]
    assert len({SlurmStep.of(step).name for step in steps}) == 3


ALONE = {
    "no SLURM": {},
    "salloc": JOB,
    "batch script": BATCH,
    "srun --pty -n1 in an allocation of four": {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
    "ssh session that inherits half of a step": {**JOB, "SLURM_STEP_NODELIST": "n[1-2]"},
}


@pytest.mark.parametrize("where", ALONE)
def test_whoever_is_no_task_of_several_is_alone(where):
    assert SlurmStep.of(ALONE[where]) is None


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_LOCALID"])
@pytest.mark.parametrize("value", [None, "x"])
def test_half_of_a_step_with_several_tasks_is_refused(name, value):
    environment = {**LAST, name: value} if value else {k: v for k, v in LAST.items() if k != name}
    with pytest.raises(UsageError, match=f"{name} is {value or 'missing'}; start ranks with srun"):
        SlurmStep.of(environment)


def test_ports():
    ports = [SlurmStep.of({**STEP, "SLURM_STEP_ID": step}).coordinator for step in ("0", "1")]
    assert len(set(ports)) == 2
    assert str(SlurmStep.of({**STEP, "JAX_COORDINATOR_PORT": "7000"}).coordinator) == "n1:7000"
    assert str(SlurmStep.of({**STEP, "SLURM_JOB_ID": "4095"}).coordinator) == "n1:65535"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("a,b", "a"),
        ("n[001-003]", "n001"),
        ("n[1,4-5],other", "n1"),
        ("rack[2-3]n[07-10]", "rack2n07"),
        ("n[1-2]-ib", "n1-ib"),
    ],
)
def test_the_first_of_the_nodes(nodes, first):
    assert first_host(nodes) == first


def test_tasks_per_node():
    assert tasks_per_node("2(x3),1") == (2, 2, 2, 1)
    assert tasks_per_node("4") == (4,)
    with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE=two"):
        tasks_per_node("two")


def gpus(visible, here, step=LAST, **more):
    environment = {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": here, **more}
    return step_gpus({k: v for k, v in environment.items() if v is not None}, SlurmStep.of(step))


def test_a_task_that_srun_has_bound_to_its_gpu_keeps_it():
    """Such as local task 1, with GPU 1 of two, or with GPU 0 where it can see no other."""
    assert gpus("1", "2") == gpus("0", "2") == {}
    assert gpus("2,3", "4") == {}


def test_tasks_that_see_all_gpus_of_their_node_share_them_out():
    assert gpus("0,1", "2") == {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpus("0,1", "2", STEP) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert gpus("4,5,6,7", None) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert gpus("0", "1") == {"CUDA_VISIBLE_DEVICES": "0", MEMORY: "0.450"}


PROXY = {"http_proxy": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("more", "proxy"),
    [
        ({}, "http_proxy"),
        ({"https_proxy": "http://proxy:1"}, "https_proxy"),
        ({"no_proxy": "other"}, "http_proxy"),
        ({"no_proxy": "other, n1"}, None),
        ({"no_proxy": ".cluster"}, "http_proxy"),
        ({"no_proxy": "*"}, "http_proxy"),
        ({"NO_PROXY": "n1"}, "http_proxy"),
        ({"no_grpc_proxy": "other", "no_proxy": "n1"}, "http_proxy"),
        ({"http_proxy": ""}, None),
    ],
)
def test_the_proxy_that_grpc_would_ask(more, proxy):
    assert proxy_for("n1", {**PROXY, **more}) == proxy


def test_a_network_without_proxy():
    assert proxy_for("127.0.0.2", {**PROXY, "no_proxy": "127.0.0.0/8"}) is None
    assert proxy_for("10.0.0.2", {**PROXY, "no_proxy": "127.0.0.0/8"}) == "http_proxy"


def test_the_coordinator_is_called_directly():
    assert directly("n1", {}) == {}
    assert directly("n1", {**PROXY, "no_proxy": "a,b"}) == {"no_grpc_proxy": "a,b,n1"}
    assert proxy_for("n1", PROXY | directly("n1", PROXY)) is None
