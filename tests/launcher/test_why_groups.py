"""Who is blamed that a run does not move: in a group, in a program of several ranks, while ranks start."""

import time

import pytest

from rrfp_jax.core.events import WaitCause
from rrfp_jax.launcher.snapshot import RankSnapshot
from rrfp_jax.runtime.run.recorder import COMPILING, STARTING, FlightRecorder, read
from rrfp_jax.runtime.run.stacks import Thread
from rrfp_jax.runtime.run.status_report import StatusReport
from rrfp_jax.runtime.run.waits import ForDevices
from tests.support.recorded_run import AWAIT_READY, DRIVER, LIBRARY, USERS, Run, grouped, judge


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
