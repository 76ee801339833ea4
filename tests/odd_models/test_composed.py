"""A few of the composed models; `make odd-models` runs all of them (`corpus.py`)."""

import collections

import pytest

from tests.odd_models import composed, corpus, footprints, outside

COUNT = 320


@pytest.mark.slow(reason="2 s each: many layers; the other files have them one by one")
@pytest.mark.parametrize("number", [7, 73, 211])
def test_like_plain_jax(number):
    stages = corpus.STAGES[number % 3 :][:1]
    assert corpus.outcomes(number, stages) == [(*stages, "equal", "")]


@pytest.mark.slow(reason="4 s: runtime/test_random_keys.py has the keys")
@pytest.mark.parametrize("name", ["NNX stream, jit", "Linen stream"])
def test_streams_of_modules_draw_what_the_whole_model_draws(name):
    assert corpus.outcomes(name, (2,)) == [(2, "equal", "")]


@pytest.mark.slow(reason="8 s: runtime/test_memory.py has the live buffers")
def test_footprints_are_what_is_there():
    """A slice of `python -m tests.odd_models.footprints`."""
    rows = footprints.rows_of(4, 73, remats=["none"])
    assert len(rows) == 8
    assert not [str(aim) for aim in footprints.aims_of(rows) if not aim.met]


@pytest.mark.parametrize("name", outside.REFUSED)
def test_refused_for_the_true_reason(name):
    assert corpus.outcomes(name) == [(2, "rightly refused", "")]


def test_the_corpus_has_every_frame_with_many_bodies():
    models = [composed.model(number) for number in range(COUNT)]
    bodies = collections.defaultdict(set)
    for model in models:
        for body, frame in model.layers:
            bodies[frame].add(body)
    assert len({(m.layers, m.carry, m.frozen, m.tied, m.remat) for m in models}) == COUNT
    assert {frame: len(of) >= 15 for frame, of in bodies.items()} == dict.fromkeys(composed.FRAMES, True)
    assert {model.carry for model in models} == set(composed.CARRIES)
    assert sum(model.frozen for model in models) > 30 and sum(bool(model.tied) for model in models) > 30
