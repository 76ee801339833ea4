"""Named families of steps: what their numbers claim, paired by seed."""

from statistics import fmean, pstdev

import pytest

from rrfp_jax.studies.families import FAMILIES, by_name


def variation(rows):
    """Coefficient of variation over microbatches, mean over stages."""
    return fmean(pstdev(row) / fmean(row) for row in rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_seeds_are_paired(name):
    family = by_name(name)
    assert family(4, 8, 1) == family(4, 8, 1)
    assert (family(4, 8, 1) == family(4, 8, 2)) == (name == "constant")
    step = family(1, 1, 0)
    assert (step.known.stages, step.actual.microbatches) == (1, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_known_is_what_happens_but_for_the_unknown(name):
    step = by_name(name)(4, 400, seed=5)
    assert step.known.activation_bytes == step.actual.activation_bytes
    pairs = zip(step.known.forward, step.actual.forward, strict=True)
    off = [fmean(actual) / fmean(known) for known, actual in pairs]
    assert sum(abs(ratio - 1) > 0.1 for ratio in off) == (name == "straggler")


def test_lengths_vary_as_measured():
    actual = by_name("length-imbalanced")(4, 4000, seed=1).actual
    assert 0.18 < variation(actual.forward) < 0.27
    assert 0.31 < variation(actual.backward_input) < 0.44
    heavy = [time > 1.5 * min(row) for row in actual.forward for time in row]
    assert 0.06 < fmean(heavy) < 0.10


def test_multimodal_stages():
    known = by_name("multimodal")(8, 2000, seed=1).known
    assert 3.9 < max(known.forward[0]) / min(known.forward[0]) <= 4.15
    assert known.forward[0] == known.forward[1] and known.forward[2] == known.forward[6]
    assert known.forward[7][0] / known.forward[6][0] == pytest.approx(2.07)


def test_one_link_is_slow():
    known = by_name("slow-link")(4, 2, seed=1).known
    assert [row[0] for row in known.transfer_forward] == [0.001, 0.030, 0.001, 0.001]
    assert [row[0] for row in known.transfer_backward] == [0.001, 0.001, 0.030, 0.001]


def test_others_are_refused():
    with pytest.raises(ValueError, match="family='steady': no such family; choose one of constant, "):
        by_name("steady")
