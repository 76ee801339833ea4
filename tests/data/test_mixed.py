"""Mixed buckets and planned orders in several processes."""

import json

import pytest

from tests.train.test_processes import SCRIPTS, command

RANKS = 4


pytestmark = pytest.mark.slow(reason="25 s: processes, and models with images; test_documents.py has text")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank found."""
    folder = tmp_path_factory.mktemp("mixed")
    status, said = command(
        "rrfp_jax",
        "launch",
        "-n",
        RANKS,
        SCRIPTS / "mixed_ranks.py",
        folder,
        folder=folder,
        limit=300.0,
    )
    assert status == 0, said
    return [json.loads((folder / f"mixed-{rank}.json").read_text()) for rank in range(RANKS)]


def test_mixed_buckets_equal_the_unpadded_unpipelined_reference(ranks):
    for rank in ranks:
        for loss, leaf in rank["errors"].values():
            assert loss <= 1e-6 and leaf <= 1e-5, rank


def test_nothing_is_compiled_after_the_start(ranks):
    """Neither in a step, nor for a plan, nor in an evaluation of data with buckets of its own."""
    assert [rank["compiled"] for rank in ranks] == [0] * RANKS
    assert all(rank["buckets"] == 2 for rank in ranks)


def test_all_ranks_plan_alike(ranks):
    assert ranks[0]["planned"] == [False, True, True, True]
    for name in ("losses", "planned", "predicted"):
        assert all(rank[name] == ranks[0][name] for rank in ranks)


def test_a_planned_order_that_differs_names_rank_and_step(tmp_path):
    script = tmp_path / "differs.py"
    script.write_text(
        "import os\n"
        "import rrfp_jax as rrfp\n"
        "from tests.support import toy\n"
        "trainer = toy.trainer(2)\n"
        "list(trainer.steps(1))\n"
        "base = rrfp.schedules.BFW() if os.environ['RRFP_RANK'] == '1' else rrfp.schedules.BF()\n"
        "trainer.schedule = rrfp.schedules.Planned(base=base, evaluations=0)\n"
        "trainer.step(toy.microbatches())\n"
    )
    status, said = command("rrfp_jax", "launch", "-n", 2, script, folder=tmp_path, limit=300.0)
    assert status == 1
    assert "the planned order of step 1 is ListedOrder(" in said and "on rank 1" in said, said
    assert "Traceback" not in said, said
