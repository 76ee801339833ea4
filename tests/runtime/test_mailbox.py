"""Control messages between processes: sockets in one process, no JAX."""

import itertools
import random
import threading
import time
import weakref
from contextlib import ExitStack

import pytest

from rrfp_jax.runtime.run.mailbox import pack
from rrfp_jax.runtime.run.membership import Beat, Echo, Goodbye
from tests.support.mailboxes import (
    PROMPT_SECONDS,
    Note,
    all_joined,
    in_thread,
    joined,
    listening,
    note,
    noted,
    pump_until,
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
        assert 0.05 <= seconds_asleep(mailbox, 0.05) < 0.05 + PROMPT_SECONDS
        assert seconds_asleep(mailbox, 3e-4) < PROMPT_SECONDS
        assert seconds_asleep(mailbox, -1.0) < PROMPT_SECONDS

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
        assert mailbox.membership.clock.samples == (what == "echo")

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
