"""The mistakes of a first day: each gets a sentence, and what the sentence says works.

A case in a text file is a comment, the lines that somebody writes, after `!` words of the sentence that they
get, and after `=` what works instead. Nothing is trained and no process is started.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

import rrfp_jax.runs.run
from rrfp_jax.errors import TrainingError
from rrfp_jax.launcher.spawn import Launch
from tests.first_day import names

FEWEST, LONGEST = 60, 900
FILES = sorted(Path(__file__).parent.glob("*.txt"))


class Mistake(NamedTuple):
    """What is written, words of what is said, and what works instead."""

    about: str
    code: str
    said: str
    instead: str


def mistakes_of(file):
    """The cases of a text file."""
    found = []
    for block in file.read_text().strip().split("\n\n"):
        about, *lines = block.splitlines()
        own = [line for line in lines if not line.startswith(("! ", "= "))]
        (said,) = [line[2:] for line in lines if line.startswith("! ")]
        found.append(
            Mistake(
                about[2:], "\n".join(own), said, "\n".join(line[2:] for line in lines if line[:2] == "= ")
            )
        )
    return found


CASES = {f"{file.stem}-{at}": case for file in FILES for at, case in enumerate(mistakes_of(file))}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for owner, name in ((Launch, "run"), (rrfp_jax.runs.run, "train")):
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: pytest.fail("it was not refused"))


def run(code, file, space):
    """Run lines as a user's script."""
    exec(compile(code, f"{file}.py", "exec"), space)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_mistake(case, capfd):
    space = names.space() | {"__name__": "mistake"}
    try:
        run(case.code, "mistake", space)
        said = capfd.readouterr().err
        assert said.startswith("warning: "), "it was taken"
    except (ValueError, TrainingError, AttributeError) as error:
        said = str(error)
    sentence = said.splitlines()[0]
    assert case.said in sentence and sentence.isprintable() and len(sentence) < LONGEST
    assert "rrfp_jax/" not in said, "a place in our sources is no help"
    run(case.instead, "instead", space)
    assert "warning" not in capfd.readouterr().err


def test_the_corpus_is_large_and_has_nothing_twice():
    codes = [case.code for case in CASES.values()]
    assert len(set(codes)) == len(codes) >= FEWEST
    assert sum(bool(case.instead) for case in CASES.values()) >= FEWEST
