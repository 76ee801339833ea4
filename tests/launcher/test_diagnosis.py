"""Which rank is to blame, from what all of them left behind; no process is started."""

from signal import SIGABRT, SIGKILL, SIGSEGV, SIGTERM

import pytest

from rrfp_jax.core.tasks import BACKWARD, Task
from rrfp_jax.launcher import end as ends
from rrfp_jax.launcher.end import RankEnd, render_end
from rrfp_jax.runtime.run.exits import ExitReport
from rrfp_jax.runtime.run.recorder import RecordedDispatch, Recording, RunPhase
from rrfp_jax.runtime.run.waits import ForOther

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: bad value\n'


def words(rank, kind="peer lost", sentence="", at=100.0, **more):
    return ExitReport(rank=rank, stages=f"stage {rank}", kind=kind, sentence=sentence, time=at, **more)


def recording(rank, at=99.2, name="step"):
    last = (RecordedDispatch(1, 12, rank, Task(BACKWARD, 0, 3), at),)
    phase = RunPhase(name, 12)
    return Recording(rank, 1, f"stage {rank}", phase, at, at, last)


class Found:
    """How a run ended, with its words."""

    def __init__(self, end):
        self.status, self.lost, self.text = end.status, end.lost, render_end(end)


def diagnose(ranks, **more):
    return Found(ends.diagnose(ranks, **more))


def end(rank, status=1, ended=100.0, **more):
    return RankEnd(rank=rank, status=status, ended=ended, **more)


def lost(rank, culprit, at=100.0):
    waiting = (ForOther(what=f"input of F3 on stage {rank} in step 12", waited=2.1),)
    sentence = f"rank {culprit} was lost"
    return end(rank, ended=at, report=words(rank, sentence=sentence, at=at, culprit=culprit, waiting=waiting))


def failed(rank, sentence="ValueError: bad value", at=100.0, trace=TRACE):
    return end(rank, report=words(rank, "failed", sentence, at, traceback=trace))


def first_line(*ranks):
    found = diagnose(ranks)
    assert found.status == 1
    return found.text.splitlines()[0]


def test_all_well():
    assert (diagnose([end(0, 0), end(1, 0)]).status, diagnose([end(0, 0)]).text) == (0, "")


def test_a_killed_rank_is_named_with_what_it_did_and_what_the_others_waited_for():
    found = diagnose([lost(0, 1), lost(1, 2), end(2, -SIGKILL, recording=recording(2)), lost(3, 2)])
    assert found.status == 1
    assert found.text.splitlines() == [
        "rank 2 (stage 2) was killed by SIGKILL (sent by hand, or by the kernel for want of memory)",
        "  it was in step 12, last dispatched B3 on stage 2, 0.8 s before",
        "  rank 0 (stage 0): waited for input of F3 on stage 0 in step 12, since 2.1 s",
        "  rank 1 (stage 1): waited for input of F3 on stage 1 in step 12, since 2.1 s",
        "  rank 3 (stage 3): waited for input of F3 on stage 3 in step 12, since 2.1 s",
    ]


def ring(rank, tasks, first=1):
    """Stage 1's flight recorder with these microbatches' backwards, the first of them at a position."""
    last = [RecordedDispatch(at, 12, 1, Task(BACKWARD, 0, j), 99.0) for at, j in enumerate(tasks, first)]
    return Recording(rank, 1, "stage 1", RunPhase("step", 12), 99.0, 99.0, tuple(last))


def test_ranks_of_a_stage_that_dispatched_different_tasks_are_named_whatever_came_of_it():
    recordings = ring(2, [0, 1, 2, 3, 5]), ring(3, [2, 4, 3], first=3)
    found = diagnose(
        [lost(0, 3), end(2, -SIGABRT, recording=recordings[0]), end(3, -SIGABRT, recording=recordings[1])]
    )
    assert found.status == 1
    assert found.text.startswith(
        "rank 2 (stage 1) and rank 3 (stage 1) dispatched different tasks as number 4, in step 12: the first "
        "B3, the second B4; "
    )
    assert "\n  rank 0 (stage 0): waited for " in found.text and "\n  rank 3 (stage 1), in " in found.text


def test_ranks_of_a_stage_may_be_at_different_positions():
    recordings = ring(2, [0, 1, 2, 3]), ring(3, [1, 2], first=2)
    assert "rank 3 (stage 1) was killed" in first_line(
        lost(2, 3), end(2, 1, recording=recordings[0]), end(3, -SIGKILL, recording=recordings[1])
    )


def test_an_exception_is_shown_with_its_traceback_once():
    found = diagnose([lost(0, 1), failed(1), end(2, -SIGTERM, by_launcher=True)])
    assert found.text.startswith("rank 1 (stage 1) raised ValueError: bad value\n")
    assert found.text.count("Traceback") == 1
    assert found.text.endswith("  rank 2: ended by the launcher (SIGTERM)")


def test_of_two_failures_the_first_is_the_cause():
    assert first_line(failed(0, "KeyError: 2", at=101.0), failed(1)).startswith(
        "rank 1 (stage 1) raised Value"
    )


def test_a_failure_that_all_share_is_told_once():
    found = diagnose([failed(0), failed(1)])
    assert found.text.startswith("all ranks raised ValueError: bad value\n")
    assert found.text.count("Traceback") == 1


@pytest.mark.parametrize(
    ("number", "died", "blamed"),
    [(SIGKILL, 101.0, 0), (SIGKILL, 99.0, 1), (SIGABRT, 99.0, 0), (SIGABRT, 101.0, 0)],
)
def test_a_death_is_the_cause_of_a_later_failure_unless_it_is_an_abort(number, died, blamed):
    assert first_line(failed(0), end(1, -number, ended=died)).startswith(f"rank {blamed} ")


def test_an_abort_shows_the_end_of_the_log():
    log = [f"line {i}" for i in range(30)]
    found = diagnose([end(0, -SIGABRT, log_tail=log), lost(1, 0)])
    assert found.text.startswith("rank 0 aborted (SIGABRT)\n  the end of its log:\n    line 18\n")


def test_a_crash_shows_where_it_begins():
    crash = ["F1121 15:40:38.5 1 client.h:80] Terminating because the JAX distributed service detected fatal"]
    log = ["all well", *crash, "Fatal Python error: Aborted", *(f"Thread {i}" for i in range(300))]
    found = diagnose([end(0, -SIGABRT, log_tail=log), lost(1, 0)]).text.splitlines()
    assert found[0] == "rank 0 aborted (SIGABRT), as JAX does without its coordination service"
    assert found[1:4] == ["  the end of its log:", f"    {crash[0]}", "    Fatal Python error: Aborted"]
    assert "    Thread 9" in found and "    Thread 10" not in found


def test_a_rank_that_knows_that_it_was_cut_off():
    ranks = [lost(0, 2), lost(1, 2), end(2, report=words(2, sentence="lost all", culprit=2))]
    assert first_line(*ranks).startswith("rank 2 (stage 2) was cut off: ")


def test_an_abort_after_another_death_is_a_consequence():
    ranks = [end(0, -SIGABRT, ended=99.0), end(1, -SIGSEGV, ended=100.0)]
    assert first_line(*ranks) == "rank 1 was killed by SIGSEGV"


def test_a_frozen_rank():
    frozen = end(1, -SIGKILL, by_launcher=True, stopped=True, recording=recording(1, at=70.0))
    found = diagnose([lost(0, 1), frozen])
    assert found.text.splitlines()[:2] == [
        "rank 1 (stage 1) was frozen (stopped)",
        "  it was in step 12, last dispatched B3 on stage 1, 30.0 s before, last sign of life 30.0 s before",
    ]


def test_a_status_without_a_word_shows_the_traceback_in_the_log():
    log = ["hello", *TRACE.splitlines(), *(f"later {i}" for i in range(20))]
    found = diagnose([end(0, 7, log_tail=log), end(1, -SIGTERM, by_launcher=True)])
    assert found.text.startswith(
        "rank 0 exited with status 7 without a message\n  the end of its log:\n    Trace"
    )


def test_the_first_to_end_badly_is_the_cause():
    assert first_line(end(0, 1, ended=101.0), end(1, 3), end(2, 0, ended=99.0)).startswith("rank 1 exited")


def test_the_rank_that_left_early_is_named_by_the_others():
    assert (
        first_line(lost(0, 1), end(1, 0), lost(2, 1))
        == "rank 1 ended with status 0 while others still needed it"
    )


@pytest.mark.parametrize("order", [(100.0, 100.1, 100.2), (100.2, 100.1, 100.0), (100.1, 100.0, 100.2)])
def test_a_rank_cut_off_is_named_by_the_majority(order):
    ranks = [lost(0, 2, order[0]), lost(1, 2, order[1]), lost(2, 1, order[2])]
    assert first_line(*ranks) == (
        "rank 2 (stage 2) was cut off: it was alive, but others lost it, and it lost them"
    )


def test_two_that_lost_each_other_are_both_named():
    found = diagnose([lost(0, 1), lost(1, 0)])
    assert (
        found.text.splitlines()[0]
        == "rank 0 (stage 0) and rank 1 (stage 1) lost each other, though each was alive"
    )
    assert len(found.text.splitlines()) == 3


def test_a_silent_rank_that_others_name():
    assert first_line(lost(0, 1), end(1, -SIGKILL, by_launcher=True)) == (
        "rank 1 gave no more signs of life and had to be killed"
    )


def test_a_loss_of_nobody_in_particular_is_told_as_it_is():
    gave_up = end(0, report=words(0, sentence="no progress for 300 s"))
    assert first_line(gave_up, end(1, -SIGTERM, by_launcher=True)) == (
        "rank 0 (stage 0) gave up: no progress for 300 s"
    )


def refused(rank, sentence="no such file"):
    return end(rank, 2, report=words(rank, "refused", sentence))


def test_refusals_of_all_are_told_once():
    found = diagnose([refused(0), refused(1), end(2, 2, log_tail=["no such file", ""])])
    assert (found.status, found.text) == (2, "all ranks: no such file")
    assert diagnose([refused(0)]).text == "no such file"


def test_a_refusal_that_differs_is_named_first():
    found = diagnose([refused(0), refused(1, "no memory"), refused(2)])
    assert (found.status, found.text) == (
        2,
        "rank 1 (stage 1): no memory\nrank 0 (stage 0), rank 2 (stage 2): no such file",
    )


def test_a_refusal_of_one_is_a_failure_of_the_run():
    assert first_line(refused(0), lost(1, 0)) == "rank 0 (stage 0) refused: no such file"


def test_interrupted():
    assert diagnose([end(0, 130), end(1, 0)], interrupted=True).text == "interrupted"
    found = diagnose([end(0, 130), end(1, -SIGKILL, by_launcher=True)], interrupted=True)
    assert (found.status, found.text) == (130, "interrupted\n  rank 1: ended by the launcher (SIGKILL)")


def test_one_rank_interrupted_alone_is_named():
    found = diagnose([end(0, 130, report=words(0, "interrupted")), lost(1, 0)])
    assert found.status == 130
    assert found.text.startswith("rank 0 (stage 0) was interrupted\n")


def test_many_waits_are_cut_short():
    many = words(1, culprit=0, waiting=tuple(ForOther(what=f"F{j}", waited=1.0) for j in range(9)))
    assert diagnose([end(0, -SIGKILL), end(1, report=many)]).text.endswith(
        "waited for F0, since 1.0 s; F1, since 1.0 s; F2, since 1.0 s; and 6 more"
    )


class TestWhatPythonSaysBeforeARankHasJoined:
    def test_a_refusal_by_all_is_a_refusal(self):
        log = ("Traceback (most recent call last):", '  File "t.py"', "rrfp_jax.errors.UsageError: pp=0: no")
        found = diagnose([end(rank, log_tail=log) for rank in range(2)])
        assert (found.status, found.text) == (2, "all ranks: pp=0: no")

    def test_an_exception_is_not_called_silence(self):
        log = ("Traceback (most recent call last):", '  File "t.py"', "KeyError: 'x'")
        assert first_line(end(0, log_tail=log)) == "rank 0 exited with status 1 after KeyError: 'x'"
        assert first_line(end(0, log_tail=("",))) == "rank 0 exited with status 1 without a message"

    @pytest.mark.parametrize("status", [1, 3])
    def test_what_is_said_instead_of_an_exception_is_told(self, status):
        told = f"rank 0 exited with status {status}; its last line: rrfp train: the loss is nan"
        assert first_line(end(0, status, log_tail=("step 1", "rrfp train: the loss is nan", ""))) == told
