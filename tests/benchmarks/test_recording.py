"""What recording costs: it is switched off, and timed, where it should be; and the aims can be missed."""

import pytest

from benchmarks.beside import RECORDING, Account, judged, recorded
from rrfp_jax.runtime.run.recorder import FlightRecorder
from tests.support import toy


@pytest.mark.slow(reason="2 s: a Trainer of its own")
def test_recording_is_switched_off_and_on_again():
    trainer, account = toy.trainer(2), Account()
    there = [vars(owner)[name] for owner, name in RECORDING]
    steps = trainer.steps(3)
    with recorded("on", account):
        assert len(next(steps).trace.records) == 20
    account.seconds = 0.0
    with recorded("off", account):
        assert next(steps).trace.records == []
    assert account.seconds == 0.0
    with recorded("timed", account):
        assert len(next(steps).trace.records) == 20
    assert account.seconds > 0.0
    assert [vars(owner)[name] for owner, name in RECORDING] == there


def test_all_of_the_flight_recorder_is_known():
    """What is not switched off is inside of what is, done once, or for stages of several processes."""
    known = {name for owner, name in RECORDING if owner is FlightRecorder}
    known |= {"runs", "joins", "told", "heard"}
    there = {name for name in vars(FlightRecorder) if name[0] != "_"}
    assert there == known


def test_an_account_knows_what_calls_take():
    account = Account()
    account.seconds = 0.0
    assert account.timed(sum, range(1_000_000)) == 499_999_500_000
    once = account.seconds
    assert once > 1e-3
    for _ in range(100):
        account.timed(lambda: None)
    assert account.seconds < 1.5 * once


@pytest.mark.parametrize(
    ("on", "calls", "met"),
    [
        ([1.004, 1.0041, 1.0039] * 20, 1e-3, [True, True]),
        ([1.02, 1.021, 1.019] * 20, 1e-3, [False, True]),
        ([1.5, 0.9, 1.01] * 20, 1e-3, [True, True]),  # noise
        ([1.0, 1.001, 0.999] * 20, 6e-3, [True, False]),
    ],
)
def test_aims(on, calls, met):
    figures, aims = judged("real", {"on": on, "off": [1.0] * 60, "recording_by_rank": [1e-4, calls]})
    assert [aim.met for aim in aims] == met
    assert figures["calls_percent"] == pytest.approx(100 * calls, rel=0.05)
