"""What benchmark commands share."""

import pytest

from benchmarks.harness import Aim


@pytest.mark.parametrize(
    ("value", "limit", "said"),
    [
        (1.021, 1.02, "MISSED  it: 1.021 x (aim: 1.02)"),
        (1.019, 1.02, "met     it: 1.019 x (aim: 1.02)"),
        (1.00004, 1.0, "MISSED  it: 1.00004 x (aim: 1)"),
        (26.31, 25, "MISSED  it: 26.3 x (aim: 25)"),
        (25.04, 25, "MISSED  it: 25.04 x (aim: 25)"),
        (1234.5, 3000, "met     it: 1234.5 x (aim: 3000)"),
        (3, 0, "MISSED  it: 3 x (aim: 0)"),
        (float("inf"), 1.0, "MISSED  it: inf x (aim: 1)"),
        (float("nan"), 1.0, "MISSED  it: nan x (aim: 1)"),
    ],
)
def test_an_aim_shows_on_which_side_of_its_limit_a_figure_is(value, limit, said):
    assert str(Aim("it", value, limit, "x")) == said


def test_an_aim_from_below():
    assert str(Aim("it", 0.9496, 0.95, "", at_least=True)) == "MISSED  it: 0.9496 (aim: at least 0.95)"
