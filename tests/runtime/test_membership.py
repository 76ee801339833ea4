"""Exhaustive exploration of who is in a run: a slice of `tests.verification.explore membership`."""

import pytest

from tests.verification.exploration.membership.faults import faults
from tests.verification.exploration.membership.world import LARGE, SMALL, explore
from tests.verification.exploration.visits import Violation

MOST_STATES = 1_000


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_state_is_as_it_must_be(case):
    assert explore(case).whole


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_the_first_states_of_larger_cases(case):
    assert explore(case, enough=lambda states: states >= MOST_STATES).states >= MOST_STATES


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.machine.__name__)
def test_a_fault_is_found(fault):
    with pytest.raises(Violation, match=fault.said):
        explore(fault.case, fault.machine)
