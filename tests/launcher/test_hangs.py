"""Cells of the table of hangs (`python -m tests.verification.hangs`), with real processes."""

import pytest

from rrfp_jax.commands import why
from rrfp_jax.runtime.run.recorder import FlightRecorder, recorder_in, shared_page
from tests.support.commands import why as main
from tests.verification.hangs import CELLS, USERS, Cell, faults_of, run_cell


@pytest.mark.slow(reason="11 s: four processes; test_diagnosis.py has the verdicts")
@pytest.mark.parametrize("name", ["message", "data"])
def test_a_run_that_hangs(name, tmp_path):
    cell = next(cell for cell in CELLS if cell.name == name)
    answer = run_cell(cell, tmp_path)
    assert faults_of(cell, answer) == [], answer.text + answer.log


@pytest.mark.costly(reason="a run of two processes that hangs")
def test_two_ranks_of_which_one_hangs(tmp_path):
    says = rf"rank 1 \(stage 1\) is in {USERS}; another rank waits"
    cell = Cell("two", ["hanging.py", "1", "user"], says, count=2)
    answer = run_cell(cell, tmp_path)
    assert faults_of(cell, answer) == [], answer.text + answer.log


def test_refuses_what_does_not_live(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == (
        f"rrfp why: {tmp_path}/nothing: there is no such folder; give the run's, such as runs/quickstart\n"
    )
    assert main([str(tmp_path)]) == 2
    assert "has no flight recorders, which only rrfp launch keeps" in capsys.readouterr().err
    (tmp_path / "flight-0").write_bytes(b"")
    assert main([str(tmp_path)]) == 2
    assert "no rank has begun to join the run yet; ask again in a moment" in capsys.readouterr().err


def test_a_run_lives_in_its_folder_or_where_a_launcher_prepares_it(tmp_path, capsys):
    run, left, staged = tmp_path / "run", tmp_path / ".run.starting-3", tmp_path / ".run.starting-21"
    pages = {}
    for folder in (run, left, staged):
        folder.mkdir()
        path = recorder_in(folder, 0)
        FlightRecorder(path, 0, "")
        pages[folder] = shared_page(path)
        pages[folder].started += 1  # another process, which has ended
    assert main([str(run)]) == 2
    assert capsys.readouterr().err == f"rrfp why: {run}: no rank of this run lives any more\n"
    for place, page in pages.items():
        page.started -= 1
        assert why._living(run) == (place, [0])
        page.started += 1
    (tmp_path / ".run.starting-22").mkdir()
    assert main([str(run)]) == 2
    assert "no rank has begun to join the run yet" in capsys.readouterr().err
