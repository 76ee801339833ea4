"""What a process makes of SLURM's variables, and the SLURM file with a stand-in for `srun`.

benchmarks/results/slurm.md says what was run on a SLURM.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rrfp_jax.commands import slurm
from rrfp_jax.commands.slurm import Job, JobLeader, Lead, LeadFolder, Superseded
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
from tests.train.test_processes import REPOSITORY, SCRIPTS, environment

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


FILE = REPOSITORY / "launch" / "slurm.sbatch"

SBATCH_OPTIONS = {
    "ntasks",
    "gpus-per-task",
    "signal",
    "nodes",
    "time",
    "requeue",
    "no-kill",
    "distribution",
    "open-mode",
}
"""Some of those that `sbatch --help` lists. It refuses a file with any other, such as srun's own."""

LIMIT_SECONDS = 300.0

STOPPED = "SIGTERM: stopped after step 6; resumes from runs/a.checkpoints/7"


def test_every_option_is_one_of_sbatch():
    options = re.findall(r"^#SBATCH --([\w-]+)", FILE.read_text(), re.MULTILINE)
    assert options and set(options) <= SBATCH_OPTIONS


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_job_whose_folder_takes_no_log_is_refused(monkeypatch, tmp_path, nodes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(slurm.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="n1 n2"))
    for name, value in {**JOB, "SLURM_JOB_NUM_NODES": nodes, "SLURM_JOB_NAME": "a"}.items():
        monkeypatch.setenv(name, value)
    if nodes == "1":
        monkeypatch.setenv("SLURM_JOB_NAME", "a" * 300)
    else:
        (tmp_path / ".a-6-0.leader").touch()  # which `remove` leaves
    with pytest.raises(UsageError, match=r"a-6.*: cannot be written: File .*; submit the job from another"):
        slurm.main(["--config=x.py"])


@pytest.fixture
def job(tmp_path):
    """Start the file as a batch script of SLURM; what SLURM's commands do is given as shell commands."""
    started = []

    def start(*arguments, srun, command=("bash", FILE), more=None, **others):
        noted = 'echo "$@" >> scontrol.txt'
        stubs = {"srun": srun, "scontrol": noted, "scancel": noted, "squeue": "echo RUNNING", **others}
        (tmp_path / "bin").mkdir(exist_ok=True)
        for name, text in stubs.items():
            stub = tmp_path / "bin" / name
            stub.write_text(f"#!/bin/bash\n{text}\n")
            stub.chmod(0o755)
        own = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "trial", "SLURM_NTASKS": "4"}
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        proxy = {"http_proxy": "http://127.0.0.1:9"}  # nobody is there
        script = subprocess.Popen(
            [*command, *arguments],
            cwd=tmp_path,
            env={**environment(), **own, **proxy, "PATH": path, **(more or {})},
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
    assert given[-6:] == ["python", "-m", "rrfp_jax", "train", *arguments]
    assert {"--kill-on-bad-exit=1", "--label", f"--output={job.log.name}"} <= set(given[:-6])


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


def test_a_job_that_was_cancelled_is_not_requeued(job):
    """Its ranks have had SIGTERM, too."""
    srun = f"echo '0: {STOPPED}' >> trial-$SLURM_JOB_ID.log"
    assert job(srun=srun, squeue="echo COMPLETING").wait(LIMIT_SECONDS) == 0
    assert not job.requeued.exists()


def test_a_job_of_which_slurm_says_nothing_just_then_is_requeued(job):
    srun = f"echo '0: {STOPPED}' >> trial-$SLURM_JOB_ID.log"
    assert job(srun=srun, squeue="exit 1").wait(LIMIT_SECONDS) == 0
    assert job.requeued.exists()


def test_a_job_that_slurm_does_not_requeue_has_ended_well(job):
    srun = f"echo '0: {STOPPED}' >> trial-$SLURM_JOB_ID.log"
    assert job(srun=srun, scontrol="exit 1").wait(LIMIT_SECONDS) == 0
    assert "rrfp: SLURM does not requeue this job" in job.log.read_text()


def test_a_requeued_run_knows_that_it_is(job, monkeypatch):
    """Or it would begin anew if it was told not to resume."""
    assert job(srun="echo $RRFP_RESTARTS").communicate(timeout=LIMIT_SECONDS)[0] == "0\n"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert job(srun="echo $RRFP_RESTARTS").communicate(timeout=LIMIT_SECONDS)[0] == "2\n"


THREE = {
    **{"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[0-2]", "SLURMD_NODENAME": "n0"},
    **{"SLURM_NTASKS": "3", "RRFP_SILENCE_SECONDS": "2"},
}
"""Nodes, with a task each."""

CRASHED = """
case "$*" in
*--nodelist=$CRASHED*) exit 1 ;;
*--nodelist=*) ;;
*rrfp-followers*) while [ -d .trial*.leader ]; do sleep 0.1; done ;;
*--exclude=$CRASHED*) echo "restart $RRFP_RESTARTS" "$@" >> steps.txt ;;
*)  echo "restart $RRFP_RESTARTS" "$@" >> steps.txt
    echo "srun: error: n[0,2]: tasks 0,2: Exited with exit code 1" >&2
    exec sleep 60 ;;
esac"""
"""An `srun` for which a node is lost: a step with it does not end, and it runs no task."""

SCONTROL = 'if [ "$1" = show ]; then printf "n0\nn1\nn2\n"; else echo "$@" >> scontrol.txt; fi'


def test_a_run_goes_on_without_a_crashed_node(job, tmp_path):
    more = {**THREE, "CRASHED": "n1", "SLURM_RESTART_COUNT": "4"}
    script = job("--config=a.py", "--spare-nodes=1", srun=CRASHED, scontrol=SCONTROL, more=more)
    assert script.wait(LIMIT_SECONDS) == 0
    first, second = (tmp_path / "steps.txt").read_text().splitlines()
    assert first.startswith("restart 4 ") and second.startswith("restart 5 ")
    assert "--exclude" not in first and "--exclude=n1" in second.split()
    for step in (first, second):
        assert {"--overlap", "--nodes=2", "--ntasks=2"} < {*step.split()}
        assert step.endswith("python -m rrfp_jax train --config=a.py")
    assert "rrfp: no answer from n1\nrrfp: the run starts again on n0, n2\n" in job.log.read_text()
    assert job.requeued.read_text() == f"update JobId={os.getpid()} NodeList=n0,n2\n"
    assert not [*tmp_path.glob(".trial*")]


def test_a_job_without_a_spare_node_is_requeued_without_the_crashed_one(job):
    """Or SLURM would wait for that node, too."""
    script = job("--config=a.py", srun=CRASHED, scontrol=SCONTROL, more={**THREE, "CRASHED": "n1"})
    assert script.wait(LIMIT_SECONDS) == 0
    updated, requeued = job.requeued.read_text().splitlines()
    assert updated == f"update JobId={os.getpid()} NodeList=n0,n2"
    assert requeued == f"requeue {os.getpid()}"
    assert (
        "rrfp: no answer from n1\nrrfp: no spare node is left: the job is requeued\n" in job.log.read_text()
    )


def test_a_rank_that_fails_on_nodes_that_answer_fails_the_job(job):
    srun = 'case "$*" in *train*) echo "srun: error: n1: task 1: Killed" >&2; exit 9 ;; esac'
    more, arguments = {**THREE, "CRASHED": "none"}, ("--config=a.py", "--spare-nodes=1")
    assert job(*arguments, srun=srun, scontrol=SCONTROL, more=more).wait(LIMIT_SECONDS) == 9
    assert not job.requeued.exists()


def test_a_jobs_name_that_no_file_may_have_or_srun_would_read_as_a_pattern():
    job = Job.of([], {**JOB, "SLURM_JOB_NAME": "exp/lr%1\\"}, 0)
    assert job.log == Path("exp_lr_1_-6.log")


def test_whoever_is_in_no_job_is_told_so():
    with pytest.raises(UsageError, match="SLURM_NTASKS: is not set; start this with sbatch"):
        Job.of([], {}, 0)


def test_whoever_asks_for_spare_nodes_is_told_all_that_they_need():
    with pytest.raises(UsageError, match="--ntasks-per-node, and their product as --ntasks"):
        Job.of([], JOB, 1)


@pytest.mark.parametrize("spare", ["3", "-1", "x", ""])
def test_nodes_that_cannot_be_spare(job, spare):
    script = job(f"--spare-nodes={spare}", srun="", scontrol=SCONTROL, more=THREE)
    assert script.wait(LIMIT_SECONDS) == 2


@pytest.mark.parametrize("spare", [0, 1])
def test_another_node_goes_on_when_the_first_one_is_lost(job, spare, tmp_path):
    """It ends the lost leader's step; then it ends the job, or requeues it, as its script would have."""
    names = {**JOB, **THREE, "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "trial"}
    batch = {name: value for name, value in names.items() if name.startswith("SLURM")}
    folder = tmp_path / ".trial.leader"
    folder.mkdir()
    LeadFolder(folder).write(Lead(term=0, node="n0", restarts=2, lost=()))
    job.log.touch()
    script = job(
        *(f"--follow={folder}", f"--batch={json.dumps(batch)}", f"--spare-nodes={spare}", "--config=a.py"),
        command=(sys.executable, "-m", "rrfp_jax.commands.slurm"),
        srun=CRASHED,
        scontrol=SCONTROL,
        squeue="case $1 in --steps) printf '6.0 rrfp-step\\n6.1 other\\n' ;; *) echo RUNNING ;; esac",
        more={**STEP, **THREE, "SLURMD_NODENAME": "n2", "SLURM_NTASKS": "1", "CRASHED": "n0"},
    )
    assert script.wait(LIMIT_SECONDS) == 0
    if spare:
        (step,) = (tmp_path / "steps.txt").read_text().splitlines()
        assert step.startswith("restart 3 ") and "--exclude=n0 --job-name=rrfp-step python" in step
    cancelled = ["--signal=KILL 6.0", str(os.getpid())]
    requeued = ["--signal=KILL 6.0", f"requeue {os.getpid()}"]
    assert job.requeued.read_text().splitlines() == (cancelled if spare else requeued)
    assert "rrfp: n0, which led the job, is silent: n2 leads it from here\n" in job.log.read_text()
    assert not folder.exists()


def test_a_leader_that_asks_nodes_goes_on_to_lead(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(slurm, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(slurm, "MOST_ASKED", 2)
    asked = []

    def srun(self, *arguments, **streams):
        assert sum(one.poll() is None for one in asked) < 2
        asked.append(subprocess.Popen(["sleep", "60"] if "--nodelist=n1" in arguments else ["true"]))
        return asked[-1]

    monkeypatch.setattr(Job, "srun", srun)
    nodes = ["n0", "n1", "n2", "n3"]
    job, folder = Job(arguments=[], environment={}, nodes=nodes, spare=1, own="n0"), LeadFolder(tmp_path)
    leader = JobLeader(job, folder, Lead(term=0, node="n0", restarts=0, lost=()))
    leader.tell()
    before = folder.latest().beat
    assert leader._silent() == ["n1"]
    assert folder.latest().beat >= before + 3
    assert len(asked) == 4 and all(one.returncode is not None for one in asked)


def test_one_of_several_followers_leads(tmp_path):
    folder, first = LeadFolder(tmp_path), Lead(term=0, node="n0", restarts=0, lost=("n3",))
    folder.write(first)
    lead = folder.follow(1.0)
    assert lead == Lead(term=1, node="n0", restarts=1, lost=("n3",))
    later = folder.claim(first)  # of a node that has not seen the new leader
    assert later.term == 2
    folder.write(lead)
    folder.write(later)
    assert folder.latest() == later
    with pytest.raises(Superseded):
        folder.write(lead)
    folder.remove()
    assert folder.follow(0.3) is None and folder.claim(later) is None
    with pytest.raises(Superseded):
        folder.write(later)


def test_a_leader_whose_disk_is_full_goes_on_to_lead(tmp_path, monkeypatch):
    folder, lead = LeadFolder(tmp_path), Lead(term=0, node="n0", restarts=0, lost=())
    folder.write(lead)

    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(slurm, "leave_file", full)
    ends = time.monotonic() + 2.0

    def beat():
        while time.monotonic() < ends:
            folder.write(lead)
            time.sleep(0.1)
        folder.remove()

    with ThreadPoolExecutor(1) as pool:
        beats = pool.submit(beat)
        assert folder.follow(1.0) is None and time.monotonic() >= ends
        beats.result()
    folder.path.mkdir()
    with pytest.raises(Superseded):  # nothing tells that it leads
        folder.write(replace(lead, term=1))


def wait_for(text, log, script):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (log.exists() and text in log.read_text()):
        assert script.poll() is None and time.monotonic() < deadline, log.exists() and log.read_text()
        time.sleep(0.05)


@pytest.mark.slow(reason="a job of two nodes that is started twice")
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
