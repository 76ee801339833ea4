"""Which slots go on after losses: events in, decisions out."""

from hypothesis import given
from hypothesis import strategies as st

import rrfp_jax as rrfp
from rrfp_jax.launcher.restarts import Assignment, assigned
from rrfp_jax.runs.saving import ranks_of_replicas

TWO_BY_TWO = {1: 2, 2: 4}


def test_two_replicas_of_two_stages():
    assert assigned(TWO_BY_TWO, {}) == Assignment(replicas=2, slots=(0, 1, 2, 3))
    assert assigned(TWO_BY_TWO, {1}) == Assignment(replicas=1, slots=(0, 2))  # whatever stages these had
    assert assigned(TWO_BY_TWO, {1, 2}) == Assignment(replicas=1, slots=(0, 3))
    assert assigned(TWO_BY_TWO, {0, 1, 2}) is None


def test_the_replicas_that_a_mesh_can_do_without():
    mesh = rrfp.Mesh(pp=2, dp=4)
    assert ranks_of_replicas(mesh, 8) == {1: 2, 2: 4, 4: 8}  # three could not share four microbatches
    assert ranks_of_replicas(mesh, 2) == {2: 1, 4: 2}  # a process has four devices
    assert ranks_of_replicas(rrfp.Mesh(pp=2, dp=2), 2) == {1: 1, 2: 2}  # the one that is left takes both
    assert ranks_of_replicas(rrfp.Mesh(pp=2, tp=(2, 1), dp=2), 6) == {1: 3, 2: 6}
    assert ranks_of_replicas(rrfp.Mesh(pp=4), 4) == {1: 4}


@st.composite
def histories(draw):
    """What replicas of some mesh need, and losses that befall them: fractions that choose a rank."""
    stages, dp = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    needs = {n: n * stages for n in range(1, dp + 1) if dp % n == 0}
    return needs, draw(st.lists(st.lists(st.floats(0, 1, exclude_max=True), max_size=3)))


@given(histories())
def test_whatever_is_lost_the_rest_is_used_as_well_as_it_can_be(history):
    needs, losses = history
    gone, whole = set(), max(needs.values())
    for fractions in losses:
        found = assigned(needs, gone)
        if found is None:
            assert whole - len(gone) < min(needs.values())
            return
        assert len(found.slots) == len(set(found.slots)) == needs[found.replicas]
        assert gone.isdisjoint(found.slots) and set(found.slots) <= set(range(whole))
        more = [n for n in needs if n > found.replicas]
        assert all(needs[n] > whole - len(gone) for n in more)
        gone |= {found.slots[int(fraction * len(found.slots))] for fraction in fractions}
    assert assigned(needs, set()).replicas == max(needs)
