"""The partitioner against all cuts of short rows of layers."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.forecast.partition import LayerLoad, TooLarge, partition

SMALL = st.integers(0, 9)
LAYERS = st.lists(
    st.builds(
        LayerLoad, seconds=SMALL.map(float), fixed_bytes=SMALL, held_bytes=SMALL, transient_bytes=SMALL
    ),
    min_size=1,
    max_size=7,
)


def splits(layers, virtual_stages):
    for cuts in combinations(range(1, layers), virtual_stages - 1):
        edges = (0, *cuts, layers)
        yield [b - a for a, b in pairwise(edges)]


def largest(layers, split, in_flight):
    """The largest time and the largest number of bytes of a virtual stage."""
    rest, times, sizes = list(layers), [], []
    for count, held in zip(split, in_flight, strict=True):
        virtual_stage, rest = rest[:count], rest[count:]
        times.append(sum(layer.seconds for layer in virtual_stage))
        fixed = sum(layer.fixed_bytes + held * layer.held_bytes for layer in virtual_stage)
        sizes.append(fixed + max(layer.transient_bytes for layer in virtual_stage))
    return max(times), max(sizes)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), layers=LAYERS, budget=st.none() | st.integers(0, 80))
def test_equals_brute_force(data, layers, budget):
    in_flight = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=len(layers)))
    found = [largest(layers, split, in_flight) for split in splits(len(layers), len(in_flight))]
    within = [pair for pair in found if budget is None or pair[1] <= budget]
    if within:
        split = partition(layers, in_flight, budget)
        assert len(split) == len(in_flight) and sum(split) == len(layers) and min(split) >= 1
        assert largest(layers, split, in_flight) == min(within)
    else:
        with pytest.raises(TooLarge) as refused:
            partition(layers, in_flight, budget)
        assert largest(layers, refused.value.split, in_flight)[1] == min(size for _, size in found)


def test_a_heavy_head_gets_a_stage_of_its_own():
    layers = [LayerLoad(seconds=s) for s in (0.1, 1, 1, 1, 1, 1, 1, 3)]
    assert partition(layers, [1] * 3) == [4, 3, 1]


def test_bytes_decide_between_equal_times():
    layers = [LayerLoad(seconds=s, fixed_bytes=b) for s, b in ((1, 5), (0, 5), (0, 1), (1, 1))]
    assert partition(layers, [1, 1]) == [1, 3]


def test_what_is_in_flight_counts():
    layers = [LayerLoad(seconds=1, held_bytes=10)] * 6
    assert partition(layers, [2, 1], 70) == [3, 3]
    assert partition(layers, [2, 1], 45) == [2, 4]
    with pytest.raises(TooLarge, match=r"\[2, 4\], leaves .* \(layers 0 to 1\) with 40 bytes of 39 "):
        partition(layers, [2, 1], 39)


def test_fewer_layers_than_virtual_stages_are_refused():
    with pytest.raises(ValueError, match="1 layers cannot be split into 2 virtual stages"):
        partition([LayerLoad(seconds=1.0)], [1, 1])
