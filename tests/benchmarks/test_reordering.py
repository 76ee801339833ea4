"""What the benchmarks of accumulation order and of limits in bytes rest on."""

import random
from statistics import fmean, quantiles

import pytest

from benchmarks import reordering, simulated
from benchmarks.harness import put_figures
from benchmarks.paced import PacedCase
from benchmarks.reordering import CONTROL, LINKS, Cell
from benchmarks.steps import Cell as Steps


@pytest.mark.parametrize(("link", "spread"), [("measured", 3.2), ("exponential", 6.6), ("heavy", 33)])
def test_links_vary_as_they_say(link, spread):
    draw = random.Random(1)
    factors = [LINKS[link](draw) for _ in range(50_000)]
    cuts = quantiles(factors, n=100)
    assert fmean(factors) == pytest.approx(1.0, rel=0.05)
    assert cuts[98] / cuts[49] == pytest.approx(spread, rel=0.1)


def test_transfers_are_drawn_one_by_one_and_paired():
    cell = Cell("exponential", 0.5, 4, 200)
    workload = cell.workload(3)
    assert workload == cell.workload(3) != cell.workload(4)
    drawn = [
        time for table in (workload.transfer_forward, workload.transfer_backward) for time in sum(table, ())
    ]
    assert len(set(drawn)) == 2 * 4 * 200
    assert fmean(drawn) == pytest.approx(0.5 * fmean(workload.forward[0]), rel=0.2)
    assert workload.forward == Cell("heavy", 1.0, 4, 200).workload(3).forward


def test_only_overtaking_costs_and_buffers_make_up_for_it():
    found = reordering.measure(Cell("heavy", 1.0, 8, 32), seed=0)
    assert all(ratios[CONTROL] == 1.0 for ratios in found.values())
    for schedule in reordering.SCHEDULES:
        ratios = found[schedule, 8]
        assert ratios["0"] > 1.05
        assert ratios["8"] == pytest.approx(1.0, abs=0.01)


def test_rows_and_tables():
    cells = [Cell(link, 1.0, 8, 32) for link in ("measured", "heavy")]
    steps = [{key: dict.fromkeys(reordering.COLUMNS, x) for key in KEYS} for x in (1.0, 2.0, 3.0)]
    rows = [row for cell in cells for row in reordering.rows_of(cell, steps)]
    assert reordering.worst(rows, "2") == 2.0
    table = reordering.markdown(rows)
    assert table.count("| heavy |") == 1 + 2  # once among the medians, then by schedule
    assert "| heavy | bfw | 2.000 (1.00-3.00) |" in table


KEYS = [(schedule, limit) for schedule in reordering.SCHEDULES for limit in reordering.LIMITS]


def test_a_paced_case_is_simulated_by_its_own_rules():
    workload = Cell("heavy", 1.0, 4, 16).workload(0)
    ordered, arrival = (
        PacedCase(workload=workload, schedule="bf", limit=8, accumulation=how, spare_gradients=0)
        for how in ("index", "arrival")
    )
    assert ordered.simulated(0.0).makespan > arrival.simulated(0.0).makespan
    assert arrival.simulated(0.005).makespan > arrival.simulated(0.0).makespan


def test_more_bytes_take_less_time():
    found = simulated.limited(Steps("", stages=4, per_stage=8, family="length-imbalanced"), seed=0)
    for figures in found.values():
        assert 0.5 < figures["most"] <= 1.0
        assert figures["bytes"] > 1.5
        assert figures["1 x"] > 1.005
        assert figures["4 x"] == pytest.approx(1.0, abs=0.01)


def test_figures_go_to_their_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- end of x -->\nb\n<!-- y -->\n", encoding="utf-8")
    put_figures(page, "x", "new\n")
    put_figures(page, "x", "newer\n")
    assert page.read_text(encoding="utf-8") == "a\n<!-- x -->\nnewer\n<!-- end of x -->\nb\n<!-- y -->\n"
    for name in ("y", "z"):
        with pytest.raises(ValueError, match=f"no place between <!-- {name} -->"):
            put_figures(page, name, "new\n")
