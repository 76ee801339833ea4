"""Control messages between processes: delivery, sleep, departures, silence, clocks, frames; no JAX."""

import itertools
import os
import random
import resource
import socket
import threading
import time
import weakref
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rrfp_jax.errors import PeerLost
from rrfp_jax.runtime.run.mailbox import HEADER, LARGEST_FRAME, SELECTED, Message, pack, pieces, unpack, whole
from rrfp_jax.runtime.run.membership import SAMPLES, Beat, Echo, Failed, Goodbye, PeerClock, Silent
from tests.support.mailboxes import (
    PROMPT_SECONDS,
    Note,
    all_joined,
    in_thread,
    joined,
    listening,
    note,
    noted,
    opened,
    pump_until,
    received,
    reset_connection,
    tcp_pair,
)

pytestmark = pytest.mark.usefixtures("all_closed")


def test_a_kind_has_one_handler_a_channel():
    mailbox, _ = joined()
    listening(mailbox)
    with pytest.raises(ValueError, match="'Note' on channel 0 have a handler already"):
        listening(mailbox)
    with pytest.raises(ValueError, match="'Goodbye' on channel 0"):
        mailbox.on(Goodbye, lambda rank, said: None)
    mailbox.on(Note, lambda rank, said: None, channel=1)


def test_a_channel_that_has_ended_lets_go_of_its_handlers_and_drops_what_still_comes():
    class Owner:
        def hear(self, rank, said):
            raise AssertionError("heard")

    mailbox, others = joined()
    heard, owner = listening(mailbox), Owner()
    gone = weakref.ref(owner)
    mailbox.on(Note, owner.hear, channel=7)
    mailbox.off(7)
    mailbox.off(7)
    del owner
    assert gone() is None
    others[1].sendall(pack(note("late"), 7) + noted("after it"))
    pump_until(mailbox, lambda: heard)
    assert heard == [(1, "after it")] and not mailbox.membership.gone


class TestDelivery:
    def test_in_order_whoever_reads(self):
        """Three processes post to each other while each one's watchdog reads, too."""
        mailboxes = all_joined(3)
        heard = [listening(mailbox) for mailbox in mailboxes]
        count = 300
        with ExitStack() as watchdogs:
            for mailbox in mailboxes:
                watchdogs.enter_context(in_thread(lambda box=mailbox: (box.read(), time.sleep(1e-4))))
            for number in range(count):
                for mailbox in mailboxes:
                    mailbox.post_all(note(number))
                    mailbox.pump()
            for mailbox, notes in zip(mailboxes, heard, strict=True):
                pump_until(mailbox, lambda notes=notes: len(notes) == 2 * count)
        for rank, notes in enumerate(heard):
            for other in {0, 1, 2} - {rank}:
                assert [number for sender, number in notes if sender == other] == list(range(count))

    def test_one_that_does_not_read_blocks_nobody(self):
        mailbox, other = all_joined(2)
        heard = listening(other)
        count, load = 400, b"x" * 50_000
        began = time.perf_counter()
        for number in range(count):
            mailbox.post(1, note(number, load))
        mailbox.pump()
        assert time.perf_counter() - began < 1.0
        assert not mailbox.flushed()
        with in_thread(
            lambda: (mailbox.sleep(1.0), mailbox.pump())
        ):  # goes on sending as it sleeps and reads
            pump_until(other, lambda: len(heard) == count)
            mailbox.ring()
        assert [number for _, number, _ in heard] == list(range(count))
        assert mailbox.flushed()

    def test_what_one_that_is_not_gone_has_not_taken_is_not_delivered(self):
        mailbox, other = all_joined(2)
        heard = listening(other)
        mailbox.post(1, note())
        assert mailbox.flushed() and not mailbox.delivered()  # to a Unix socket: until it is read
        pump_until(other, lambda: len(heard) == 1)
        assert mailbox.delivered()
        mailbox.post(1, note())
        mailbox.membership.closed(1, "is gone", time.perf_counter())
        assert mailbox.delivered()

    def test_data_that_fails_waits_for_the_word_on_one_that_is_silent(self):
        mailbox, _ = joined(silence=3.0)
        with (
            in_thread(lambda: (mailbox.tick(), time.sleep(0.05))),
            pytest.raises(PeerLost, match="not been heard from for 3 s"),
        ):
            mailbox.hear_of_losses()

    def test_posting_to_one_that_is_gone_does_nothing(self):
        mailbox, ends = joined()
        ends[1].close()
        for _ in range(3):
            mailbox.post(1, note())
            mailbox.tick()
            mailbox.pump()
        assert mailbox.flushed() and mailbox.membership.gone[1].how == "lost"

    def test_both_threads_may_post(self):
        mailbox, other = all_joined(2)
        heard = listening(other)
        numbers = itertools.count()
        with in_thread(lambda: mailbox.post(1, note("watchdog", next(numbers), b"y" * 3000))):
            for number in range(500):
                mailbox.post(1, note("main", number, b"x" * 3000))
                other.pump()
        sent = {"main": 500, "watchdog": next(numbers)}

        def drain():
            mailbox.flushed()
            return len(heard) == sum(sent.values())

        pump_until(other, drain)
        for who, count in sent.items():
            assert [number for _, name, number, _ in heard if name == who] == list(range(count))


def seconds_asleep(mailbox, limit=5.0):
    began = time.perf_counter()
    mailbox.sleep(limit)
    return time.perf_counter() - began


class TestSleep:
    def test_lasts_as_long_as_asked(self):
        mailbox, _ends = joined()
        for asked in (0.05, 3e-4, -1.0):
            lasted = [seconds_asleep(mailbox, asked) for _ in range(3)]
            assert max(asked, 0.0) <= min(lasted) < max(asked, 0.0) + PROMPT_SECONDS  # a busy machine: longer

    def test_a_ring_ends_it(self):
        mailbox, _ends = joined()
        for _ in range(5):
            rung = []
            threading.Timer(
                0.05, lambda rung=rung: (rung.append(time.perf_counter()), mailbox.ring())
            ).start()
            mailbox.sleep(5.0)
            assert rung and time.perf_counter() - rung[0] < PROMPT_SECONDS
            mailbox.pump()

    def test_descriptors_with_high_numbers_do(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * SELECTED if hard == resource.RLIM_INFINITY else min(2 * SELECTED, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
        with ExitStack() as stack:
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            while (taken := os.open(os.devnull, os.O_RDONLY)) < SELECTED:
                stack.callback(os.close, taken)
            stack.callback(os.close, taken)
            mailbox, ends = joined()
            heard = listening(mailbox)
            assert seconds_asleep(mailbox, 0.1) >= 0.1
            ends[1].sendall(noted("there"))
            assert seconds_asleep(mailbox) < PROMPT_SECONDS
            mailbox.pump()
        assert heard == [(1, "there")]

    def test_a_ring_beforehand_counts_once(self):
        mailbox, _ends = joined()
        mailbox.ring()
        mailbox.ring()
        assert seconds_asleep(mailbox) < PROMPT_SECONDS
        mailbox.pump()
        assert seconds_asleep(mailbox, 0.1) >= 0.1

    @pytest.mark.parametrize("last", [b"", pack(Goodbye()), b"\xff\xff\xff\xff"])
    def test_one_that_is_gone_disturbs_it_no_more(self, last):
        mailbox, ends = joined()
        ends[1].sendall(last)
        ends[1].close()
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            mailbox.pump()
        assert mailbox.membership.gone and seconds_asleep(mailbox, 0.1) >= 0.1

    def test_rings_never_block(self):
        mailbox, _ends = joined()
        for _ in range(100_000):
            mailbox.ring()
        assert seconds_asleep(mailbox) < PROMPT_SECONDS

    @pytest.mark.parametrize("what", ["ring", "message", "beat", "echo", "death"])
    def test_what_the_watchdog_takes_away_is_not_missed(self, what):
        """It reads between the main thread's last look and its sleep."""
        mailbox, ends = joined(rank=1, others=(0,))
        heard = listening(mailbox)
        mailbox.pump()
        if what == "ring":
            mailbox.ring()
        elif what == "death":
            ends[0].close()
        else:
            frames = {"message": noted(), "beat": pack(Beat(1.0)), "echo": pack(Echo(1.0, 2.0))}
            ends[0].sendall(frames[what])
        mailbox.read()
        assert seconds_asleep(mailbox) < PROMPT_SECONDS
        mailbox.pump()
        assert bool(heard) == (what == "message")
        assert bool(mailbox.membership.gone) == (what == "death")
        assert len(mailbox.membership.clock.samples) == (what == "echo")

    def test_nothing_is_late_under_load(self):
        """Messages and rings come at random times while a watchdog reads, beats and judges."""
        mailbox, ends = joined()
        late = []
        mailbox.on(Note, lambda rank, note: late.append(time.perf_counter() - note.content[0]))
        chance = random.Random(0)

        def watch():
            mailbox.tick()
            time.sleep(chance.random() * 1e-4)

        def send():
            time.sleep(chance.random() * 5e-3)
            ends[1].sendall(noted(time.perf_counter()))

        with in_thread(watch), in_thread(send), in_thread(lambda: ends[1].recv(2**16)):
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline:
                mailbox.sleep(5.0)
                mailbox.pump()
        mailbox.pump()
        assert len(late) > 100 and max(late) < PROMPT_SECONDS


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
        assert sentence == "rank 1 closed its connection without a message: killed, crashed or cut off"

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
        self.judge(mailbox, 5.0, lambda: ends[2].sendall(pack(Silent((1,)))))
        assert mailbox.membership.gone.keys() == {1}
        with pytest.raises(PeerLost, match=r"^rank 1 has not been heard from for 0.2 s: frozen or cut off$"):
            mailbox.membership.require([1, 2])

    def test_where_another_hears_the_silent_one_it_is_the_link(self):
        mailbox, ends = joined(others=(1, 2), silence=self.LIMIT)
        self.judge(mailbox, 5.0, lambda: ends[2].sendall(pack(Beat(0.0))))
        with pytest.raises(PeerLost, match=r"^the connection between rank 0 and rank 1 was dead for 0.2 s$"):
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
        assert (clock.offset, clock.precision, len(clock.samples)) == (0.0, 0.0, 0)
        clock.sample(0.0, 5.0, 0.001)
        for number in range(SAMPLES):
            clock.sample(number, number + 7.0, number + 0.01)
        assert clock.offset == pytest.approx(7.0, abs=0.01) and len(clock.samples) == SAMPLES

    def test_heartbeats_are_answered_by_rank_0_alone(self):
        zero, one, two = all_joined(3)
        for mailbox in (one, two):
            mailbox.tick()
        for mailbox in (zero, one, two):
            mailbox.pump()
        pump_until(one, lambda: one.membership.clock.samples)
        assert len(one.membership.clock.samples) == 1 and not zero.membership.clock.samples
        assert abs(one.membership.clock.offset) <= one.membership.clock.precision < 5.0

    def test_offset_of_another_machine(self):
        mailbox, ends = joined(rank=3, others=(0, 1))
        for number in range(5):
            mailbox.tick()
            beat = received(ends[0], Beat)
            ends[0].sendall(pack(Echo(beat.sent, time.perf_counter() - 1234.5)))
            pump_until(mailbox, lambda number=number: len(mailbox.membership.clock.samples) > number)
        assert abs(mailbox.membership.clock.offset + 1234.5) <= mailbox.membership.clock.precision < 1.0


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
messages = st.lists(st.lists(plain | st.binary(), max_size=4), max_size=6)


class Gossip(Message, frozen=True):
    pass


def framed(body):
    return bytearray(len(body).to_bytes(HEADER, "big") + body)


def framed_as(kind, body):
    """A frame that says to be of a kind."""
    return framed(msgspec.msgpack.encode([kind, 0, body]))


class TestFrames:
    @given(messages, st.randoms(use_true_random=False))
    @settings(max_examples=50, deadline=None)
    def test_split_anywhere(self, contents, random):
        mailbox, ends = joined()
        heard = listening(mailbox)
        stream = b"".join(noted(*content) for content in contents)
        cuts = sorted(random.randrange(len(stream) + 1) for _ in range(6))
        for start, end in itertools.pairwise([0, *cuts, len(stream)]):
            ends[1].sendall(stream[start:end])
            mailbox.pump()
        assert heard == [(1, *content) for content in contents]
        mailbox.close()

    @given(messages)
    @settings(max_examples=50, deadline=None)
    def test_byte_by_byte(self, contents):
        buffer, found = bytearray(), []
        for byte in b"".join(noted(*content) for content in contents):
            buffer.append(byte)
            if (frame := unpack(buffer)) is not None:
                assert not buffer and frame.kind == "Note"
                found.append(msgspec.msgpack.decode(frame.body, type=Note))
        assert found == [note(*content) for content in contents]

    @given(st.binary(max_size=60))
    @example(b"\x92\xa1x\x81\x90\x01")  # a map whose key is a list
    @settings(max_examples=500, deadline=None)
    def test_garbage_is_refused_in_one_way(self, body):
        try:
            frame = unpack(framed(body))
        except ValueError:
            return
        assert isinstance(frame.kind, str) and isinstance(frame.channel, int)

    @pytest.mark.parametrize(
        ("frame", "reason"),
        [
            ((LARGEST_FRAME + 1).to_bytes(4, "big"), f"a frame of {LARGEST_FRAME + 1} bytes"),
            (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
            (framed(b""), "no message"),
            (framed(b"\xc1"), "no message"),
            (framed(b"\x90\x90"), "no message"),
            (framed(b"\x90"), "no message"),
            (framed(b"\x91\x07"), "no message"),
            (framed(b"\x07"), "no message"),
            (framed(b"\x91" * 100_000), "no message"),
            (pack(Gossip()), "an unknown message 'Gossip'"),
            (noted(1, 2)[:-3] + b"\x92\x01\xc1", "no message"),
            (framed_as("Note", 1), "a message 'Note' that is none"),
            (framed_as("Note", [1]), "a message 'Note' that is none"),
            (framed_as("Echo", ["soon", None]), "a message 'Echo' that is none"),
            (framed_as("Echo", [1.0]), "a message 'Echo' that is none"),
            (framed_as("Failed", []), "a message 'Failed' that is none"),
            (framed_as("Failed", [1.5, "why"]), "a message 'Failed' that is none"),
            (framed_as("Failed", [1, b"why"]), "a message 'Failed' that is none"),
            (pack(note(1), channel=7), "an unknown message 'Note'"),
        ],
    )
    def test_a_bad_one_drops_the_peer(self, frame, reason):
        mailbox, ends = joined(others=(1, 2))
        heard = listening(mailbox)
        ends[1].sendall(noted("before") + frame + noted("after"))
        ends[2].sendall(noted("well"))
        pump_until(mailbox, lambda: len(heard) == 2)
        assert heard == [(1, "before"), (2, "well")]
        with pytest.raises(PeerLost, match=f"^rank 1 sent .*{reason}") as caught:
            mailbox.membership.require([1, 2])
        assert caught.value.culprit == 1
        mailbox.membership.require([2])

    def test_one_that_is_too_large_is_not_sent(self):
        mailbox, _ends = joined()
        with pytest.raises(ValueError, match=r"a message Note of 10\d{5} bytes"):
            mailbox.post(1, note(b"x" * LARGEST_FRAME))


def test_frames_hold_plain_data_only():
    with pytest.raises(TypeError, match="object is no plain data"):
        noted(object())
    assert whole(pieces([(1, 2), np.float64(0.5), {"a": np.int32(3)}])) == [[1, 2], 0.5, {"a": 3}]


@pytest.mark.parametrize("message", [Echo(1.0, 2.5), Failed(3, "so it is"), note([1], None)])
def test_what_a_message_says_is_what_it_was_given(message):
    frame = unpack(bytearray(pack(message, channel=5)))
    assert (frame.kind, frame.channel) == (type(message).__name__, 5)
    assert msgspec.msgpack.decode(frame.body, type=type(message)) == message
