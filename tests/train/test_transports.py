"""Training by NIXL or mail gives the bits of sockets: a slice of `tests.verification.transports`."""

import pytest

from tests.verification.transports import differences, trained

pytestmark = pytest.mark.slow(reason="22 s: four processes; runtime/test_transport.py has NIXL between two")

CASES = ["bf", "tied"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By rank and case, both runs."""
    return trained(tmp_path_factory.mktemp("transports"), 3, CASES)


@pytest.mark.parametrize("case", CASES)
def test_all_train_alike(found, case):
    assert [rank[case]["nixl"]["params"] for rank in found] != [""] * 4
    assert differences(found, case) == []


def test_slots_are_in_the_ledgers(found):
    for rank in found:
        assert min(rank["bf"]["nixl"]["slots"]) > 0
        assert rank["bf"]["socket"]["slots"] == [0] * 4


def test_transports_that_are_gone_leave_nothing(found):
    """Slots stay until everybody has ended; then only the channel of all processes is left."""
    assert [rank["channels"] for rank in found] == [1] * 4


def test_what_differs_is_told(found):
    other = [{"bf": {**rank["bf"], "nixl": {**rank["bf"]["nixl"], "params": "0"}}} for rank in found]
    assert differences(other, "bf") == [f"rank {rank}: params by nixl" for rank in range(4)]
