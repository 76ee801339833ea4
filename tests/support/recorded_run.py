"""A run as its ranks' recordings and status reports tell it, made by hand."""

import time

from rrfp_jax.authors import OURS
from rrfp_jax.core.events import Wait, WaitCause
from rrfp_jax.core.hints import BFW
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Kind, Placement, Task
from rrfp_jax.launcher import hang
from rrfp_jax.launcher.snapshot import RankSnapshot
from rrfp_jax.runtime.run.recorder import ARRIVED, COMING, OFFERED, PRODUCED, FlightRecorder, RunPhase, read
from rrfp_jax.runtime.run.stacks import StackFrame, Thread
from rrfp_jax.runtime.run.status_report import StatusReport
from rrfp_jax.runtime.run.waits import ForGather, ForProgram, ForTask

AWAIT_READY = (StackFrame(f"{OURS}runtime/run/world.py", 95, "await_ready"),)
DRIVER = (StackFrame(f"{OURS}runtime/run/mailbox.py", 155, "sleep"), StackFrame("train.py", 80, "<module>"))
LIBRARY = StackFrame("/usr/lib/python3/site-packages/jax/stages.py", 890, "__call__")
USERS = StackFrame("train.py", 31, "block")


def task_of(text):
    return Task(Kind("FBIW".index(text[0])), 0, int(text[1:]))


class Said:
    """A report with its words."""

    def __init__(self, report):
        self.report, self.moves, self.blamed = report, report.moves, report.blamed
        self.sentence = report.sentence
        self.lines = [hang.line(report.seen, one) for one in report.seen.values()]
        self.text = "\n".join([self.sentence, *(f"  {line}" for line in self.lines)])


def judge(seen, **more):
    return Said(hang.judge(seen, **more))


class Run:
    """A run whose ranks do in step 7 what the test says; each stage replica has `width` ranks."""

    def __init__(self, folder, stages=3, width=1, replicas=1, microbatches=3):
        self.folder, self.placement = folder, Placement(stages)
        rules = StepRules(placement=self.placement, microbatches=microbatches, schedule=BFW())
        self.stage_of = [number for number in range(stages * replicas) for _ in range(width)]
        self.recorders = []
        for rank, number in enumerate(self.stage_of):
            name = f"stage {number % stages}" + (f" of replica {number // stages}" if replicas > 1 else "")
            recorder = FlightRecorder(folder / f"flight-{rank}", rank, name)
            recorder.runs(name, [number % stages])
            recorder.phase(RunPhase("step", 7))
            recorder.begin_round(9, 7, rules, [number])
            if width > 1:
                recorder.joins([r for r, other in enumerate(self.stage_of) if other == number])
            self.recorders.append(recorder)
        self.reports = {}
        self.states = {}
        self.threads = {}

    def runs(self, rank, *tasks, ends=True):
        for task in map(task_of, tasks):
            recorder = self.recorders[rank]
            recorder.dispatched(7, self.stage_of[rank], task)
            if self.placement.destination(self.stage_of[rank] % self.placement.stages, task):
                recorder.sent(self.stage_of[rank], task, OFFERED)
                if ends:
                    recorder.sent(self.stage_of[rank], task, PRODUCED)
            if ends:
                recorder.ended()

    def gets(self, rank, *inputs, bits=COMING | ARRIVED):
        for task in map(task_of, inputs):
            self.recorders[rank].got(self.stage_of[rank], task.input, bits)

    def waits(self, rank, cause=WaitCause.INPUT, task="F0", group=()):
        """For what its stage dispatches nothing."""
        replica, stage = divmod(self.stage_of[rank], self.placement.stages)
        tasks = () if cause is WaitCause.LEADER else (task_of(task),)
        why = Wait(cause, tasks, group=group)
        self.says(rank, [ForTask(step=7, stage=stage, replica=replica, why=why, waited=31.0)])

    def waits_for_the_end(self, rank, task):
        self.says(rank, [ForProgram(step=7, task=task_of(task), waited=31.0)])

    def gathers(self, rank, what, ranks, number=5):
        gather = ForGather(number=number, what=what, ranks=tuple(ranks), waited=31.0)
        self.says(rank, [gather], number)

    def says(self, rank, waiting, gathers=5, frames=DRIVER):
        main = Thread("MainThread", True, tuple(frames))
        self.reports[rank] = StatusReport(
            rank=rank,
            number=1,
            waiting=tuple(waiting),
            gathers=gathers,
            threads=(main, *self.threads.get(rank, ())),
        )

    def sights(self, later=60.0):
        found = []
        for rank in range(len(self.recorders)):
            said = self.reports.get(rank)
            found.append(
                RankSnapshot(
                    rank=rank,
                    state=self.states.get(rank, "answers" if said else "silent"),
                    now=time.time() + later,
                    recording=read(self.folder / f"flight-{rank}"),
                    report=said,
                    threads=said.threads if said else (),
                )
            )
        return found

    def judged(self, **more):
        return judge(self.sights(), **more)


def grouped(folder):
    """Two stages of two ranks; ranks 0 and 2 lead, and all but the decision on B0 has come."""
    run = Run(folder, stages=2, width=2, microbatches=1)
    for rank in (0, 1):
        run.runs(rank, "F0")
    for rank in (2, 3):
        run.gets(rank, "F0")
        run.runs(rank, "F0")
    for leader in (0, 2):
        run.recorders[leader].told()
        run.recorders[leader + 1].heard(0)
    for rank in range(4):
        run.waits(rank)
    return run
