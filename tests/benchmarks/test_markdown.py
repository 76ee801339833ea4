"""Tables for the docs."""

import pytest

from benchmarks.markdown import table


def test_a_table_shows_cells_as_text_and_empty_ones_as_such():
    assert table(["", "s"], [("a", 1.5), ("", "-")]) == "| | s |\n|---|---|\n| a | 1.5 |\n| | - |"


def test_a_row_must_have_a_cell_for_each_head():
    with pytest.raises(ValueError, match="3 cells under 2 heads"):
        table(["a", "b"], [(1, 2, 3)])
