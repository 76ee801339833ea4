"""What goes wrong on several machines is told by `rrfp doctor` before, and by the run."""

import json
import os
import sys

import pytest

from tests.nodes import ranks

LIMIT_SECONDS = 240.0
ON = ("n0", "n1")


@pytest.fixture
def step(nodes, tmp_path):
    """Starts a command as two tasks of a SLURM step, in a folder; n1 has a home of its own."""
    home = tmp_path / "home"
    home.mkdir()
    nodes.local("n1", home)
    own = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RRFP_", "SLURM_"))},
        "PYTHONPATH": str(ranks.ROOT),
        "JAX_PLATFORMS": "cpu",
        "HOME": str(home),
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "n[0-1]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }

    def start(*command):
        started = []
        for rank, node in enumerate(ON):
            place = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}
            with (tmp_path / f"rank-{rank}").open("wb") as out:
                task = nodes.start(
                    node,
                    sys.executable,
                    *command,
                    folder=tmp_path,
                    env={**own, **place, "SLURMD_NODENAME": node},
                    stdout=out,
                    stderr=out,
                )
                started.append(task)
        statuses = [task.wait(LIMIT_SECONDS) for task in started]
        return statuses, [ranks.said(tmp_path, rank) for rank in range(len(ON))]

    return start


def left(nodes, folder):
    """Files in the home of either node."""
    return [nodes.run(node, "find", folder / "home", "-type", "f").stdout for node in ON]


@pytest.mark.slow(reason="3 s: a start on two nodes; the test below has such a home")
def test_a_home_that_nodes_do_not_share_is_told(nodes, tmp_path, step):
    statuses, said = step("-c", "import rrfp_jax; rrfp_jax.join()")
    assert statuses == [1, 1], said  # of a program without a command of ours around it
    for text in said:
        assert ".rrfp/7-0-0.token: rank 0 writes the run's token there, but n1 has another" in text
    assert left(nodes, tmp_path) == ["", ""]


@pytest.mark.costly(reason="a start on two nodes")
def test_the_doctor_tells_what_differs_between_nodes(nodes, tmp_path, step):
    (tmp_path / "runs").mkdir()
    nodes.local("n1", tmp_path / "runs")
    (tmp_path / "code").mkdir()
    nodes.local("n1", tmp_path / "code")
    (tmp_path / "code" / "model.py").write_text("layers = 3\n")
    statuses, said = step("-m", "rrfp_jax", "doctor", "--json=found.json")
    assert statuses == [0, 1], said
    first = {own["subject"]: own for own in json.loads((tmp_path / "found.json").read_text())}
    other = {own["subject"]: own for own in json.loads((tmp_path / "found.json.1").read_text())}
    assert first["nodes"]["level"] == "warn" and "rank 0 (n0) and rank 1 (n1)" in first["nodes"]["said"]
    assert first["peers"]["level"] == other["peers"]["level"] == other["clock"]["level"] == "ok"
    for subject, what in (("folder", "is not seen on n1"), ("token", "~/.rrfp, in which rank 0")):
        assert other[subject]["level"] == "FAIL" and what in other[subject]["said"]
    assert left(nodes, tmp_path) == ["", ""]
