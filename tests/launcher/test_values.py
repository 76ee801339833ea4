"""Runs are judged by values: with every text replaced by "x" nothing is decided otherwise."""

import os
from signal import SIGKILL

import pytest

from rrfp_jax.core import tasks
from rrfp_jax.core.events import Wait, WaitCause
from rrfp_jax.errors import FAILED
from rrfp_jax.launcher import end as ends
from rrfp_jax.launcher import hang as hangs
from rrfp_jax.launcher.end import RankEnd, diagnose
from rrfp_jax.launcher.hang import judge
from rrfp_jax.launcher.restarts import NO_STEP, Elastic, after_attempt
from rrfp_jax.runtime.run import consensus, waits
from rrfp_jax.runtime.run.exits import ExitReport, read_all
from rrfp_jax.runtime.run.recorder import COMPILING, STARTING, Recording, RunPhase
from rrfp_jax.runtime.run.stacks import StackFrame, Thread
from rrfp_jax.runtime.run.status_report import StatusReport, leave_file, read_report
from rrfp_jax.runtime.run.waits import ForData, ForDevices, ForGather, ForTask
from tests.support.recorded_run import DRIVER, LIBRARY, USERS, Run, grouped

RENDERERS = (
    *((kind, "__str__") for kind in (tasks.Task, tasks.Input, Wait, RunPhase, StackFrame)),
    (Recording, "sentence"),
    *((module, "words") for module in (waits, hangs, ends)),
    *((module, "difference") for module in (consensus, hangs)),
    *((hangs, name) for name in ("line", "render_report", "name_of")),
    (ends, "render_end"),
)


@pytest.fixture(params=["as it is", "x"])
def texts(request, monkeypatch):
    """The texts, and then none of them; which it is."""
    if request.param == "x":
        for owner, name in RENDERERS:
            monkeypatch.setattr(owner, name, lambda *_, **__: "x")
        assert str(Wait(WaitCause.DONE)) == f"{STARTING}" == hangs.name_of({}, 0) == "x"
    return request.param


def forwards(run):
    """All forwards have run, and what they send has come, but for F1 to stage 2."""
    run.runs(0, "F0", "F1", "F2")
    run.gets(1, "F0", "F1", "F2")
    run.runs(1, "F0", "F1", "F2")
    run.gets(2, "F0", "F2")
    run.runs(2, "F0", "F2")
    for rank in range(3):
        run.waits(rank)


def message(folder):
    forwards(run := Run(folder))
    return run, [1, 2], "has sent the input of F1 on stage 2 in step 7 to rank 2"


def led(folder):
    """The same, and rank 3 says that it waits for the decision."""
    run = grouped(folder)
    run.waits(3, WaitCause.LEADER, group=(2, 3))
    return run


def decision(folder):
    run = led(folder)
    run.runs(2, "B0", ends=False)
    run.recorders[2].told()
    run.waits_for_the_end(2, "B0")
    return run, [2, 3], "has sent decision 1 (B0) of their group in step 7 to rank 3"


def leader(folder):
    run = led(folder)
    run.says(2, [], frames=[USERS])
    return run, [2], "3 other ranks wait for it"


def gather(folder):
    run = Run(folder)
    for rank in (0, 1):
        run.gathers(rank, "the clocks", [2])
    run.gathers(2, "the names", [0, 1], number=6)
    return run, [2, 0], "has sent its value of the clocks to rank 0"


def user_code(folder):
    forwards(run := Run(folder))
    run.says(2, [], frames=[USERS, *DRIVER])
    return run, [2], "2 other ranks wait for it"


def a_layer(folder):
    run = Run(folder)
    for rank, recorder in enumerate(run.recorders):
        recorder.phase(COMPILING if rank else STARTING)
        run.says(rank, [], frames=[USERS, *DRIVER] if rank == 2 else [LIBRARY])
    run.gathers(0, "the names", [2])
    run.gathers(1, "the names", [2])
    run.reports[2] = StatusReport(rank=2, number=1, waiting=(), gathers=4, threads=run.reports[2].threads)
    return run, [2], "2 other ranks wait for it"


def a_callback(folder):
    run, *_ = user_code(folder)
    run.gets(2, "F1")
    run.runs(2, "F1", ends=False)
    return run, [2], "2 other ranks wait for it"


def data(folder):
    forwards(run := Run(folder))
    run.threads[2] = [Thread("rrfp-load", False, (LIBRARY, USERS))]
    run.says(2, [ForData(call="plan", step=7, waited=30.0)])
    return run, [2], "2 other ranks wait for it"


def a_collective(folder):
    run = Run(folder, stages=1, replicas=2, microbatches=1)
    run.recorders[1].enters("the sum of the replicas' gradients")
    run.says(1, [ForDevices(what="the gradients", waited=3.0)], gathers=4)
    run.gathers(0, "the results", [1])
    return run, [0], "has not entered the sum of the replicas' gradients, in which rank 1"


def the_lock(folder):
    forwards(run := Run(folder))
    del run.reports[1]
    return run, [1], "does not answer"


def freeze(folder):
    forwards(run := Run(folder))
    run.states[2] = "stopped"
    return run, [2], "stands still"


def kill(folder):
    forwards(run := Run(folder))
    run.states[1] = "gone"
    return run, [1], "has ended"


def orders(folder):
    run = Run(folder, stages=1, width=2)
    run.runs(0, "F0", "F1")
    run.runs(1, "F0", "B0")
    for rank in (0, 1):
        run.waits(rank)
    return run, [0, 1], "2"


def ring(folder):
    run = Run(folder, stages=2)
    run.runs(0, "F0")
    run.gets(1, "F0")
    run.runs(1, "F0")
    run.waits(0, WaitCause.ORDER, "B0")
    run.waits(1, WaitCause.ORDER, "F1")
    return run, [0, 1], "the ranks wait for one another"


def votes(folder):
    """Whoever waits for a member's vote waits for that member."""
    run = led(folder)
    for _ in range(2):
        run.recorders[3].told()
    vote = Wait(WaitCause.PROPOSALS, members=(0,), group=(2, 3))
    run.says(3, [ForTask(step=7, stage=1, replica=0, why=vote)])
    run.says(2, [], frames=[USERS])
    return run, [2], "3 other ranks wait for it"


HANGS = (
    *(message, decision, gather),  # has sent what another lacks
    *(leader, user_code, a_layer, a_callback, data, votes),  # is waited for, and waits for nobody
    *(a_collective, the_lock, freeze, kill, orders, ring),
)


@pytest.mark.parametrize("hang", HANGS)
def test_who_is_blamed_that_a_run_hangs(hang, texts, tmp_path):
    run, blamed, said = hang(tmp_path)
    report = judge(run.sights())
    assert (list(report.blamed), report.moves) == (blamed, False)
    assert texts == "x" or said in report.sentence


def test_whether_a_run_moves(texts, tmp_path):
    run, *_ = message(tmp_path)
    assert judge(run.sights(later=0.3)).moves
    assert not judge(run.sights(later=-3600.0)).moves, "the clock has been set back: nobody knows"
    for rank, recorder in enumerate(run.recorders):
        recorder.phase(COMPILING)
        run.says(rank, [])
    assert judge(run.sights(later=5.0)).moves


def ended(rank, kind, sentence="", status=1, **more):
    report = ExitReport(rank=rank, stages=f"stage {rank}", kind=kind, sentence=sentence, time=100.0, **more)
    return RankEnd(rank=rank, status=status, report=report, ended=101.0)


def lost(rank, culprit):
    waiting = (ForGather(number=1, what="the clocks", ranks=(culprit,), waited=2.0),)
    return ended(rank, "peer lost", "x", culprit=culprit, waiting=waiting)


KILLED = RankEnd(rank=2, status=-SIGKILL, ended=99.0)
TRACE = "Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    ("ranks", "kind", "culprits", "gone"),
    [
        ([lost(0, 1), lost(1, 2), KILLED], "failed", [2], [2]),
        ([lost(0, 1), ended(1, "failed", "x", traceback=TRACE), lost(2, 1)], "failed", [1], [1]),
        ([lost(0, 1), lost(1, 0)], "failed", [0, 1], []),
        ([lost(0, 1), RankEnd(rank=1, status=-SIGKILL, by_launcher=True, stopped=True)], "failed", [1], [1]),
        ([ended(rank, "refused", "x", 2) for rank in range(2)], "refused", [], []),
        ([lost(0, 1), ended(1, "interrupted", "x", 130)], "interrupted", [1], [1]),
        ([ended(rank, "failed", "x", traceback=TRACE) for rank in range(2)], "failed", [0], []),
        ([RankEnd(rank=0, status=0), RankEnd(rank=1, status=0)], "done", [], []),
    ],
)
def test_why_a_run_ended(ranks, kind, culprits, gone, texts, tmp_path):
    for rank in ranks:  # what it said is written and read
        if rank.report is not None:
            rank.report.write(tmp_path)
            rank.report = read_all(tmp_path)[rank.rank]
    end = diagnose(ranks)
    assert (end.kind, [one.rank for one in end.culprits], list(end.lost)) == (kind, culprits, gone)


def test_a_run_that_hung_ended_by_that(texts, tmp_path):
    run, *_ = gather(tmp_path)
    stall = judge(run.sights(), stalls=True)
    end = diagnose([ended(0, "failed", "x"), lost(1, 0), lost(2, 0)], stall=stall)
    assert (end.kind, end.cause, end.culprits) == ("failed", f"it hung: {stall.sentence}", ())


@pytest.mark.parametrize(
    ("reached", "wait"),
    [([3], 1.0), ([3, 3], 5.0), ([3, 3, 3], 30.0), ([3] * 4, None), ([NO_STEP] * 4, None)],
)
def test_when_a_run_is_started_again(reached, wait, texts):
    assert after_attempt(FAILED, reached, 9)[0] == wait


def test_whether_a_run_is_tried_with_all_replicas_again(texts, tmp_path):
    elastic = Elastic({1: 2, 2: 4}, 60.0, tmp_path, lambda *_: False)
    assert not elastic.refuses_fewer()
    elastic.lost([3], True, 1.0)
    assert len(elastic.slots) == 2 and elastic.refuses_fewer()
    elastic.handed_over()
    assert len(elastic.slots) == 4


def test_what_is_waited_for_travels_as_a_value(texts, tmp_path):
    run, *_ = decision(tmp_path)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    for rank, report in run.reports.items():
        leave_file(folder, f"testimony-{rank}.json", report)
        assert read_report(tmp_path, rank) == report
    os.close(folder)
    assert run.reports[3].waiting[0].why == Wait(WaitCause.LEADER, group=(2, 3))
