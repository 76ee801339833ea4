"""The clock of rank 0, as the other processes know it."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.runtime.run.mailbox import pack
from rrfp_jax.runtime.run.membership import SAMPLES, Beat, Echo, PeerClock
from tests.support.mailboxes import all_joined, joined, pump_until, received

pytestmark = pytest.mark.usefixtures("all_closed")


class TestClock:
    @given(
        st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)), min_size=1, max_size=40),
        st.floats(-1e4, 1e4),
    )
    @settings(max_examples=60, deadline=None)
    def test_is_known_as_precisely_as_it_says(self, ways, offset):
        clock = PeerClock()
        for number, (there, back) in enumerate(ways):
            sent = 10.0 * number
            clock.sample(sent, sent + there + offset, sent + there + back)
        assert abs(clock.offset - offset) <= clock.precision + 1e-9
        assert clock.precision == pytest.approx(min(map(sum, ways[-SAMPLES:])) / 2, abs=1e-9)

    def test_old_samples_are_forgotten(self):
        clock = PeerClock()
        assert (clock.offset, clock.precision, clock.samples) == (0.0, 0.0, 0)
        clock.sample(0.0, 5.0, 0.001)
        for number in range(SAMPLES):
            clock.sample(number, number + 7.0, number + 0.01)
        assert clock.offset == pytest.approx(7.0, abs=0.01) and clock.samples == SAMPLES

    def test_heartbeats_are_answered_by_rank_0_alone(self):
        zero, one, two = all_joined(3)
        for mailbox in (one, two):
            mailbox.tick()
        for mailbox in (zero, one, two):
            mailbox.pump()
        pump_until(one, lambda: one.membership.clock.samples)
        assert one.membership.clock.samples == 1 and zero.membership.clock.samples == 0
        assert abs(one.membership.clock.offset) <= one.membership.clock.precision < 5.0

    def test_offset_of_another_machine(self):
        mailbox, ends = joined(rank=3, others=(0, 1))
        for number in range(5):
            mailbox.tick()
            beat = received(ends[0], Beat)
            ends[0].sendall(pack(Echo(beat.sent, time.perf_counter() - 1234.5)))
            pump_until(mailbox, lambda number=number: mailbox.membership.clock.samples > number)
        assert abs(mailbox.membership.clock.offset + 1234.5) <= mailbox.membership.clock.precision < 1.0
