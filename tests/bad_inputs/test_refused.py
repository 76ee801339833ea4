"""The corpus: everything that is typed or read, wrong in some way, each with a part of the sentence it gets.

A case is two lines of a text file: a Python expression, as a user would write it, and below, indented, words
of what it is refused with. `namespace.py` has the names. Nothing is compiled, and no process is started.
"""

import signal
from functools import cache
from pathlib import Path

import pytest

import rrfp_jax.commands.doctor
import rrfp_jax.runs.run
from rrfp_jax.errors import TrainingError
from rrfp_jax.launcher.spawn import Launch
from rrfp_jax.runtime.programs.segments import OnDevices
from tests.bad_inputs import namespace
from tests.support import wrong_metadata

LIMIT_SECONDS = 10
"""Of a case; whoever is refused at once needs a thousandth of it."""

FEWEST, LONGEST_SENTENCE = 500, 2000
STARTS = (
    (Launch, "run"),
    (rrfp_jax.runs.run, "train"),
    (rrfp_jax.commands.doctor, "look"),
    (OnDevices, "lower"),
)


def cases_of(file):
    """(expression, words) of a text file."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert all(not given.startswith(" ") and words.startswith("    ") for given, words in pairs), file
    return [(given, words.strip()) for given, words in pairs]


FILES = sorted(Path(__file__).parent.glob("*.txt"))
CASES = {file.stem: cases_of(file) for file in FILES}
names = cache(namespace.space)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    namespace.fill(folder)
    return folder


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, folder):
    """Nor lasts, nor knows of a SLURM step that these tests run in."""
    monkeypatch.chdir(folder)
    for owner, name in STARTS:
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: pytest.fail("it was not refused"))
    usual = signal.signal(signal.SIGALRM, lambda *signal: pytest.fail("it has no end"))
    signal.alarm(LIMIT_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, usual)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(*case, id=f"{name}-{at}")
        for name, cases in CASES.items()
        for at, case in enumerate(cases)
    ],
)
def test_is_refused_in_a_sentence(given, words):
    with pytest.raises((ValueError, TrainingError)) as refused:
        eval(given, dict(names()))
    sentence, *traceback = str(refused.value).splitlines()
    assert words in sentence
    assert sentence.isprintable() and len(sentence) < LONGEST_SENTENCE
    assert not traceback or "raised" in sentence or "called" in sentence, "only users' code has a traceback"


def test_the_corpus_is_large_and_has_nothing_twice():
    given = [expression for cases in CASES.values() for expression, _ in cases]
    assert len(set(given)) == len(given) >= FEWEST
    stored = (wrong_metadata.SEALS, wrong_metadata.MANIFESTS, wrong_metadata.METADATA, wrong_metadata.TEXTS)
    assert sum(map(len, stored)) >= 90


def test_a_case_that_is_not_refused_is_noticed():
    with pytest.raises(pytest.fail.Exception):
        test_is_refused_in_a_sentence("W", "anything")
    with pytest.raises(AssertionError):
        test_is_refused_in_a_sentence("rrfp.Mesh(pp=0)", "something else")
