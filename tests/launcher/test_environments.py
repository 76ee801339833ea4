"""Cases of `python -m tests.verification.environments`, those that are soon over."""

import pytest

from tests.verification.environments.__main__ import all_cases
from tests.verification.environments.living import run_case

QUICK = [
    "signals: Ctrl-C",
    "streams: Ctrl-C, and the reader ends",
    "folders: the run's folder is removed, and the code raises",
    "full disk: from a step to the end",
    "threads: one that does not end",
]
CASES = {case.name: case for case in all_cases()}


@pytest.mark.slow(reason="10 s: processes; runtime/test_place.py has the places")
@pytest.mark.parametrize("name", QUICK)
def test_a_run_in_an_odd_environment(name, tmp_path, tmp_path_factory):
    (tmp_path / "scratch").mkdir()
    kept = tmp_path_factory.getbasetemp() / "kept"
    kept.mkdir(exist_ok=True)
    outcome = run_case(CASES[name], tmp_path / "scratch", kept)
    assert not outcome.faults, outcome.text
    if outcome.missing:
        pytest.skip(
            f"this machine lacks {outcome.missing}; tests/runs/test_files.py has the same with a fake disk"
        )
