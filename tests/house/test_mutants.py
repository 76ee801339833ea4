"""A slice of `python -m tests.verification.mutants`: how a mutant is put in, and how its tests are judged."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.verification.mutants import chosen, line
from tests.verification.mutation.install import variables
from tests.verification.mutation.trial import OUTDATED, tried

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow(reason="a pytest with a mutant")
@pytest.mark.parametrize("name", ["a_decision_not_told", "added_as_they_come"])
def test_a_mutant_is_found(name):
    (mutant,) = chosen(name)
    trial = tried(mutant)
    assert (trial.verdict, list(trial.by)) == ("found", list(mutant.tests)), trial.ran.said
    assert name in line(trial) and mutant.tests[0].partition("::")[2] in line(trial)


@pytest.mark.parametrize(
    ("test", "limit", "verdict"),
    [
        ("tests/core/test_core.py::TestBF::test_tie_order_with_chunks", 120.0, "survived"),
        ("tests/core/test_core.py::TestOrders::test_gpipe", 120.0, "never reached"),
        ("tests/core/test_core.py::TestOrders::test_no_such_test", 120.0, "broken"),
        ("tests/core/test_core.py", 0.1, "hung"),
    ],
)
def test_what_is_not_found_is_told_apart(test, limit, verdict):
    trial = tried(*chosen("an_input_taken_twice"), [test], limit)
    assert trial.verdict == verdict, trial.ran.said
    assert not [child for child in psutil.Process().children(recursive=True) if "pytest" in child.name()]


def test_processes_that_a_test_starts_have_it_too(tmp_path):
    """Whatever environment the test gives them."""
    says = "from rrfp_jax.core.tasks import Placement; print(Placement(2).destination(0, (0, 0, 1)))"
    starts = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-c', {says!r}]\n"
        f"subprocess.run(command, env={{'PYTHONPATH': {str(REPOSITORY)!r}}}, check=True)\n"
    )
    (mutant,) = chosen("an_activation_never_sent")
    own, said = variables(mutant, tmp_path / "reached"), []
    for env in ({}, own):
        done = subprocess.run(
            [sys.executable, "-c", starts],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        said.append(done.stdout.strip() == "None")
    assert said == [False, True]
    assert (tmp_path / "reached").exists()


HERE, THERE = (
    "tests/verification/mutation/order.py:9: in put\n    a(1)\n",
    "rrfp_jax/a.py:3: in f\n    b(1)\n",
)


@pytest.mark.parametrize(
    ("said", "outdated"),
    [
        (f"{HERE}E   ValueError: too many values to unpack", True),
        (' File "/a/tests/verification/mutation/order.py", line 9, in put\n    a(1)\nTypeError: no', True),
        (f"{THERE}E   TypeError: put.<locals>.new() takes 2 positional arguments", True),
        (f"{HERE}{THERE}E   ValueError: a refusal", False),
        (f"{THERE}E   assert 1 == 2", False),
    ],
)
def test_a_mutant_that_fits_the_code_no_longer_finds_nothing(said, outdated):
    assert (OUTDATED.search(said) is not None) == outdated
