"""What a listener is told while programs are compiled."""

import pytest

from rrfp_jax.progress import Doing
from rrfp_jax.runtime.programs.compiler import Counting
from tests.support import refusals, toy


def told(expected, events):
    """What is told of programs made (True) and jobs ended (False), given by job."""
    found = []
    with Counting(found.append, expected) as counting:
        for job, made in events:
            (counting.one_more if made else counting.ended)(job)
    assert all(doing.what == "compiling" for doing in found)
    return [(doing.done, doing.total, doing.detail) for doing in found]


A0, A1, B0 = ("a", 0), ("a", 1), ("b", 0)


@pytest.mark.parametrize(
    ("expected", "events", "said"),
    [
        ({}, [(A0, False)], []),
        ({A0: 2}, [(A0, True), (A0, True), (A0, False)], [(0, 2, ""), (1, 2, ""), (2, 2, "")]),
        ({A0: 3}, [(A0, True), (A0, False)], [(0, 3, ""), (1, 3, ""), (1, 1, "")]),
        (
            {A0: 1, A1: 1, B0: 1},
            [(A0, True), (A0, False), (A1, True), (B0, True), (A1, False), (B0, False)],
            [
                *((0, 3, "bucket 1 of 2"), (1, 3, "bucket 1 of 2"), (1, 3, "bucket 1 of 2")),
                *((2, 3, "bucket 1 of 2"), (3, 3, "bucket 2 of 2")),
            ],
        ),
    ],
)
def test_counts(expected, events, said):
    assert told(expected, events) == said


def test_an_error_ends_it():
    found = []
    with pytest.raises(KeyError), Counting(found.append, {A0: 2}) as counting:
        counting.one_more(A0)
        raise KeyError
    assert [(doing.done, doing.total) for doing in found] == [(0, 2), (1, 2), (2, 2)]


def test_a_trainer_tells_of_programs_by_bucket_also_of_shapes_met_later():
    """Two stages: what each prepares, if it does, forward and backward."""
    found = []
    trainer = toy.trainer(2, data=refusals.BATCH)
    trainer._engine.library.progress = found.append
    trainer.start()
    first, last = found[0], found[-1]
    assert first == Doing("compiling", 0, 6) and last.done == last.total
    assert sorted({doing.done for doing in found}) == list(range(last.total + 1))
    del found[:]
    trainer.step([{name: array[:1] for name, array in one.items()} for one in refusals.BATCH])
    assert found[0].done == 0 and found[-1].done == found[-1].total > 0
