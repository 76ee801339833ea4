"""Injected jitter: the paper's frequencies and sizes, and draws that depend on the task alone."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core.tasks import BACKWARD, FORWARD, Kind, Task
from rrfp_jax.trace.jitter import LEVELS, Jitter, Level, by_name, uniforms

ALWAYS = Level(probability=1.0, base=0.0, alpha=1.0)
TASKS = [  # (step, stage, task)
    (step, stage, Task(kind, chunk, j))
    for step in range(5)
    for stage in range(4)
    for kind in Kind
    for chunk in range(2)
    for j in range(50)
]


def test_levels_are_those_of_table_6():
    rows = [(name, level.probability, level.base, level.alpha) for name, level in LEVELS.items()]
    assert rows == [("J0", 0, 0, 0), ("J1", 0.1, 5e-3, 0.5), ("J2", 0.2, 10e-3, 1.0), ("J3", 0.3, 15e-3, 1.5)]


@pytest.mark.parametrize("measured", [0.001, 0.1], ids=["below base", "above base"])
@pytest.mark.parametrize("name", LEVELS)
def test_frequency_and_range(name, measured):
    level, jitter = by_name(name), Jitter(by_name(name), seed=1)
    delays = [jitter.delay(*where, measured) for where in TASKS]
    scale = level.alpha * max(level.base, measured)
    hits = [delay for delay in delays if delay]
    assert len(hits) / len(delays) == pytest.approx(level.probability, abs=0.02)
    if hits:
        assert min(hits) == pytest.approx(0.5 * scale, rel=0.05)
        assert max(hits) == pytest.approx(1.5 * scale, rel=0.05)
        assert fmean(hits) == pytest.approx(scale, rel=0.05)


def test_draws_are_distinct_and_uniform():
    first, second = zip(*(uniforms(3, *where) for where in TASKS), strict=True)
    assert len({*first, *second}) == 2 * len(TASKS)
    for draws in (first, second):
        tenths = [sum(k <= 10 * u < k + 1 for u in draws) / len(draws) for k in range(10)]
        assert tenths == pytest.approx([0.1] * 10, abs=0.025)


@given(st.permutations(TASKS[:200]), st.integers(-(2**63), 2**63 - 1))
def test_draws_are_paired_whatever_the_order_of_calls(order, seed):
    planned, other = (Jitter(by_name("J2"), seed) for _ in range(2))
    expected = {where: planned.delay(*where, 0.001) for where in TASKS[:200]}
    assert {where: other.delay(*where, 0.001) for where in order} == expected


def test_seeds_differ():
    runs = [[uniforms(seed, *where) for where in TASKS[:20]] for seed in (1, 2)]
    assert not set(runs[0]) & set(runs[1])


def test_draws_never_change():
    """Recorded results depend on them."""
    assert uniforms(0, 0, 0, Task(FORWARD, 0, 0)) == (0.8910546535411921, 0.6121010208411333)
    assert uniforms(7, 3, 1, Task(BACKWARD, 0, 12)) == (0.09521854916185135, 0.6894626401049153)
    assert uniforms(-1, 10**6, 63, Task(FORWARD, 1, 511)) == (0.11602817668666676, 0.5235458955767495)


def test_running_mean_is_per_stage_and_kind():
    jitter = Jitter(ALWAYS, seed=0)

    def mean(stage, kind, microbatch, measured):
        task = Task(kind, 0, microbatch)
        return jitter.delay(0, stage, task, measured) / (0.5 + uniforms(0, 0, stage, task)[1])

    assert mean(0, FORWARD, 0, 1.0) == pytest.approx(1.0)
    assert mean(0, BACKWARD, 0, 7.0) == pytest.approx(7.0)
    assert mean(1, FORWARD, 0, 5.0) == pytest.approx(5.0)
    assert mean(0, FORWARD, 1, 2.0) == pytest.approx(1.1)
    assert mean(0, FORWARD, 2, 3.0) == pytest.approx(1.29)
    assert mean(1, FORWARD, 1, 4.0) == pytest.approx(4.9)


def test_the_base_is_the_least_scale():
    task = Task(FORWARD, 0, 0)
    delay = Jitter(Level(1.0, base=4.0, alpha=0.5), seed=0).delay(0, 0, task, 1.0)
    assert delay == 0.5 * 4.0 * (0.5 + uniforms(0, 0, 0, task)[1])


def test_the_delay_counts_undelayed_tasks_too():
    """The mean follows every task, not only those that are hit."""
    jitter = Jitter(Level(0.5, base=0.0, alpha=1.0), seed=0)
    draws = [uniforms(0, 0, 0, Task(FORWARD, 0, j)) for j in range(20)]
    last = max(j for j, (hit, _) in enumerate(draws) if hit < 0.5)
    delays = [jitter.delay(0, 0, Task(FORWARD, 0, j), float(j)) for j in range(last + 1)]
    mean = 0.0
    for j in range(1, last + 1):
        mean = 0.9 * mean + 0.1 * j
    assert delays[last] == pytest.approx(mean * (0.5 + draws[last][1]))
    assert [bool(delay) for delay in delays[1:]] == [hit < 0.5 for hit, _ in draws[1 : last + 1]]


def test_unknown_level_is_refused():
    with pytest.raises(ValueError, match=r"jitter='J4': .* J0, J1, J2, J3"):
        by_name("J4")


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_large_seed_is_refused(seed):
    with pytest.raises(ValueError, match=f"seed={seed}: .* 64 signed bits"):
        Jitter(ALWAYS, seed)
