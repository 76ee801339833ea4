"""The minimum cut against all cuts of small networks."""

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.runtime.autodiff.split_backward import SINK, SOURCE, UNCUTTABLE, FlowNetwork

NODES = (SOURCE, "a", "b", "c", "d", SINK)


def cost(edges, second):
    """Of the edges that lead to the sink's side."""
    return sum(capacity for tail, head, capacity in edges if head in second and tail not in second)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES), st.integers(0, 9)), max_size=16))
def test_against_all_cuts(drawn):
    edges = [(tail, head, capacity) for tail, head, capacity in drawn if tail != head]
    network = FlowNetwork()
    for edge in edges:
        network.edge(*edge)
    inner = NODES[1:-1]
    subsets = chain.from_iterable(combinations(inner, n) for n in range(len(inner) + 1))
    cuts = [{SINK, *subset} for subset in subsets]
    best = min(cost(edges, cut) for cut in cuts)
    found = network.sink_side()
    assert cost(edges, found) == best
    assert all(found <= cut for cut in cuts if cost(edges, cut) == best)


def test_what_cannot_be_cut_is_told():
    network = FlowNetwork()
    network.edge(SOURCE, "a")
    network.edge("a", SINK, 3)
    assert network.sink_side() == {SINK}
    network.edge("a", SINK, UNCUTTABLE)
    with pytest.raises(ValueError, match="both sides"):
        network.sink_side()
