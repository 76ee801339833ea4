"""SLURM over isolated nodes: n0, n1, ... compute, the last one has the controller, where one submits.

Timeouts are SLURM's defaults, so a crashed node is noticed after 300 s.
"""

import json
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.nodes.nodes import Nodes, Unavailable

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
LIMIT_SECONDS = 400.0
"""For whatever is waited for: starting JAX in four processes takes a minute on a busy machine."""

CONFIGURATION = """\
ClusterName=nodes
SlurmctldHost={head}({address})
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/var/spool/slurmd
StateSaveLocation=/var/spool/slurmctld
SlurmctldLogFile=/run/slurmctld.log
SlurmdLogFile=/run/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

MUNGE = """mkdir -p /run/munge && chown munge: /run/munge && chmod 755 /run/munge &&
    setpriv --reuid munge --regid munge --clear-groups munged --force --log-file /run/munge/log \
    --seed-file /run/munge/seed"""


def check():
    """Raise `Unavailable` where there is no SLURM."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise Unavailable(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")


class Slurm:
    """SLURM over `nodes`, with its files in `folder`, which they share."""

    def __init__(self, nodes: Nodes, folder: Path):
        check()
        self.nodes, self.folder, self.head = nodes, folder, nodes.names[-1]
        text = CONFIGURATION.format(head=self.head, address=nodes.addresses[self.head])
        for name in nodes.names[:-1]:
            text += f"NodeName={name} NodeAddr={nodes.addresses[name]} CPUs=2 State=UNKNOWN\n"
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # none is looked for, nor used
        self._environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
        self._start(self.head, "slurmctld")
        for name in nodes.names[:-1]:
            self._start(name, f"slurmd -N {name}")
        self.wait("idle nodes", lambda: self("sinfo", "-h", "-o", "%T %D") == f"idle {len(nodes.names) - 1}")

    def _start(self, node, program):
        folders = "mkdir -p /var/spool/slurmd /var/spool/slurmctld"
        command = f"{MUNGE} && {folders} && {program}"
        done = self.nodes.run(node, "bash", "-c", command, env=self._environment)
        assert done.returncode == 0, done.stderr

    def boot(self, node):
        """Start a node that crashed; SLURM has it again."""
        self.nodes.boot(node)
        self._start(node, f"slurmd -N {node}")

    def __call__(self, *command, folder=None, **environment):
        """What a command of SLURM prints where one submits."""
        given = {**self._environment, **environment}
        done = self.nodes.run(self.head, *command, folder=folder, env=given)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    @staticmethod
    def wait(what, found, seconds=LIMIT_SECONDS):
        """Wait until `found` returns something true, and return that."""
        deadline = time.monotonic() + seconds
        while not (value := found()):
            assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
            time.sleep(0.1)
        return value

    def close(self):
        """Cancel all jobs; the nodes end the rest."""
        with suppress(AssertionError, KeyError):
            self("scancel", "--user=root")


class Job:
    """`launch/slurm.sbatch` with the run of paced_run.py, submitted from a folder of its own."""

    def __init__(self, slurm, folder, *options, arguments=()):
        self.slurm, self.folder = slurm, folder
        script = folder / "slurm.sbatch"
        lines = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines(keepends=True)
        script.write_text(
            "".join(line for line in lines if "gpus-per-task" not in line)
        )  # as docs/launch.md says
        config = f"--config={ROOT}/tests/nodes/paced_run.py"
        arguments = [config, "--config.transport=socket", *arguments]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        submit = ("sbatch", "--parsable", "--job-name=toy", *options, script, *arguments)
        self.id = slurm(*submit, folder=folder, **environment)

    @property
    def log(self):
        path = self.folder / f"toy-{self.id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def metrics(self):
        path = self.folder / "runs" / "toy" / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def shown(self, what):
        """What SLURM says of the job, such as its JobState."""
        return re.search(rf"\b{what}=(\S+)", self.slurm("scontrol", "show", "job", self.id))[1]

    def wait_for_step(self, step):
        """Wait until this step is trained, in this attempt or an earlier one."""
        self._wait(f"step {step}", lambda: self.metrics and self.metrics[-1] >= step)

    def wait_for_line(self, text, count=1):
        """Wait until the log has a line with this text so often."""
        self._wait(text, lambda: self.log.count(text) >= count)

    def wait_for_state(self, state):
        self._wait(f"state {state}", lambda: self.shown("JobState") == state)

    def _wait(self, what, found):
        try:
            self.slurm.wait(what, found)
        except AssertionError as error:
            raise AssertionError(f"{error}; the log:\n{self.log[-4000:]}") from None

    def seconds_to_next_step(self):
        """How long it takes from now until the run has resumed and trained a step."""
        begun, before = time.monotonic(), self.log.count("resumes after")

        def found():
            _, *resumed = self.log.split("resumes after")
            return len(resumed) > before and re.search(r"^0: step +\d+ ", resumed[-1], re.MULTILINE)

        self._wait("the next step", found)
        return time.monotonic() - begun

    def begin_now(self):
        """Have a requeued job start without SLURM's hold of two minutes."""
        self.wait_for_state("PENDING")
        self.slurm("scontrol", "update", f"JobId={self.id}", "StartTime=now")
