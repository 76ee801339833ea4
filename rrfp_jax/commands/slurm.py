"""Trains a run in a job of SLURM, also when its nodes crash. `launch/slurm.sbatch` starts this as a program:

    python -m rrfp_jax.commands.slurm [--spare-nodes=N] --config=FILE.py [--config.FIELD=VALUE ...]

`rrfp train` runs as a step, with a task for every rank. SLURM itself notices a crashed node after
SlurmdTimeout, by default 300 s, and until then `srun` waits for it. Ranks know after RRFP_SILENCE_SECONDS. So
when a task has ended badly and the step does not end, every node is asked to run a task; the step is ended,
and the next one is started on nodes that answered. Without enough of them the job is requeued.

The node that crashes may be the first one, with the batch script in it. So this program also runs on all
other nodes, and follows. The leader writes a beat into a folder that all nodes share, and removes the folder
at the end. When beats no longer come, the first to notice leads. Each leader has a file of its own, named by
its term: the latest term counts, and an earlier leader that finds a later one follows it.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, FAILED, REFUSED, UsageError
from rrfp_jax.files import named, read_end
from rrfp_jax.json_files import Unreadable, read_json
from rrfp_jax.printing import warn
from rrfp_jax.runtime.run.place import silence_seconds
from rrfp_jax.runtime.run.status_report import leave_file

SPARE, FOLLOW, BATCH = "--spare-nodes=", "--follow=", "--batch="

STEP, FOLLOWERS = "rrfp-step", "rrfp-followers"
"""Names of steps."""

POLL_SECONDS, BEAT_SECONDS = 0.2, 2.0

END_SECONDS = 2.0
"""How long a step in which a task has ended badly may take to end, before its nodes are asked."""

ANSWER_SECONDS = 10.0
"""Limit for a node to run a task, and for SLURM to carry out a command."""

MOST_ASKED = 32  # nodes at once, each by an `srun` of its own

TURN_SECONDS = 2.0
"""By how much later each following node takes the lead than the one before it."""

TASK_FAILED = re.compile(rb"^srun: error: \S+: tasks? [\d,-]+: ", re.MULTILINE)
"""What `srun` says of tasks that ended badly."""

SAVED = re.compile(rb"^ *0: SIGTERM: stopped after step [0-9]*; resumes from ", re.MULTILINE)
"""What rank 0 says when a run has saved itself for SIGTERM."""

LONGEST_SAID = 2**12
"""Bytes of the latest that `srun` has said, in which a task's bad end is looked for."""

LONGEST_END = 2**20
"""Bytes at the end of a step's output in which that is looked for."""


@dataclass(frozen=True, kw_only=True)
class Lead:
    """What the leader's file says."""

    term: int
    node: str
    restarts: int  # how often the run was started again in this job, without requeueing
    lost: tuple[str, ...]  # nodes that did not answer
    beat: int = 0


class Superseded(Exception):
    """Another node leads, or has led to the end."""


@dataclass(frozen=True)
class LeadFolder:
    """The files of leaders, on a file system that all nodes share."""

    path: Path

    def latest(self) -> Lead | None:
        """Of the latest term whose leader has said something; None if nobody has."""
        for path in reversed(named(self.path, "leader-", r"[0-9]+\.json")):
            with suppress(Unreadable):
                return read_json(path, Lead)
        return None

    def write(self, lead: Lead) -> None:
        """Say something as the leader; Superseded if there is a later one, or the run has ended."""
        self.require(lead)
        try:
            leave_file(self.path, self._name(lead), lead)
        except OSError:  # such as a full disk: the file's time, too, tells that this node leads
            try:
                os.utime(self.path / self._name(lead))
            except FileNotFoundError:
                raise Superseded from None

    def _written(self, lead: Lead | None) -> float:
        """When a leader's file was written, or touched."""
        with suppress(OSError):
            return 0.0 if lead is None else (self.path / self._name(lead)).stat().st_mtime
        return 0.0

    @staticmethod
    def _name(lead: Lead) -> str:
        return f"leader-{lead.term:06d}.json"

    def remove(self) -> None:
        """The run has ended."""
        shutil.rmtree(self.path, ignore_errors=True)

    def require(self, lead: Lead) -> None:
        """Raise Superseded if there is a later leader."""
        if (latest := self.latest()) is not None and latest.term > lead.term:
            raise Superseded

    def claim(self, after: Lead) -> Lead | None:
        """The lead of the next term; None if another node was quicker, or the run has ended meanwhile."""
        claimed = [int(path.suffix[1:]) for path in self.path.glob("term.*")]
        lead = replace(after, term=max([after.term, *claimed]) + 1, restarts=after.restarts + 1)
        with suppress(OSError):  # it is there, or the folder is not, or nothing can be written
            (self.path / f"term.{lead.term}").mkdir()
            return lead
        return None

    def follow(self, seconds: float) -> Lead | None:
        """Wait until the run has ended, for None, or until there were no beats for so long, for the lead."""
        seen, since, looked = None, monotonic(), monotonic()
        while self.path.is_dir():
            latest, now = self.latest(), monotonic()
            sign = latest, self._written(latest)
            if sign != seen or now - looked > seconds / 2:  # or this process itself stood still
                seen, since = sign, now
            elif now - since > seconds and latest is not None:
                if (lead := self.claim(latest)) is not None:
                    return lead
                since = now
            looked = now
            sleep(POLL_SECONDS)
        return None


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job, as its batch script knows it."""

    arguments: Sequence[str]  # of `rrfp train`
    environment: Mapping[str, str]  # of the batch script, SLURM's variables only
    nodes: Sequence[str]
    spare: int  # how many nodes are not needed
    own: str = field(default_factory=lambda: ENVIRONMENT.get("SLURMD_NODENAME", ""))

    @classmethod
    def of(cls, arguments: Sequence[str], environment: Mapping[str, str], spare: int) -> Job:
        """UsageError says that it has no nodes to spare, or is none."""
        if "SLURM_NTASKS" not in environment:
            raise UsageError("SLURM_NTASKS: is not set; start this with sbatch, and give --ntasks")
        nodes: Sequence[str] = [environment.get("SLURMD_NODENAME", "")]
        if (count := int(environment.get("SLURM_JOB_NUM_NODES", "1"))) > 1:
            names = ["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]]
            nodes = subprocess.run(names, capture_output=True, text=True, check=True).stdout.split()
        tasks = int(environment["SLURM_NTASKS"])
        if spare >= count or (spare and tasks % count):
            raise UsageError(
                f"{SPARE}{spare} in a job of {tasks} tasks on {count} nodes: give sbatch --nodes, the spare "
                f"ones included, --ntasks-per-node, and their product as --ntasks"
            )
        return cls(arguments=arguments, environment=environment, nodes=nodes, spare=spare)

    @property
    def id(self) -> str:
        return self.environment["SLURM_JOB_ID"]

    @property
    def restarted(self) -> int:
        """How often SLURM has started the job again."""
        return int(self.environment.get("SLURM_RESTART_COUNT") or "0")

    @property
    def log(self) -> Path:
        name = re.sub(r"[/%\\]", "_", self.environment["SLURM_JOB_NAME"])  # srun takes % and \ as marks
        return Path(f"{name}-{self.id}.log")

    def srun(self, *arguments: str, whole: bool = False, **streams: Any) -> subprocess.Popen[bytes]:
        """Start a step, beside others; with the options of the whole job, or with its own only."""
        own = {k: v for k, v in self.environment.items() if whole or k in ("SLURM_JOB_ID", "SLURM_CONF")}
        environment = {k: v for k, v in ENVIRONMENT.items() if not k.startswith("SLURM")} | own
        # --overlap: a step with a crashed node in it keeps what it has until SLURM notices
        command = ["srun", "--overlap", *arguments]
        return subprocess.Popen(command, env=environment, start_new_session=True, **streams)

    def train(self, lost: Collection[str]) -> subprocess.Popen[bytes]:
        """Start the step that trains; what `srun` says is on its `stderr`."""
        options = ["--kill-on-bad-exit=1", "--label", f"--output={self.log}", "--open-mode=append"]
        if self.spare:
            needed = len(self.nodes) - self.spare
            tasks = int(self.environment["SLURM_NTASKS"]) * needed // len(self.nodes)
            options += [f"--nodes={needed}", f"--ntasks={tasks}"]
        options += [f"--exclude={','.join(lost)}"] if lost else []
        command = ["python", "-m", "rrfp_jax", "train", *self.arguments]
        return self.srun(*options, f"--job-name={STEP}", *command, whole=True, stderr=subprocess.PIPE)

    def followers(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start this program on all other nodes."""
        count = len(self.nodes) - 1
        options = [f"--nodes={count}", f"--ntasks={count}", f"--exclude={self.own}", "--gres=none"]
        options += ["--no-kill", f"--job-name={FOLLOWERS}", f"--output={folder}/%N.log"]
        given = [f"{FOLLOW}{folder}", f"{BATCH}{json.dumps(dict(self.environment))}", f"{SPARE}{self.spare}"]
        return self.srun(*options, "python", "-m", "rrfp_jax.commands.slurm", *given, *self.arguments)

    def silent(self, nodes: Sequence[str], meanwhile: Callable[[], None]) -> list[str]:
        """Those of these nodes that do not run a task for SLURM; `meanwhile` is called again and again."""
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        one = ("--nodes=1", "--ntasks=1", "--gres=none")

        def answers(node: str) -> bool:
            srun = self.srun(*one, f"--nodelist={node}", "true", **quiet)
            with suppress(subprocess.TimeoutExpired):
                srun.wait(ANSWER_SECONDS)
            srun.kill()
            return srun.wait() == DONE

        pool = ThreadPoolExecutor(MOST_ASKED)
        try:
            asked = {node: pool.submit(answers, node) for node in nodes}
            while wait(asked.values(), POLL_SECONDS / 4).not_done:
                meanwhile()
            return [node for node, answer in asked.items() if not answer.result()]
        finally:
            pool.shutdown(cancel_futures=True)

    def say(self, text: str) -> None:
        """In the job's log, unless nothing can be written."""
        with suppress(OSError), self.log.open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")


def slurm(*command: str) -> str | None:
    """What a command of SLURM prints; None if it failed."""
    with suppress(subprocess.SubprocessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=ANSWER_SECONDS)
    return None


class JobLeader:
    """The job's leader, from its first step or from the loss of the leader before it."""

    def __init__(self, job: Job, folder: LeadFolder | None, lead: Lead) -> None:
        self._job, self._folder, self._lead, self._beat_at, self._begun = job, folder, lead, -inf, 0
        self.requeued = False

    def run(self, silent: Sequence[str] = ()) -> int:
        """Train to the end, or requeue the job; the exit status. Superseded if another node leads by then."""
        job, status = self._job, FAILED
        while True:
            self.tell(lost=(*self._lead.lost, *silent))
            left = [node for node in job.nodes if node not in self._lead.lost]
            if silent:
                job.say(f"rrfp: no answer from {', '.join(silent)}")
            if len(left) < len(job.nodes) - job.spare:
                job.say("rrfp: no spare node is left: the job is requeued")
                return self._requeue(status)
            if self._lead.lost:
                job.say(f"rrfp: the run starts again on {', '.join(left)}")
            status, silent = self._step()
            if status == DONE and self._saved():
                return self._requeue(status)
            if not silent:
                self._give_back()
                return status
            self.tell(restarts=self._lead.restarts + 1)

    def take_over(self) -> int:
        """The same, after the leader before was lost."""
        before = self._lead.node
        self.tell(node=self._job.own, lost=(*self._lead.lost, before))
        self._job.say(f"rrfp: {before}, which led the job, is silent: {self._job.own} leads it from here")
        self._end_step()
        return self.run(self._silent())

    def tell(self, **changed: Any) -> None:
        """Say that this node leads, and how far it is."""
        self._lead = replace(self._lead, beat=self._lead.beat + 1, **changed)
        self._beat_at = monotonic()
        if self._folder is not None:
            self._folder.write(self._lead)

    def _beat(self) -> None:
        if monotonic() - self._beat_at > BEAT_SECONDS:
            self.tell()

    def _step(self) -> tuple[int, Sequence[str]]:
        """Train until the step ends; its exit status, and which nodes did not answer when it ended badly."""
        self._begun = self._job.log.stat().st_size
        # A run that was started again resumes, also with --config.checkpoint.resume=False.
        ENVIRONMENT["RRFP_RESTARTS"] = str(self._job.restarted + self._lead.restarts)
        srun, bad_since, last = self._job.train(self._lead.lost), inf, b""
        assert srun.stderr is not None
        try:
            while srun.poll() is None:
                last = (last + self._hear(srun.stderr, POLL_SECONDS))[-LONGEST_SAID:]
                bad_since = min(bad_since, monotonic()) if TASK_FAILED.search(last) else bad_since
                self._beat()
                if monotonic() - bad_since > END_SECONDS:
                    if silent := self._silent():
                        self._end_step()
                        return FAILED, silent
                    bad_since = monotonic()  # asks again
            while self._hear(srun.stderr, 0.0):
                pass
            return srun.returncode, self._silent() if srun.returncode else ()
        finally:
            srun.kill()
            srun.wait()
            srun.stderr.close()

    def _hear(self, stream: IO[bytes], seconds: float) -> bytes:
        """What comes within so long, which is also put into the job's log."""
        if not select.select([stream], [], [], seconds)[0]:
            return b""
        if said := os.read(stream.fileno(), 2**16):
            self._job.say(said.decode(errors="replace").rstrip("\n"))
        else:  # closed
            sleep(seconds)
        return said

    def _silent(self) -> Sequence[str]:
        """Nodes that do not answer; if this node cannot ask, it tries on, and leads no more meanwhile."""
        if self._folder is None:
            return ()
        job = self._job
        known = [node for node in job.nodes if node not in self._lead.lost]
        silent = job.silent(known, self._beat)
        while job.own in silent:  # others may lead: no beats from here on
            silent = job.silent(known, partial(self._folder.require, self._lead))
        return silent

    def _end_step(self) -> None:
        """Kill all tasks that train, on nodes that answer."""
        self._beat()
        found = slurm("squeue", "--steps", f"--job={self._job.id}", "--noheader", "--format=%i %j") or ""
        for line in found.splitlines():
            step, _, name = line.partition(" ")
            self._beat()
            if name == STEP:
                slurm("scancel", "--signal=KILL", step)

    def _saved(self) -> bool:
        """Whether the step has saved itself for SIGTERM."""
        size = self._job.log.stat().st_size - self._begun
        return SAVED.search(read_end(self._job.log, min(size, LONGEST_END))[0]) is not None

    def _give_back(self) -> None:
        """Take lost nodes out of the job, or SLURM would wait for them at its end; it keeps the first one."""
        job, lost = self._job, self._lead.lost
        if lost and job.nodes[0] not in lost:
            left = ",".join(node for node in job.nodes if node not in lost)
            slurm("scontrol", "update", f"JobId={job.id}", f"NodeList={left}")

    def _requeue(self, status: int) -> int:
        """Requeue the job; the exit status, which is that of the run if SLURM refuses."""
        job = self._job
        if self._folder is not None:
            self._folder.remove()  # else SLURM would wait for the other nodes' programs
        state = slurm("squeue", "--noheader", f"--jobs={job.id}", "--format=%T")
        if state is not None and state.strip() != "RUNNING":  # it was cancelled, or SLURM requeues it already
            return status
        self._give_back()
        if slurm("scontrol", "requeue", job.id) is None:
            job.say("rrfp: SLURM does not requeue this job")
            return status
        self.requeued = True
        return DONE


def main(arguments: Sequence[str]) -> int:
    """The exit status of a node's program."""
    given = {SPARE: "0", FOLLOW: "", BATCH: ""}
    own_arguments = [argument for argument in arguments if argument.startswith((*given,))]
    given |= {f"{name}=": value for name, _, value in (own.partition("=") for own in own_arguments)}
    others = [argument for argument in arguments if argument not in own_arguments]
    if not given[SPARE].isdecimal():
        raise UsageError(f"{SPARE}{given[SPARE]}: give the number of nodes that are spare")
    own = {name: value for name, value in ENVIRONMENT.items() if name.startswith("SLURM")}
    job = Job.of(others, json.loads(given[BATCH]) if given[BATCH] else own, int(given[SPARE]))
    seconds = silence_seconds(ENVIRONMENT)
    signal.signal(signal.SIGTERM, lambda *_: None)  # it is for the ranks, also if the job is cancelled
    if given[FOLLOW]:
        turn = TURN_SECONDS * job.nodes.index(job.own)
        return follow(job, LeadFolder(Path(given[FOLLOW])), seconds + turn)
    first = Lead(term=0, node=job.own, restarts=0, lost=())
    try:
        job.log.touch()
        folder = LeadFolder(Path(f".{job.log.stem}-{job.restarted}.leader").absolute())
        if len(job.nodes) > 1:
            folder.remove()  # of a job with the same number
            folder.path.mkdir(mode=0o700)
    except OSError as error:
        reason = f"{error.filename}: cannot be written: {error.strerror}"
        raise UsageError(f"{reason}; submit the job from another folder, or make room") from None
    if len(job.nodes) == 1:
        return JobLeader(job, None, first).run()
    return lead(job, folder, JobLeader(job, folder, first), seconds)


def lead(job: Job, folder: LeadFolder, leader: JobLeader, seconds: float) -> int:
    """Lead from the job's start; the exit status."""
    leader.tell()
    followers = job.followers(folder.path)
    try:
        return leader.run()
    except Superseded:
        return follow(job, folder, seconds)
    finally:
        folder.remove()
        with suppress(subprocess.TimeoutExpired):  # of a node that crashed SLURM hears nothing
            followers.wait(ANSWER_SECONDS)
        followers.kill()


def follow(job: Job, folder: LeadFolder, seconds: float) -> int:
    """Wait for the run's end; take the lead when nobody has it."""
    while (lead := folder.follow(seconds)) is not None:
        with suppress(Superseded):
            leader = JobLeader(job, folder, lead)
            status = leader.take_over()
            folder.remove()
            if not leader.requeued:
                job.say(
                    f"rrfp: the run ended with status {status}; the job, without its script, is cancelled"
                )
                slurm("scancel", job.id)
            return status
    return DONE


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        warn(f"slurm: {error}")
        sys.exit(REFUSED)
