"""Who is blamed that a run does not move: what ranks recorded and said goes in, a sentence comes out."""

import threading
import time

import pytest

from rrfp_jax.authors import OURS
from rrfp_jax.core.events import WaitCause
from rrfp_jax.core.hints import BFW
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.launcher.hang import render_report
from rrfp_jax.launcher.snapshot import RankSnapshot
from rrfp_jax.runtime.run.recorder import (
    COMING,
    COMPILING,
    DELIVERED,
    OFFERED,
    PRODUCED,
    STARTING,
    FlightRecorder,
    read,
)
from rrfp_jax.runtime.run.stacks import StackFrame, Thread
from rrfp_jax.runtime.run.status_report import StatusReport
from rrfp_jax.runtime.run.waits import ForData, ForDevices
from tests.support.recorded_run import AWAIT_READY, DRIVER, LIBRARY, USERS, Run, grouped, judge, task_of


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def all_forwards(run, lost=()):
    """Stage 0 has run F0 to F2, stage 1 and 2 what has come; of what stage 1 sends some is lost."""
    run.runs(0, "F0", "F1", "F2")
    run.gets(1, "F0", "F1", "F2")
    run.runs(1, "F0", "F1", "F2")
    come = [name for name in ("F0", "F1", "F2") if name not in lost]
    run.gets(2, *come)
    run.runs(2, *come)
    for rank in range(3):
        run.waits(rank)


def test_a_message_that_was_not_heard_of(run):
    all_forwards(run, lost=["F1"])
    verdict = run.judged()
    assert verdict.sentence == (
        "rank 1 (stage 1) has sent the input of F1 on stage 2 in step 7 to rank 2 (stage 2), which has not "
        "heard of it"
    )
    assert (verdict.moves, verdict.blamed) == (False, [1, 2])
    assert len(verdict.lines) == 3 and "waits for the input of F0 on stage 2" in verdict.lines[2]


def test_of_several_lost_messages_the_first_is_named(run):
    all_forwards(run, lost=["F1", "F2"])
    assert "the input of F1 on stage 2" in run.judged().sentence
    assert run.judged().sentence.endswith("(and 1 more such message)")


def test_a_message_whose_data_does_not_come(run):
    all_forwards(run, lost=["F2"])
    run.gets(2, "F2", bits=COMING)
    assert run.judged().sentence.endswith("which has heard of it, but its data has not come")


def test_a_lost_gradient(run):
    all_forwards(run)
    run.runs(2, "B0")
    assert run.judged().sentence.startswith(
        "rank 2 (stage 2) has sent the input of B0 on stage 1 in step 7 to rank 1 (stage 1), which"
    )


def test_what_is_sent_to_a_rank_that_does_not_listen_is_not_lost(run):
    all_forwards(run, lost=["F1", "F2"])
    run.says(2, [], frames=[USERS, *DRIVER])
    verdict = run.judged()
    assert (
        verdict.sentence == "rank 2 (stage 2) is in the user's block (train.py:31); 2 other ranks wait for it"
    )
    assert verdict.blamed == [2]


def test_a_rank_that_has_not_come_to_the_step(run):
    all_forwards(run)
    rules = StepRules(placement=run.placement, microbatches=3, schedule=BFW())
    run.recorders[2].begin_round(8, 6, rules, [2])
    run.says(2, [ForData(call="load", step=7, microbatch=1, waited=30.0)], frames=[USERS, *DRIVER])
    assert run.judged().sentence == (
        "rank 2 (stage 2) waits for the data's load() of microbatch 1 of step 7, since 30.0 s, in the user's "
        "block (train.py:31); 2 other ranks wait for it"
    )


def test_data_that_is_loaded_by_another_thread(run):
    run.threads[0] = [Thread("rrfp-load", False, (LIBRARY, USERS))]
    run.says(0, [ForData(call="plan", step=7, waited=30.0)])
    run.waits(1)
    run.waits(2)
    assert run.judged().sentence.startswith(
        "rank 0 (stage 0) waits for the data's plan(7), since 30.0 s, in the user's block"
    )


def test_threads_for_which_nobody_waits_are_not_blamed(run):
    """One that loads the next step's data, and one of the user's own."""
    started = StackFrame(threading.__file__, 1002, "_bootstrap")
    ours = StackFrame(f"{OURS}train/loading.py", 152, "_load")
    run.threads[2] = [
        Thread("rrfp-load", False, (LIBRARY, USERS, ours, started)),
        Thread("monitor", False, (LIBRARY, USERS, started)),
    ]
    all_forwards(run, lost=["F1"])
    assert run.judged().blamed == [1, 2] and "user's" not in run.judged().text
    run.threads[2].append(Thread("140", False, (USERS,)))  # of a runtime that calls back
    all_forwards(run, lost=["F1"])
    assert run.judged().sentence.startswith("rank 2 (stage 2) waits for the input of F0 on stage 2 in step 7")
    assert ", in the user's block (train.py:31); 2 other ranks wait" in run.judged().sentence


def test_a_program_that_does_not_end(run):
    all_forwards(run)
    run.runs(2, "B0", ends=False)
    run.waits_for_the_end(2, "B0")
    sentence = run.judged().sentence
    assert sentence.startswith("rank 2 (stage 2) runs B0, dispatched ")
    assert sentence.endswith(" ago, which has not ended; 2 other ranks wait for it")


def test_a_task_that_could_run_and_does_not(run):
    all_forwards(run)
    assert run.judged().sentence.startswith("rank 2 (stage 2) waits for the input of F0 on stage 2")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("stopped", "stands still: it was stopped, as by SIGSTOP"),
        ("gone", "has ended, and the others have not noticed yet"),
        ("silent", "does not answer: something holds its interpreter, its last sign of life was "),
    ],
)
def test_a_rank_that_cannot_answer_comes_first(run, state, words):
    all_forwards(run, lost=["F1"])
    run.states[0] = state
    assert run.judged().sentence.startswith(f"rank 0 (stage 0) {words}")


def test_a_rank_that_still_starts_is_silent_and_not_stuck(run):
    all_forwards(run, lost=["F1"])
    run.recorders[0].phase(STARTING)
    del run.reports[0]
    assert run.judged().blamed == [1, 2]


def test_a_gather_that_one_has_not_come_to(run):
    for rank in (0, 1):
        run.gathers(rank, "the clocks", [2])
    run.says(2, [], gathers=4, frames=[USERS])
    assert run.judged().sentence.startswith("rank 2 (stage 2) is in the user's block")


def test_a_value_of_a_gather_that_is_lost(run):
    for rank in (0, 1):
        run.gathers(rank, "the clocks", [2])
    run.gathers(2, "the names", [0, 1], number=6)
    assert run.judged().sentence == (
        "rank 2 (stage 2) has sent its value of the clocks to rank 0 (stage 0), which has not heard of it "
        "(and 1 more such message)"
    )


def test_a_ring_blames_nobody_alone(tmp_path):
    run = Run(tmp_path, stages=2)
    run.runs(0, "F0")
    run.gets(1, "F0")
    run.runs(1, "F0")
    run.waits(0, WaitCause.ORDER, "B0")
    run.waits(1, WaitCause.ORDER, "F1")
    verdict = run.judged()
    assert verdict.sentence == "the ranks wait for one another: rank 0 (stage 0), rank 1 (stage 1)"
    assert verdict.blamed == [0, 1]


def test_a_run_that_moves(run):
    all_forwards(run, lost=["F2"])
    verdict = judge(run.sights(later=0.3))
    assert verdict.moves and verdict.blamed == ()
    assert verdict.sentence.startswith("the run moves (step 7): 0.")
    assert not judge(run.sights(later=0.3), stalls=True).moves


def test_one_process_alone(tmp_path):
    run = Run(tmp_path, stages=1)
    run.says(0, [], frames=[USERS])
    assert run.judged().sentence == "rank 0 (stage 0) is in the user's block (train.py:31)"
    assert judge(run.sights(later=0.1)).sentence.startswith("the run moves (step 7)")


def test_stacks_are_told_once_and_those_of_the_blamed_first(run):
    all_forwards(run, lost=["F2"])
    run.says(0, [], frames=[LIBRARY])
    text = render_report(run.judged().report)
    assert text.count("thread MainThread (main)") == 2
    assert text.index("rank 1 (stage 1), rank 2 (stage 2):\n") < text.index("rank 0 (stage 0):\n")
    assert f"    {LIBRARY.file}:890 __call__" in text
    assert "rank 0 (stage 0):\n" not in render_report(run.judged().report, blamed_only=True)


def test_a_delivered_message_stays_known_as_sent(run):
    run.runs(0, "F0")
    run.recorders[0].sent(0, task_of("F0"), DELIVERED)
    assert run.sights()[0].recording.round.sent(0, task_of("F0").input) == OFFERED | PRODUCED | DELIVERED


def test_a_decision_that_was_not_heard(tmp_path):
    run = grouped(tmp_path)
    run.runs(2, "B0", ends=False)
    run.recorders[2].told()
    run.waits_for_the_end(2, "B0")
    run.waits(3, WaitCause.LEADER, group=(2, 3))
    assert run.judged().sentence == (
        "rank 2 (stage 1) has sent decision 1 (B0) of their group in step 7 to rank 3 (stage 1), which has "
        "not heard of it"
    )


def test_a_follower_waits_for_a_leader_that_is_elsewhere(tmp_path):
    run = grouped(tmp_path)
    run.says(2, [], frames=[USERS])
    run.waits(3, WaitCause.LEADER, group=(2, 3))
    verdict = run.judged()
    assert verdict.blamed == [2] and "3 other ranks wait for it" in verdict.sentence


def test_a_follower_that_has_not_run_what_its_leader_runs(tmp_path):
    run = grouped(tmp_path)
    run.runs(2, "B0", ends=False)
    run.recorders[2].told()
    run.recorders[3].heard(0)
    run.waits_for_the_end(2, "B0")
    run.says(3, [], frames=[USERS])
    assert run.judged().sentence.startswith("rank 3 (stage 1) is in the user's block")


def test_a_member_that_is_still_in_an_earlier_round(tmp_path):
    run = Run(tmp_path, stages=1, width=2, microbatches=1)
    for rank, recorder in enumerate(run.recorders):
        run.runs(rank, "F0", "B0")
        recorder.told()
    rules = StepRules(placement=run.placement, microbatches=1, schedule=BFW())
    run.recorders[0].begin_round(10, 7, rules, [0])
    run.recorders[0].joins([0, 1])
    run.recorders[0].told()
    run.waits(0, WaitCause.PROPOSALS)
    run.says(1, [])
    assert run.judged().blamed == [1]
    run.runs(0, "F0", ends=False)
    run.waits_for_the_end(0, "F0")
    assert run.judged().blamed == [1]


def test_different_tasks_at_one_position(tmp_path):
    run = Run(tmp_path, stages=1, width=2)
    run.runs(0, "F0", "F1")
    run.runs(1, "F0", "B0")
    for rank in (0, 1):
        run.waits(rank)
    verdict = run.judged()
    assert verdict.blamed == [0, 1]
    assert (
        "dispatched different tasks as number 2, in step 7: the first F1, the second B0" in verdict.sentence
    )


@pytest.mark.parametrize("frames", [AWAIT_READY, (LIBRARY, *DRIVER)], ids=["waits", "is inside"])
def test_a_program_of_several_ranks_that_one_left_out(tmp_path, frames):
    run = Run(tmp_path, stages=1, replicas=2, microbatches=1)
    run.recorders[1].enters("the sum of the replicas' gradients")
    run.says(
        1,
        [ForDevices(what="the gradients", waited=3.0)] if frames == AWAIT_READY else [],
        gathers=4,
        frames=frames,
    )
    run.gathers(0, "the results", [1])
    verdict = run.judged()
    assert verdict.sentence.startswith(
        "rank 0 (stage 0 of replica 0) has not entered the sum of the replicas' gradients, in which rank 1 "
        "(stage 0 of replica 1) waits for it"
    )
    assert verdict.blamed == [0]


def test_a_program_of_several_ranks_that_one_has_not_come_to(tmp_path):
    run = Run(tmp_path, stages=1, replicas=2, microbatches=1)
    run.recorders[1].enters("the sum of the replicas' gradients")
    run.says(1, [ForDevices(what="the gradients", waited=3.0)], frames=AWAIT_READY)
    run.says(0, [], frames=[USERS])
    assert run.judged().sentence.startswith("rank 0 (stage 0 of replica 0) is in the user's block")


def test_one_still_compiles_while_another_of_its_stage_waits_in_their_first_sum(tmp_path):
    for rank in range(2):
        recorder = FlightRecorder(tmp_path / f"flight-{rank}", rank, "stage 0")
        recorder.phase(COMPILING)
        if rank == 0:
            recorder.enters("the first sum over all devices of stage 0")
    threads = [Thread("MainThread", True, (LIBRARY, *DRIVER))]
    said = StatusReport(rank=0, number=1, waiting=(), gathers=1, threads=tuple(threads))
    sights = [
        RankSnapshot(
            rank=rank,
            state="answers",
            now=time.time() + 60,
            recording=read(tmp_path / f"flight-{rank}"),
            report=said,
            threads=threads,
        )
        for rank in range(2)
    ]
    assert judge(sights).moves and judge(sights).sentence.startswith("all ranks are compiling, for ")
    verdict = judge(sights, stalls=True)
    assert verdict.blamed == [1]
    assert verdict.sentence.startswith("rank 1 (stage 0) compiles, and is in __call__ (")
    assert ", called by sleep (" in verdict.sentence
    assert verdict.sentence.endswith("; another rank waits for it")


def test_ranks_that_start_and_wait_for_nobody(tmp_path):
    """JAX traces the user's code then; whoever is in it for long is named all the same."""
    run = Run(tmp_path)
    for rank, recorder in enumerate(run.recorders):
        recorder.phase(COMPILING if rank else STARTING)
        run.says(rank, [], frames=[USERS, *DRIVER])
    verdict = judge(run.sights(later=5.0))
    assert verdict.moves and verdict.sentence.startswith("all ranks are starting or compiling, for 5.")
    for late, stalls in ((60.0, False), (5.0, True)):
        assert not judge(run.sights(later=late), stalls=stalls).moves
    run.gathers(0, "the names", [2], number=6)
    verdict = judge(run.sights(later=5.0))
    assert not verdict.moves
    assert verdict.sentence == (
        "rank 2 (stage 2) is in the user's block (train.py:31); another rank waits for it"
    )
