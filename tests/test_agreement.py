"""Processes that share a stage: one order on all of them, whatever arrives when; and what happens without."""

import json
import re

import pytest

from benchmarks.failure_cell import Cell, run_launched
from benchmarks.failures import END_SECONDS, faults_of
from tests import toy
from tests.test_processes import command

RANKS, CASES = 4, 8  # of group_ranks.py; stage 0 has ranks 0 and 1

SILENCE = 10.0


def launched(folder, *arguments):
    ranks = ("-n", RANKS, "-m", "tests.group_ranks", folder, *arguments)
    return command("rrfp_jax.train.launch", *ranks, folder=folder, limit=400.0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank of a launch found, which goes through all cases."""
    folder = tmp_path_factory.mktemp("groups")
    status, said = launched(folder)
    assert status == 0, said
    return [json.loads((folder / f"orders-{rank}.json").read_text()) for rank in range(RANKS)]


def test_ranks_of_a_stage_dispatch_the_same_although_they_get_their_inputs_in_different_orders(ranks):
    assert len(ranks[0]["cases"]) == CASES
    for case in ranks[0]["cases"]:
        orders = [rank["cases"][case]["orders"] for rank in ranks]
        assert orders[0] == orders[1] and orders[2] == orders[3], case
        assert all(len(set(order)) == len(order) for rank in orders for order in rank)


def test_results_are_equal_to_the_bit_whatever_the_protocol_the_carrier_and_the_schedule(ranks):
    for rank in ranks:
        found = [numbers for case in rank["cases"].values() for numbers in case["numbers"]]
        assert all(numbers == found[0] for numbers in found)


def test_training_is_that_of_one_process(ranks):
    own = [report.loss for report in toy.trainer(2).steps(2)]
    assert all(rank["losses"] == pytest.approx(own, rel=1e-5) for rank in ranks)


def test_without_agreement_the_run_ends_with_ranks_position_and_tasks_named(tmp_path):
    status, said = launched(tmp_path, "off")
    found = re.search(
        r"^rrfp-launch: rank (\d) \(stage (\d)\) and rank (\d) \(stage (\d)\) dispatched different tasks as "
        r"number (\d+), in step (\d+): the first ([FB]\d), the second ([FB]\d); ",
        said,
        re.MULTILINE,
    )
    assert status == 1 and found, said
    one, its_stage, other, same_stage, _, _, task, another = found.groups()
    assert its_stage == same_stage and (one, other) in {("0", "1"), ("2", "3")} and task != another
    assert "Traceback" not in said, said


@pytest.mark.parametrize(("rank", "way"), [(2, "kill"), (3, "freeze")], ids=["leader", "follower"])
def test_a_member_that_is_gone_is_named(rank, way, tmp_path):
    cell = Cell(rank, way, "step", tp=2)
    outcome = run_launched(cell, SILENCE, tmp_path)
    assert faults_of(cell, outcome) == [], outcome.text
    assert outcome.seconds < SILENCE + END_SECONDS


def test_a_store_that_does_not_answer_is_named(tmp_path):
    outcome = run_launched(Cell(0, "store", "step", tp=2), SILENCE, tmp_path)
    assert outcome.statuses == [1] and not outcome.left and not outcome.hung, outcome.text
    said = r"rrfp-launch: rank \d \(stage \d\) failed: the key-value store, .* has not answered for 10 s"
    assert re.match(said, outcome.sentences[0]), outcome.text
    assert outcome.seconds < SILENCE + END_SECONDS
