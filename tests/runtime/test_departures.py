"""Peers that leave, are lost or fall silent, and a mailbox that closes: sockets in one process, no JAX."""

import socket
import time

import pytest

from rrfp_jax.errors import PeerLost
from rrfp_jax.runtime.run.mailbox import pack
from rrfp_jax.runtime.run.membership import Beat, Failed, Goodbye
from tests.support.mailboxes import (
    all_joined,
    in_thread,
    joined,
    listening,
    note,
    noted,
    opened,
    pump_until,
    reset_connection,
    tcp_pair,
)

pytestmark = pytest.mark.usefixtures("all_closed")


class TestGone:
    def note(self, *frames, how=None):
        """What is known of rank 1, and what is raised for it, after it sent these and closed somehow."""
        mine, theirs = tcp_pair()
        mailbox = opened(0, {1: mine})
        theirs.sendall(b"".join(frames))
        if how is not None:
            time.sleep(0.02)  # what was sent is there
            how(theirs)
        pump_until(mailbox, lambda: mailbox.membership.gone)
        for _ in range(3):
            mailbox.pump()
        with pytest.raises(PeerLost) as caught:
            mailbox.membership.require([1])
        return mailbox.membership.gone[1], str(caught.value)

    @pytest.mark.parametrize("how", [None, socket.socket.close, reset_connection])
    def test_who_says_goodbye_has_left(self, how):
        gone, sentence = self.note(pack(Goodbye()), how=how)
        assert (gone.how, gone.culprit) == ("left", 1)
        assert sentence == "rank 1 has ended while this process still needs it"

    @pytest.mark.parametrize("how", [None, socket.socket.close, reset_connection])
    def test_who_says_what_failed(self, how):
        gone, sentence = self.note(pack(Failed(7, "rank 7: no more disk")), how=how)
        assert (gone.how, gone.culprit, sentence) == ("failed", 7, "rank 7: no more disk")

    def test_who_says_nothing(self):
        gone, sentence = self.note(how=socket.socket.close)
        assert gone.how == "lost"
        assert sentence == "rank 1 closed its connection without a word: killed, crashed or cut off"

    def test_who_is_cut_off(self):
        gone, sentence = self.note(how=reset_connection)
        assert gone.how == "lost" and "rank 1" in sentence and "Connection reset by peer" in sentence

    def test_half_a_message_is_none(self):
        gone, _ = self.note(pack(Goodbye())[:-1], how=socket.socket.close)
        assert gone.how == "lost"

    def test_the_first_word_counts(self):
        gone, sentence = self.note(pack(Failed(1, "first")), pack(Failed(1, "second")), pack(Goodbye()))
        assert (gone.how, sentence) == ("failed", "first")

    def test_failure_explains_more_than_silence(self):
        mailbox, ends = joined(silence=TestSilence.LIMIT)
        TestSilence().judge(mailbox, 5.0)
        before = mailbox.membership.gone
        assert before[1].how == "lost"
        ends[1].sendall(pack(Goodbye()))
        mailbox.pump()
        assert mailbox.membership.gone[1].how == "lost"
        ends[1].sendall(pack(Failed(1, "out of memory")))
        mailbox.pump()
        assert mailbox.membership.gone[1].sentence == "out of memory"
        assert before[1].how == "lost"  # who looks from another thread sees no change under way

    @pytest.mark.parametrize(
        ("needed", "said"),
        [
            ([1, 2, 3, 4], "rank 9: the cause"),
            ([1, 2, 4], "rank 2 closed its connection"),
            ([1, 4], "rank 1 has ended while"),
        ],
    )
    def test_the_most_telling_is_raised(self, needed, said):
        mailbox, ends = joined(others=(1, 2, 3, 4))
        ends[1].sendall(pack(Goodbye()))
        ends[3].sendall(pack(Failed(9, "rank 9: the cause")))
        ends[2].close()
        pump_until(mailbox, lambda: len(mailbox.membership.gone) == 3)
        with pytest.raises(PeerLost, match=said):
            mailbox.membership.require(needed)
        mailbox.membership.require([4])
        mailbox.membership.require([])

    def test_what_came_before_the_end_is_handled(self):
        mailbox, ends = joined()
        heard = listening(mailbox)
        ends[1].sendall(noted(1) + noted(2))
        ends[1].close()
        pump_until(mailbox, lambda: mailbox.membership.gone)
        assert heard == [(1, 1), (1, 2)]


class TestSilence:
    LIMIT = 0.2

    def judge(self, mailbox, seconds, act=lambda: None):
        """Judge as often as a watchdog does, for some time or until somebody is gone."""
        deadline = time.monotonic() + seconds
        while not mailbox.membership.gone and time.monotonic() < deadline:
            act()
            mailbox.tick()
            time.sleep(self.LIMIT / 10)

    def test_the_silent_one_is_given_up(self):
        mailbox, ends = joined(others=(1, 2), silence=self.LIMIT)
        self.judge(mailbox, self.LIMIT / 2)
        assert not mailbox.membership.gone
        self.judge(mailbox, 5.0, lambda: ends[2].sendall(pack(Beat(0.0))))
        assert mailbox.membership.gone.keys() == {1}
        with pytest.raises(PeerLost, match=r"^rank 1 has not been heard from for 0 s: frozen or cut off$"):
            mailbox.membership.require([1, 2])

    def test_part_of_a_message_is_a_sign_of_life(self):
        mailbox, ends = joined(silence=self.LIMIT)
        ends[1].sendall(noted(b"x" * 1000)[:100])
        self.judge(mailbox, 3 * self.LIMIT, lambda: ends[1].sendall(b"x"))
        assert not mailbox.membership.gone

    def test_who_has_left_may_be_silent(self):
        mailbox, ends = joined(silence=self.LIMIT)
        ends[1].sendall(pack(Goodbye()))
        mailbox.pump()
        for _ in range(20):
            time.sleep(self.LIMIT / 10)
            mailbox.tick()
        assert mailbox.membership.gone[1].how == "left"

    def test_a_process_that_stood_still_itself_accuses_nobody(self):
        """After Ctrl-Z of all, none has been heard from, and all are alive."""
        mailbox, _ends = joined(silence=self.LIMIT)
        mailbox.tick()
        time.sleep(1.5 * self.LIMIT)
        mailbox.tick()
        assert not mailbox.membership.gone
        self.judge(mailbox, 5.0)
        assert mailbox.membership.gone[1].how == "lost"


class TestClose:
    def test_while_other_threads_are_at_it(self):
        for _ in range(5):
            mailbox, other = all_joined(2)
            with (
                in_thread(mailbox.read),
                in_thread(mailbox.tick),
                in_thread(mailbox.ring),
                in_thread(other.tick),
            ):
                time.sleep(5e-3)
                mailbox.close()
                time.sleep(5e-3)

    def test_nothing_happens_afterwards(self):
        mailbox, ends = joined()
        mailbox.close()
        descriptors = [*socket.socketpair(), *socket.socketpair()]  # may get the numbers of the closed ones
        mailbox.ring()
        mailbox.read()
        mailbox.pump()
        mailbox.post(1, note())
        mailbox.tick()
        for descriptor in descriptors:
            descriptor.setblocking(False)
            with pytest.raises(BlockingIOError):
                descriptor.recv(1)
        assert ends[1].recv(100) == b""
