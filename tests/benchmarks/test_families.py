"""What the families from measurements are, and what the study of them compares."""

import random
from statistics import fmean

import pytest

from benchmarks.families import (
    BOUNDS,
    CHATQA2,
    LMSYS,
    MEASURED,
    OURS,
    PLANNED,
    RANKED_PLAN,
    UNKNOWN,
    WIKIPEDIA,
    WORKER,
    MeasuredCell,
    document,
    measure,
    row_of,
)
from rrfp_jax.studies.families import FORWARD_SECONDS


@pytest.mark.parametrize("shares", [WIKIPEDIA, LMSYS, CHATQA2])
def test_documents_have_the_published_shares(shares):
    draw = random.Random(1)
    tokens = [document(draw, shares, BOUNDS[-1]) for _ in range(20_000)]
    assert min(tokens) >= BOUNDS[0]
    for bound, share in zip(BOUNDS[1:], shares, strict=True):
        assert fmean(n <= bound for n in tokens) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("kind", MEASURED)
def test_steps_are_paired_and_only_the_unknown_differ_much_from_what_is_known(kind):
    step = MEASURED[kind](8, 32, 3)
    assert step == MEASURED[kind](8, 32, 3) != MEASURED[kind](8, 32, 4)
    pairs = [
        (known, actual)
        for table in ("forward", "transfer_forward")
        for known, actual in zip(
            sum(getattr(step.known, table), ()), sum(getattr(step.actual, table), ()), strict=True
        )
    ]
    assert any(abs(known - actual) > 0.2 * actual for known, actual in pairs) == (kind in UNKNOWN)


def test_steps_of_a_job_have_the_same_bad_worker():
    def slowest(seed):
        times = [fmean(row) for row in MEASURED["worker"](8, 32, seed).actual.forward]
        assert max(times) == pytest.approx(WORKER * FORWARD_SECONDS, rel=0.05)
        return times.index(max(times))

    assert slowest(0) == slowest(1)
    assert len({slowest(seed) for seed in range(0, 20, 2)}) > 1


def test_hints_keep_to_the_bytes_and_rivals_count_where_they_fit():
    cell = MeasuredCell("link", stages=4)
    step = measure(cell, 0)
    row = row_of(cell, [step])
    assert all(step[name][1] <= 1 + 1e-6 for name in (*OURS, *PLANNED))
    assert row.held <= 1 + 1e-6
    assert RANKED_PLAN in row.times
    assert row.times["1f1b"] == 1
    assert "zb-h2" not in row.times
    assert row.over_rival == row.times[row.hint] / row.times[row.rival]
    assert row.most <= row.over_rival < 1
