"""The SLURM file with a stand-in for `srun`; launch/slurm.md says what was run on a SLURM."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.test_processes import REPOSITORY, SCRIPTS, environment

FILE = REPOSITORY / "launch" / "slurm.sbatch"

SBATCH_OPTIONS = {
    "ntasks",
    "gpus-per-task",
    "signal",
    "nodes",
    "time",
    "requeue",
    "distribution",
    "open-mode",
}
"""Some of those that `sbatch --help` lists. It refuses a file with any other, such as srun's own."""

LIMIT_SECONDS = 300.0

STOPPED = "SIGTERM: stopped after step 6; resumes from runs/a.checkpoints/7"


def test_every_option_is_one_of_sbatch():
    options = re.findall(r"^#SBATCH --([\w-]+)", FILE.read_text(), re.MULTILINE)
    assert options and set(options) <= SBATCH_OPTIONS


@pytest.fixture
def job(tmp_path):
    """Start the file as a batch script of SLURM; what `srun` and `scontrol` do is given as shell commands."""
    started = []

    def start(*arguments, srun, scontrol='echo "$@" >> scontrol.txt'):
        stubs = {"srun": srun, "scontrol": scontrol}
        (tmp_path / "bin").mkdir(exist_ok=True)
        for name, text in stubs.items():
            stub = tmp_path / "bin" / name
            stub.write_text(f"#!/bin/bash\n{text}\n")
            stub.chmod(0o755)
        own = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "trial", "SLURM_NTASKS": "4"}
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        proxy = {"http_proxy": "http://127.0.0.1:9"}  # nobody is there
        script = subprocess.Popen(
            ["bash", FILE, *arguments],
            cwd=tmp_path,
            env={**environment(), **own, **proxy, "PATH": path},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(script)
        return script

    start.log = tmp_path / f"trial-{os.getpid()}.log"
    start.requeued = tmp_path / "scontrol.txt"
    yield start
    for script in started:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()
        script.stdout.close()


def test_arguments_reach_every_task(job):
    arguments = ["--config=a file.py", "--config.steps=3"]
    said, _ = job(*arguments, srun='printf "%s\\n" "$@"').communicate(timeout=LIMIT_SECONDS)
    given = said.splitlines()
    assert given[-5:] == ["python", "-m", "rrfp_jax", "train", *arguments]
    assert {"--kill-on-bad-exit=1", "--label", f"--output={job.log.name}"} <= set(given[:-5])


@pytest.mark.parametrize("before", ["", f"0: {STOPPED}\n"], ids=["first-start", "later-start"])
@pytest.mark.parametrize(
    ("srun", "status", "requeued"),
    [
        ("echo '1: step 6'", 0, False),
        (f"echo '0: {STOPPED}' >> trial-$SLURM_JOB_ID.log", 0, True),
        (f"echo ' 0: {STOPPED}' >> trial-$SLURM_JOB_ID.log; exit 9", 9, False),
        ("echo '0: SIGTERM: stopped after step 6; nothing is saved' >> trial-$SLURM_JOB_ID.log", 0, False),
    ],
    ids=["ended", "stopped", "failed", "nothing-saved"],
)
def test_only_a_run_that_saved_itself_is_requeued(job, before, srun, status, requeued):
    if before:
        job.log.write_text(before)
    assert job(srun=srun).wait(LIMIT_SECONDS) == status
    assert job.requeued.exists() == requeued


def test_a_job_that_slurm_does_not_requeue_has_ended_well(job):
    srun = f"echo '0: {STOPPED}' >> trial-$SLURM_JOB_ID.log"
    assert job(srun=srun, scontrol="exit 1").wait(LIMIT_SECONDS) == 0


def test_a_requeued_run_knows_that_it_is(job, monkeypatch):
    """Or it would begin anew if it was told not to resume."""
    assert job(srun="echo $RRFP_RESTARTS").communicate(timeout=LIMIT_SECONDS)[0] == "0\n"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert job(srun="echo $RRFP_RESTARTS").communicate(timeout=LIMIT_SECONDS)[0] == "2\n"


def wait_for(text, log, script):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (log.exists() and text in log.read_text()):
        assert script.poll() is None and time.monotonic() < deadline, log.exists() and log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_job_on_two_nodes_is_stopped_requeued_and_goes_on(job, tmp_path):
    """Four tasks on two addresses, with a proxy in their environment that must not be asked."""
    arguments = [f"--config={SCRIPTS}/toy_run.py", "--config.checkpoint.every_steps=100000"]
    srun = f'echo $$ > srun.pid; exec python {REPOSITORY}/tests/support/stub_srun.py "$@"'
    script = job(*arguments, srun=srun)
    wait_for("0: step     3", job.log, script)
    os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
    assert script.wait(LIMIT_SECONDS) == 0, job.log.read_text()
    done = int(re.search(r"0: SIGTERM: stopped after step (\d+); resumes from", job.log.read_text())[1]) + 1
    assert job.requeued.read_text() == f"requeue {os.getpid()}\n"
    script = job(*arguments, f"--config.steps={done + 2}", srun=srun)
    assert script.wait(LIMIT_SECONDS) == 0, job.log.read_text()
    assert f"0: resumes after {done} steps" in job.log.read_text()
    assert "proxy" not in job.log.read_text()
    assert job.requeued.read_text().count("requeue") == 1
    lines = (tmp_path / "runs" / "toy" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(done + 2))
