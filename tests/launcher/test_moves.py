"""A cell of `tests.verification.failures --moves`: a rank dies while layers move; the next start."""

import pytest

from tests.verification.failures import END_SECONDS, Cell, failed_and_resumed, faults_of, undisturbed


@pytest.mark.slow(reason="two runs of four processes")
def test_a_rank_that_dies_while_layers_move_and_the_next_start(tmp_path):
    (tmp_path / "failing").mkdir()
    (tmp_path / "fine").mkdir()
    cell = Cell(2, "kill", "move")
    outcome, losses = failed_and_resumed(cell, tmp_path / "failing")
    assert faults_of(cell, outcome) == [], outcome.text
    assert outcome.seconds < END_SECONDS
    expected, ended = undisturbed(tmp_path / "fine")
    assert expected is not None and losses == expected, ended.text
