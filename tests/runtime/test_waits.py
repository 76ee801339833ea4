"""How long a wait is: time in which the whole process stood still is not waited."""

import pytest

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run import waits
from rrfp_jax.runtime.run.waits import ForOther, LimitedWait, Waits


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(waits, "perf_counter", clock)
    return clock


LOOKS = {
    "every second": [1.0] * 300,
    "stands still once": [1.0, 5000.0, *[1.0] * 299],
    "stands still twice": [1.0, 500.0, 1.0, 500.0, *[1.0] * 298],
    "less and less often": [*[1.0] * 200, 10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0, 19.5],
}


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_a_wait_comes_to_its_limit_by_what_was_waited(clock, looks):
    wait = LimitedWait(Waits(0, "rank {}".format), ForOther(what="the input of F3"), 300.0)
    *before, last = looks
    for seconds in before:
        clock.now += seconds
        wait.check()
    clock.now += last
    with pytest.raises(TrainingError, match=r"rank 0 gives up waiting for the input of F3, since 300\.0 s"):
        wait.check()
