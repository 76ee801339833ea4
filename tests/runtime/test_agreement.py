"""Processes that share a stage: one order on all of them, whatever arrives when; and what happens without."""

import functools
import json
import re

import pytest

from tests.support import toy
from tests.support.selected import selected
from tests.train.test_processes import command
from tests.verification.failures import END_SECONDS, Cell, faults_of, run_launched

SILENCE = 10.0

SIZES = {
    4: {"2 2 1": 10, "2 1 2": 3, "2 2 1 tied": 2, "1 2 2 few": 2},
    6: {"2 1,2 2 few": 2},  # two, then four
    3: {
        "2 2,4 1 few": 2,
        "2 2,1 1 whole": 2,
    },  # two devices each: one process, then two; two processes, then one
}
"""By number of processes the meshes that one launch goes through; the number of cases of each."""


def launched(folder, count, *meshes):
    ranks = ("-n", count, "-m", "tests.support.group_ranks", folder, *meshes)
    return command("rrfp_jax", "launch", *ranks, folder=folder, limit=500.0)


@pytest.fixture(scope="module")
def launch(request, tmp_path_factory):
    """The folder of a launch of so many processes, through the meshes of tests that are to run."""
    wanted = selected(request, "mesh")

    @functools.cache
    def launch(count):
        folder = tmp_path_factory.mktemp("groups")
        status, said = launched(folder, count, *(size for number, size in wanted if number == count))
        assert status == 0, said
        return folder

    return launch


SMALLEST = "2 2,4 1 few"
SLOW = pytest.mark.slow(reason="15 to 60 s: four to six processes; three are enough for agreement")


@pytest.fixture(
    params=[
        pytest.param((count, size), id=size, marks=[] if size == SMALLEST else SLOW)
        for count, sizes in SIZES.items()
        for size in sizes
    ]
)
def mesh(request):
    return request.param


@pytest.fixture
def size(mesh):
    return mesh[1]


@pytest.fixture
def ranks(mesh, launch):
    """What every rank found, by the stage and replica that it belongs to."""
    count, size = mesh
    groups = {}
    files = sorted((launch(count) / size).glob("ranks-*.json"))
    assert len(files) == count
    for file in files:
        found = json.loads(file.read_text())
        assert len(found["cases"]) == SIZES[count][size]
        groups.setdefault(found["stages"], []).append(found)
    return groups


def passes(rank, schedules=("bf", "bfw", "ranked:zb-h2")):
    """Of all cases with these schedules."""
    return [one for case, own in rank["cases"].items() if case.split()[-1] in schedules for one in own]


@pytest.mark.costly(reason="a launch for all tests of a mesh")
def test_ranks_of_a_stage_dispatch_the_same_although_they_get_their_inputs_in_different_orders(ranks):
    for group in ranks.values():
        orders = [[one["order"] for one in passes(rank)] for rank in group]
        assert all(own == orders[0] for own in orders)
        assert all(len(set(order)) == len(order) for own in orders for order in own)


def test_gradients_are_those_of_plain_jax(ranks):
    for group in ranks.values():
        for rank in group:
            assert max(one["leaf_error"] for one in passes(rank)) <= 1e-5
            assert max(one["loss_error"] for one in passes(rank)) <= 1e-6


def test_results_are_equal_to_the_bit_from_run_to_run_whatever_the_protocol_and_the_carrier(ranks):
    """Split and fused backwards of spread tensors are different programs, which may round differently."""
    for group in ranks.values():
        for rank in group:
            for schedule in {case.split()[-1] for case in rank["cases"]}:
                assert len({(one["loss"], one["hash"]) for one in passes(rank, (schedule,))}) == 1


@functools.cache
def losses_of_one_process(tied):
    pipe = toy.tied_pipeline() if tied else None
    trainer = toy.trainer(2, pipe=pipe, data=lambda step: toy.microbatches(8, seed=step))
    return [report.loss for report in trainer.steps(2)]


def test_training_is_that_of_one_process(size, ranks):
    own = losses_of_one_process(size.endswith("tied"))
    for group in ranks.values():
        assert all(rank["losses"] == pytest.approx(own, rel=1e-5) for rank in group)


def test_all_have_the_hint_that_rank_0_chooses(ranks):
    assert len({tuple(rank["chosen"]) for group in ranks.values() for rank in group}) == 1


@pytest.mark.slow(reason="a run of three processes that fails")
def test_without_agreement_the_run_ends_with_ranks_position_and_tasks_named(tmp_path):
    status, said = launched(tmp_path, 3, "2 2,4 1 off")
    found = re.search(
        r"^rrfp launch: rank (\d) \(stage (\d)\) and rank (\d) \(stage (\d)\) dispatched different tasks as "
        r"number (\d+), in step (\d+): the first ([FB]\d), the second ([FB]\d); ",
        said,
        re.MULTILINE,
    )
    assert status == 1 and found, said
    one, its_stage, other, same_stage, _, _, task, another = found.groups()
    assert (one, its_stage, other, same_stage) == ("1", "1", "2", "1") and task != another
    assert "Traceback" not in said, said


@pytest.mark.slow(reason="runs of four processes that lose one")
@pytest.mark.parametrize(("rank", "way"), [(2, "kill"), (3, "freeze")], ids=["leader", "follower"])
def test_a_member_that_is_gone_is_named(rank, way, tmp_path):
    cell = Cell(rank, way, "step", tp=2)
    outcome = run_launched(cell, SILENCE, tmp_path)
    assert faults_of(cell, outcome) == [], outcome.text
    assert outcome.seconds < SILENCE + END_SECONDS


@pytest.mark.slow(reason="a run of four processes that fails")
def test_a_store_that_does_not_answer_is_named(tmp_path):
    outcome = run_launched(Cell(0, "store", "step", tp=2), SILENCE, tmp_path)
    assert outcome.statuses == [1] and not outcome.left and not outcome.hung, outcome.text
    said = r"rrfp launch: rank \d \(stage \d\) failed: the key-value store, .* has not answered for 10 s"
    assert re.match(said, outcome.sentences[0]), outcome.text
    assert outcome.seconds < SILENCE + END_SECONDS
