"""Isolated nodes as fixtures. Tests that use them are skipped, with the reason, where there can be none."""

import sys
from pathlib import Path

import pytest

from tests.nodes import nodes as isolated

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def nodes_of(tmp_path_factory):
    """A function that makes so many nodes, which share the checkout, this Python and the folders of tests."""
    try:
        isolated.check()
    except isolated.Unavailable as why:
        pytest.skip(str(why))
    shared = {ROOT, Path(sys.prefix), Path(sys.base_prefix), tmp_path_factory.getbasetemp()}
    return lambda count: isolated.Nodes(count, shared=sorted(shared))


@pytest.fixture(scope="session")
def four_nodes(nodes_of):
    with nodes_of(4) as four:
        yield four


@pytest.fixture
def nodes(four_nodes):
    """Nodes n0 to n3. After the test they are healed, and those that it used boot anew."""
    yield four_nodes
    four_nodes.renew()
