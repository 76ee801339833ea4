"""When a run is started again, by events."""

import pytest

from rrfp_jax.errors import DONE, FAILED, INTERRUPTED, REFUSED
from rrfp_jax.launcher.restarts import BACK_OFF_SECONDS, NO_STEP, after_attempt
from rrfp_jax.runtime.run.recorder import FlightRecorder, RunPhase, read


@pytest.mark.parametrize("status", [DONE, REFUSED, INTERRUPTED])
def test_only_what_failed_is_started_again(status):
    assert after_attempt(status, [7], 5).wait is None
    assert after_attempt(FAILED, [7], 5).wait is not None


@pytest.mark.parametrize(
    ("reached", "waits"),
    [
        ([12], BACK_OFF_SECONDS[0]),
        ([12, 13], BACK_OFF_SECONDS[0]),
        ([12, 12], BACK_OFF_SECONDS[1]),
        ([12, 11], BACK_OFF_SECONDS[1]),
        ([12, 11, 12], BACK_OFF_SECONDS[2]),
        ([12, 11, 12, 13], BACK_OFF_SECONDS[0]),
        ([NO_STEP, NO_STEP, 0], BACK_OFF_SECONDS[0]),
    ],
)
def test_it_follows_later_the_longer_nothing_was_gained(reached, waits):
    assert after_attempt(FAILED, reached, 50).wait == waits


@pytest.mark.parametrize(
    ("reached", "most", "reason"),
    [
        ([12], 0, ""),
        ([1, 2, 3, 4], 3, "--max-restarts=3"),
        ([12, 12, 11, 12], 50, "3 restarts brought it no further than step 12"),
        ([NO_STEP] * 4, 50, "3 restarts brought it no further than the first step"),
    ],
)
def test_it_ends_when_that_is_pointless_or_too_often(reached, most, reason):
    verdict = after_attempt(FAILED, reached, most)
    assert verdict.wait is None and reason in verdict.reason
    assert bool(reason) == bool(verdict.reason)


def test_a_flight_recorder_tells_the_training_step_also_in_the_validation_after_it(tmp_path):
    recorder = FlightRecorder(tmp_path / "flight-0", 0, "")
    assert read(tmp_path / "flight-0").training_step is None
    for phase in (RunPhase("step", 12), RunPhase("validation", 3), RunPhase("validation", 4)):
        recorder.phase(phase)
        assert read(tmp_path / "flight-0").training_step == 12
