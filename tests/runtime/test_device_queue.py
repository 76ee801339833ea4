"""A device as the driver sees it: who is woken when, when there is room, and how often anything is asked."""

import socket
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from rrfp_jax.core.foresight import MARGIN
from rrfp_jax.core.hints import BF
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Input, Placement, Task
from rrfp_jax.runtime.engine.device import LATE_SHARE, LATEST, DeviceQueue, Running
from rrfp_jax.runtime.engine.loop import Driver, EventWakeup
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.waits import SHORTEST_PAUSE
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.transport.protocol import Key, LocalTransport, Transport
from tests.launcher.conftest import until

LIMIT_SECONDS = 10.0


class Token:
    """Of a program that ends when the test says so."""

    def __init__(self):
        self.ended = threading.Event()

    def is_ready(self):
        return self.ended.is_set()

    def block_until_ready(self):
        assert self.ended.wait(LIMIT_SECONDS)


def program(microbatch, token):
    now = time.perf_counter()
    return Running(0, 0, Task(FORWARD, 0, microbatch), 0, "F", token, now, now)


@pytest.fixture
def watched():
    """A queue, and a semaphore that each wake-up releases."""
    woken = threading.Semaphore(0)
    queue = DeviceQueue("device", woken.release)
    with queue:
        yield queue, woken
    queue.close()


def test_one_ring_or_several_before_a_sleep_end_one_sleep():
    bell = EventWakeup()
    for rings in (1, 3):
        for _ in range(rings):
            bell.ring()
        began = time.perf_counter()
        bell.sleep(LIMIT_SECONDS)
        assert time.perf_counter() - began < LIMIT_SECONDS / 2
        began = time.perf_counter()
        bell.sleep(0.05)
        assert time.perf_counter() - began >= 0.04


def test_whoever_sleeps_is_woken_from_another_thread():
    bell = EventWakeup()
    threading.Timer(0.05, bell.ring).start()
    began = time.perf_counter()
    bell.sleep(LIMIT_SECONDS)
    assert time.perf_counter() - began < LIMIT_SECONDS / 2


def test_the_oldest_program_alone_is_watched_and_the_next_once_the_driver_sleeps_again(watched):
    queue, woken = watched
    tokens = [Token(), Token()]
    for j, token in enumerate(tokens):
        queue.submit(program(j, token))
    for j, token in enumerate(tokens):
        queue.watch()
        assert not woken.acquire(timeout=0.05)
        token.ended.set()
        assert woken.acquire(timeout=LIMIT_SECONDS) and not woken.acquire(timeout=0.05)
        assert [running.task.microbatch for running in queue.ended()] == [j]


def test_sleeping_again_before_an_end_watches_nothing_twice(watched):
    queue, woken = watched
    token = Token()
    queue.submit(program(0, token))
    for _ in range(3):
        queue.watch()
    token.ended.set()
    assert woken.acquire(timeout=LIMIT_SECONDS) and not woken.acquire(timeout=0.05)


def test_an_end_that_the_driver_has_seen_wakes_nobody(watched):
    queue, woken = watched
    seen, token = Token(), Token()
    queue.submit(program(0, seen))
    queue.submit(program(1, token))
    seen.ended.set()
    assert len(queue.ended()) == 1
    queue.watch()
    token.ended.set()
    assert woken.acquire(timeout=LIMIT_SECONDS) and not woken.acquire(timeout=0.05)


def test_room_is_worked_out_again_when_something_was_submitted_or_has_ended(watched, monkeypatch):
    queue, _ = watched
    asked, room = [], DeviceQueue._room_at
    monkeypatch.setattr(DeviceQueue, "_room_at", lambda self, now: asked.append(now) or room(self, now))
    tokens = [Token(), Token()]
    for j, token in enumerate(tokens):
        queue.submit(program(j, token))
    for now in (1.0, 2.0, 3.0):
        assert queue.room_at(now) == float("inf")
    assert asked == [1.0]
    for token, full in zip(tokens, (True, False), strict=True):
        token.ended.set()
        queue.ended()
        assert (queue.room_at(4.0) > 4.0) == full
    queue.submit(program(2, Token()))
    assert queue.room_at(5.0) > 5.0


@pytest.mark.parametrize(
    ("seconds", "sends", "late"),
    [(1.2, True, 0.0), (5.0, True, 5.0 - MARGIN), (5.0, False, 0.0), (1e3, True, LATEST)],
)
def test_a_queue_knows_how_late_in_the_mean_what_it_sends_is(seconds, sends, late, watched):
    queue, _ = watched
    for start, took in enumerate([1.0] * 10 + [seconds], 1):
        running = program(start, None)
        running.dispatched, running.end = 10.0 * start, 10.0 * start + took
        running.sends = "a key" if sends else None
        queue.submit(running)
        assert len(queue.ended()) == 1
    assert queue.late == pytest.approx(LATE_SHARE * late)


def test_the_longer_a_copy_takes_the_longer_are_the_pauses_between_looks():
    transport = LocalTransport({})
    assert transport.seconds_until_poll() is None
    arrays = [SimpleNamespace(is_deleted=lambda: False, is_ready=lambda: False)]
    for j, ago in enumerate((1.0, 0.0)):
        key = Key(0, 1, Input(BACKWARD, 0, j))
        transport._waiting[key] = arrays
        transport.produced(key, time.perf_counter() - ago)
        pause = transport.seconds_until_poll()
        assert pause == SHORTEST_PAUSE if ago == 0.0 else SHORTEST_PAUSE < pause < 1.0


class Reading(Transport):
    """Between processes: whoever asks it reads messages, which ends what rings."""

    def __init__(self, mailbox):
        self._mailbox = mailbox

    def poll(self):
        self._mailbox.pump()
        return []

    def seconds_until_poll(self):
        return None


class LookedAtTooEarly(DeviceQueue):
    """Its program ends, and rings, right after the driver has looked at it, before messages are read."""

    def ended(self):
        found = super().ended()
        if self.flights and (token := self.flights[0].token).message.is_set():
            token.ended.set()
            until(lambda: self.flights[0].end)
        return found


def test_an_end_that_rings_while_messages_are_read_is_not_slept_over(monkeypatch):
    mine, theirs = socket.socketpair()
    mailbox, token, asked = Mailbox(0, {1: mine}), Token(), []
    token.message, sleep = threading.Event(), mailbox.sleep
    nothing = SimpleNamespace(dispatched=lambda task: None)
    part = SimpleNamespace(
        phase="train", buckets=[0], shapes=[0], meter=nothing, run=lambda *_: ([], token), finish=list
    )

    def slept(seconds):
        asked.append((token.ended.is_set(), seconds))
        if not token.message.is_set():
            token.message.set()
            mailbox.ring()  # as any message does
        sleep(seconds)

    monkeypatch.setattr(mailbox, "sleep", slept)
    world, devices = World(0, 2, mailbox), {0: jax.local_devices()[:1]}
    driver = Driver(devices, world, Reading(mailbox), queue=LookedAtTooEarly)
    rules = StepRules(placement=Placement(1), microbatches=1, schedule=BF(), forward_only=True)
    (record,) = driver.run(rules, 0, {0: part})
    driver.close()
    theirs.close()
    assert record.end and asked and not any(ended for ended, _ in asked)
