"""A slice of `tests.verification.nodes`, and that it finds what is wrong."""

from dataclasses import replace

import pytest

from tests.verification.nodes import FAULTS, MOMENTS, STEPS, Outcome, faults_of, named, run_cell, undisturbed

CUT, SLOW = FAULTS["cut"], FAULTS["2 Mbit/s"]
GONE = (
    "rank 0 (stage 0, host n0): rank 2 (stage 2, host n2) has not been heard from for 4 s: frozen or cut off"
)
RIGHT = Outcome(
    came=True,
    statuses=[1, 1, 1, 1],
    seconds=[4.5] * 4,
    sentences=[GONE, GONE, "rank 2 (stage 2): rank 1 (stage 1) has not been heard from", GONE],
    steps=list(range(STEPS)),
    same_losses=True,
    resumed=[0] * 4,
    texts=[""] * 4,
)
DONE = replace(RIGHT, statuses=[0] * 4, sentences=[""] * 4)


def test_what_is_right_has_no_fault():
    assert faults_of(CUT, "step", RIGHT) == []
    assert faults_of(CUT, "shutdown", DONE) == []
    assert faults_of(SLOW, "step", DONE) == []


@pytest.mark.parametrize(
    ("fault", "found", "said"),
    [
        (CUT, replace(RIGHT, came=False), "the moment did not come: [1, 1, 1, 1]"),
        (CUT, replace(RIGHT, statuses=[1, None, 1, 1]), "rank 1 hung"),
        (CUT, replace(RIGHT, statuses=[1, 1, None, 1]), "rank 2 hung"),
        (CUT, replace(RIGHT, statuses=[1, 1, 1, 0]), "rank 3 ended with status 0"),
        (
            CUT,
            replace(RIGHT, sentences=[*RIGHT.sentences[:3], "rank 3 (stage 3): rank 1 is gone"]),
            "rank 3 names 1: ",
        ),
        (CUT, replace(RIGHT, sentences=[""] * 4), "rank 0 names None: ''"),
        (CUT, replace(RIGHT, resumed=[1, 0, 0, 0]), "started again, it ended with [1, 0, 0, 0]"),
        (CUT, replace(RIGHT, steps=[0, 1, 1, 2]), "steps lost, repeated or changed: [0, 1, 1, 2]"),
        (CUT, replace(RIGHT, steps=[0, 2]), "steps lost, repeated or changed: [0, 2]"),
        (CUT, replace(RIGHT, same_losses=False), "steps lost, repeated or changed: [0, 1, 2, 3, 4, 5, 6, 7]"),
        (SLOW, RIGHT, "it ended: [1, 1, 1, 1]"),
    ],
)
def test_what_is_wrong_is_found(fault, found, said):
    assert any(each.startswith(said) for each in faults_of(fault, "step", found))


def test_a_sentence_is_about_the_rank_that_it_names_after_who_says_it():
    assert [named(each) for each in RIGHT.sentences] == [2, 2, 1, 2]
    assert named("") is None


def test_every_cell_that_is_not_run_has_its_reason():
    assert all(
        set(fault.nothing) <= set(MOMENTS) and all(fault.nothing.values()) for fault in FAULTS.values()
    )


@pytest.mark.slow(reason="60 s: three runs; launcher/test_failures.py has faults on one node")
@pytest.mark.parametrize("name", ["cut"])
def test_a_fault_ends_the_run_names_its_rank_and_loses_nothing(nodes, tmp_path, name):
    calm = undisturbed(nodes, tmp_path / "calm")
    found = run_cell(FAULTS[name], "step", nodes, tmp_path, calm)
    assert faults_of(FAULTS[name], "step", found) == []
