"""Runs under SLURM over isolated nodes: `make test-slurm` prints rows of benchmarks/results/slurm.md."""

import os
import re

import pytest

from tests.nodes.nodes import Unavailable
from tests.nodes.slurm import Job, Slurm, check

pytestmark = [
    pytest.mark.skipif(not os.environ.get("RRFP_TEST_SLURM"), reason="some minutes each: make test-slurm"),
    pytest.mark.slow(reason="four processes that are started several times"),
]

STEPS = 200
EVERY = f"--config.steps={STEPS}", "--config.checkpoint.every_steps=10"
FOUR, FIVE = (("--ntasks-per-node=1", f"--ntasks={count}", f"--nodes={count}") for count in (4, 5))

MOST_SECONDS = float(os.environ.get("RRFP_TEST_SLURM_SECONDS", "60"))
"""Limit from a crash to the next step where there is a spare node; more on a busy machine."""


@pytest.fixture
def slurm(nodes_of, tmp_path):
    try:
        check()
    except Unavailable as why:
        pytest.skip(str(why))
    with nodes_of(6) as nodes:
        folder = tmp_path / "slurm"
        folder.mkdir()
        slurm = Slurm(nodes, folder)
        yield slurm
        slurm.close()


def show(line):
    print(f"\n| {line} |")


@pytest.fixture
def crashed(slurm, tmp_path, request):
    """A run on four nodes and a spare one, which goes on after the node of the parameter has crashed."""
    node = request.param
    job = Job(slurm, tmp_path, *FIVE, arguments=[*EVERY, "--spare-nodes=1"])
    job.wait_for_step(30)
    job.slurm.nodes.crash(node)
    seconds = job.seconds_to_next_step()
    show(f"crash of {node} at step 30, spare node | next step after {seconds:.0f} s")
    assert seconds < MOST_SECONDS
    return job


@pytest.mark.parametrize("crashed", ["n2"], indirect=True)
def test_a_crash_of_a_node(crashed):
    assert "rrfp: the run starts again on n0, n1, n3, n4" in crashed.log
    crashed.wait_for_step(STEPS - 1)
    crashed.wait_for_state("COMPLETED")
    assert crashed.metrics == [*range(STEPS)]


@pytest.mark.parametrize("crashed", ["n0"], indirect=True)
def test_a_crash_of_the_first_node(crashed):
    """It has the batch script, the coordinator and rank 0."""
    assert "rrfp: n0, which led the job, is silent: n1 leads it from here" in crashed.log
    crashed.wait_for_line("rrfp: the run ended with status 0;")
    assert crashed.shown("JobState") in ("COMPLETING", "CANCELLED")  # until SLURM notices that n0 is lost
    assert crashed.metrics == [*range(STEPS)]


def test_signals_the_time_limit_and_a_crash_without_a_spare_node(slurm, tmp_path):
    """Each requeues the job, which goes on; SLURM's hold of two minutes is ended by hand."""
    job = Job(slurm, tmp_path, *FOUR, "--time=60", arguments=EVERY)
    job.wait_for_step(30)
    slurm("scancel", "--signal=TERM", job.id)
    job.begin_now()
    job.wait_for_step(60)
    used = slurm("squeue", "--noheader", f"--jobs={job.id}", "--format=%M")  # m:ss
    slurm("scontrol", "update", f"JobId={job.id}", f"TimeLimit={int(used.split(':')[0]) + 2}")
    job.wait_for_line("SIGTERM: stopped after step", 2)
    slurm("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    job.begin_now()
    job.wait_for_line("resumes after", 2)
    job.wait_for_step(len(job.metrics) + 10)
    slurm.nodes.crash("n2")
    job.wait_for_line("rrfp: no spare node is left: the job is requeued")
    slurm.boot("n2")
    job.begin_now()
    job.wait_for_state("COMPLETED")
    assert job.metrics == [*range(STEPS)]
    saved = re.findall(r"^0: SIGTERM: stopped after step (\d+);", job.log, re.MULTILINE)
    assert len(saved) == 2, job.log
    show(
        f"TERM at step {saved[0]}, time limit at step {saved[1]}, then a crash of n2 without a spare node | "
        f"requeued three times; {STEPS} steps, each once"
    )
