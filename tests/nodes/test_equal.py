"""A run over four nodes has the losses and parameters, to the bit, of a run on one."""

import json
import sys

import pytest

from tests.nodes import ranks
from tests.nodes.equal_ranks import CASES, STEPS, in_hex
from tests.support.kept import with_cache
from tests.support.transports_ranks import run

NAMES, TRANSPORTS = ("pp", "dp", "tp"), ("socket", "nixl", "auto")
ALL = [f"{name}:{transport}" for name in NAMES for transport in TRANSPORTS]


def trained(nodes, on, folder, cases):
    """By rank, what it found."""
    command = [sys.executable, "-m", "tests.nodes.equal_ranks", folder, *cases]
    kept = with_cache({"RRFP_TEST_EXECUTABLES": str(ranks.ROOT / ".pytest_cache" / "executables")})
    started = ranks.start(nodes, on, command, folder, kept)
    for rank, process in enumerate(started):
        assert process.wait(timeout=300) == 0, ranks.said(folder, rank)[-4000:]
    return [json.loads((folder / f"equal-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow(reason="20 s: four ranks; test_firewall.py has the losses of two nodes")
def test_four_nodes_train_as_one_process(nodes, tmp_path):
    found = trained(nodes, nodes.names, tmp_path, ["dp:auto"])
    expected = run(CASES["dp"], "auto", STEPS)
    for rank in found:
        assert rank["dp:auto"][0] == in_hex(expected["steps"])


@pytest.mark.slow(reason="60 s: the test above for everything that carries messages")
def test_four_nodes_train_as_one(nodes, tmp_path):
    one = trained(nodes, ["n0"] * 4, tmp_path / "one", ALL)
    four = trained(nodes, nodes.names, tmp_path / "four", ALL)
    assert four == one
    for rank in one:
        assert list(rank) == ALL
        for name in NAMES:
            assert len({str(rank[case]) for case in ALL if case.startswith(name)}) == 1
    assert len({params for rank in one for _, params in rank.values()}) >= len(NAMES) * 2  # of each stage
