"""Control messages, and the handshake that makes their connections: sockets in one process, no JAX."""

import itertools
import logging
import random
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rrfp_jax.errors import PeerLost, TrainingError
from rrfp_jax.runtime.clock import SAMPLES, PeerClock
from rrfp_jax.runtime.frames import LARGEST_FRAME, pack, unpack
from rrfp_jax.runtime.handshake import LARGEST_HELLO, connect, listen
from rrfp_jax.runtime.mailbox import Mailbox

PROMPT_SECONDS = 0.3
"""Less than any pause of the code, more than a loaded machine takes to wake a thread."""


made: list[Mailbox] = []


@pytest.fixture(autouse=True)
def all_closed():
    yield
    while made:
        made.pop().close()


def opened(rank, sockets):
    """A mailbox that is closed at the end of the test."""
    made.append(Mailbox(rank, sockets))
    return made[-1]


def joined(rank=0, others=(1,)):
    """A mailbox, and the raw other ends of its connections by rank."""
    pairs = {other: socket.socketpair() for other in others}
    for _, theirs in pairs.values():
        theirs.settimeout(5.0)
    mailbox = opened(rank, {other: mine for other, (mine, _) in pairs.items()})
    return mailbox, {other: theirs for other, (_, theirs) in pairs.items()}


def all_joined(count):
    """Mailboxes of so many ranks."""
    sockets = [{} for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        sockets[a][b], sockets[b][a] = socket.socketpair()
    return [opened(rank, own) for rank, own in enumerate(sockets)]


def listening(mailbox, topic="note"):
    """The list in which messages of a topic appear as (rank, *content)."""
    heard = []
    mailbox.on(topic, lambda *message: heard.append(message))
    return heard


def pump_until(mailbox, condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    mailbox.pump()
    while not condition():
        assert time.monotonic() < deadline
        mailbox.sleep(0.05)
        mailbox.pump()


def received(connection):
    """The next message at a raw end."""
    buffer = bytearray()
    while (message := unpack(buffer)) is None:
        buffer += connection.recv(1)
    return message


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        mine, _ = server.accept()
    return mine, theirs


def reset_connection(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def in_thread(act):
    """Something that goes on over and over; its error is raised at the end."""
    stop, errors = threading.Event(), []

    def loop():
        try:
            while not stop.is_set():
                act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5.0)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
messages = st.lists(st.lists(plain | st.binary(), max_size=4), max_size=6)


class TestFrames:
    @given(messages, st.randoms(use_true_random=False))
    @settings(max_examples=50, deadline=None)
    def test_split_anywhere(self, contents, random):
        mailbox, ends = joined()
        heard = listening(mailbox)
        stream = b"".join(pack("note", *content) for content in contents)
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
        for byte in b"".join(pack("note", *content) for content in contents):
            buffer.append(byte)
            if (message := unpack(buffer)) is not None:
                assert not buffer
                found.append(message)
        assert found == [["note", *content] for content in contents]

    @given(st.binary(max_size=60))
    @example(b"\x92\xa1x\x81\x90\x01")  # a map whose key is a list
    @settings(max_examples=500, deadline=None)
    def test_garbage_is_refused_in_one_way(self, body):
        try:
            message = unpack(bytearray(len(body).to_bytes(4, "big") + body))
        except ValueError:
            return
        assert isinstance(message[0], str)

    @pytest.mark.parametrize(
        ("frame", "reason"),
        [
            ((LARGEST_FRAME + 1).to_bytes(4, "big"), f"a frame of {LARGEST_FRAME + 1} bytes"),
            (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
            (b"\0\0\0\0", "not msgpack"),
            (b"\0\0\0\1\xc1", "not msgpack"),
            (b"\0\0\0\2\x90\x90", "not msgpack"),
            (b"\0\0\0\1\x90", "no message"),
            (b"\0\0\0\2\x91\x07", "no message"),
            (b"\0\0\0\1\x07", "no message"),
            (pack("note", {1: 2})[:-3] + b"\x81\x90\x01", "not msgpack"),
            (pack("gossip"), "an unknown message 'gossip'"),
            (pack("echo", "soon", None), "an unknown message 'echo'"),
            (pack("failed"), "an unknown message 'failed'"),
        ],
    )
    def test_a_bad_one_drops_the_peer(self, frame, reason):
        mailbox, ends = joined(others=(1, 2))
        heard = listening(mailbox)
        ends[1].sendall(pack("note", "before") + frame + pack("note", "after"))
        ends[2].sendall(pack("note", "well"))
        pump_until(mailbox, lambda: len(heard) == 2)
        assert heard == [(1, "before"), (2, "well")]
        with pytest.raises(PeerLost, match=f"^rank 1 sent .*{reason}") as caught:
            mailbox.require([1, 2])
        assert caught.value.culprit == 1
        mailbox.require([2])

    def test_one_that_is_too_large_is_not_sent(self):
        mailbox, _ends = joined()
        with pytest.raises(ValueError, match=r"'note' has 10000\d\d bytes|'note' has 10\d{5} bytes"):
            mailbox.post(1, "note", b"x" * LARGEST_FRAME)


class TestDelivery:
    def test_in_order_whoever_reads(self):
        """Three processes post to each other while each one's watchdog reads, too."""
        mailboxes = all_joined(3)
        heard = [listening(mailbox) for mailbox in mailboxes]
        count = 300
        with ExitStack() as watchdogs:
            for mailbox in mailboxes:
                watchdogs.enter_context(in_thread(lambda box=mailbox: (box.read_if_idle(), time.sleep(1e-4))))
            for number in range(count):
                for mailbox in mailboxes:
                    mailbox.post_all("note", number)
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
            mailbox.post(1, "note", number, load)
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
            mailbox.post(1, "note")
            mailbox.beat()
            mailbox.pump()
        assert mailbox.flushed() and mailbox.gone[1].how == "lost"

    def test_both_threads_may_post(self):
        mailbox, other = all_joined(2)
        heard = listening(other)
        numbers = itertools.count()
        with in_thread(lambda: mailbox.post(1, "note", "watchdog", next(numbers), b"y" * 3000)):
            for number in range(500):
                mailbox.post(1, "note", "main", number, b"x" * 3000)
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

    @pytest.mark.parametrize("last", [b"", pack("goodbye"), b"\xff\xff\xff\xff"])
    def test_one_that_is_gone_disturbs_it_no_more(self, last):
        mailbox, ends = joined()
        ends[1].sendall(last)
        ends[1].close()
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            mailbox.pump()
        assert mailbox.gone and seconds_asleep(mailbox, 0.1) >= 0.1

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
            frames = {"message": pack("note"), "beat": pack("beat", 1.0), "echo": pack("echo", 1.0, 2.0)}
            ends[0].sendall(frames[what])
        mailbox.read_if_idle()
        assert seconds_asleep(mailbox) < PROMPT_SECONDS
        mailbox.pump()
        assert bool(heard) == (what == "message")
        assert bool(mailbox.gone) == (what == "death")
        assert mailbox.clock.samples == (what == "echo")

    def test_nothing_is_late_under_load(self):
        """Messages and rings come at random times while a watchdog reads, beats and judges."""
        mailbox, ends = joined()
        late = []
        mailbox.on("note", lambda rank, sent: late.append(time.perf_counter() - sent))
        chance = random.Random(0)

        def watch():
            mailbox.beat()
            mailbox.read_if_idle()
            mailbox.judge_silence(60.0)
            time.sleep(chance.random() * 1e-4)

        def send():
            time.sleep(chance.random() * 5e-3)
            ends[1].sendall(pack("note", time.perf_counter()))

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
        pump_until(mailbox, lambda: mailbox.gone)
        for _ in range(3):
            mailbox.pump()
        with pytest.raises(PeerLost) as caught:
            mailbox.require([1])
        return mailbox.gone[1], str(caught.value)

    @pytest.mark.parametrize("how", [None, socket.socket.close, reset_connection])
    def test_who_says_goodbye_has_left(self, how):
        gone, sentence = self.note(pack("goodbye"), how=how)
        assert (gone.how, gone.culprit) == ("left", 1)
        assert sentence == "rank 1 has ended while this process still needs it"

    @pytest.mark.parametrize("how", [None, socket.socket.close, reset_connection])
    def test_who_says_what_failed(self, how):
        gone, sentence = self.note(pack("failed", 7, "rank 7: no more disk"), how=how)
        assert (gone.how, gone.culprit, sentence) == ("failed", 7, "rank 7: no more disk")

    def test_who_says_nothing(self):
        gone, sentence = self.note(how=socket.socket.close)
        assert gone.how == "lost"
        assert sentence == "rank 1 closed its connection without a word: killed, crashed or cut off"

    def test_who_is_cut_off(self):
        gone, sentence = self.note(how=reset_connection)
        assert gone.how == "lost" and "rank 1" in sentence and "Connection reset by peer" in sentence

    def test_half_a_message_is_none(self):
        gone, _ = self.note(pack("goodbye")[:-1], how=socket.socket.close)
        assert gone.how == "lost"

    def test_the_first_word_counts(self):
        gone, sentence = self.note(pack("failed", 1, "first"), pack("failed", 1, "second"), pack("goodbye"))
        assert (gone.how, sentence) == ("failed", "first")

    def test_failure_explains_more_than_silence(self):
        mailbox, ends = joined()
        TestSilence().judge(mailbox, 5.0)
        before = mailbox.gone
        assert before[1].how == "lost"
        ends[1].sendall(pack("goodbye"))
        mailbox.pump()
        assert mailbox.gone[1].how == "lost"
        ends[1].sendall(pack("failed", 1, "out of memory"))
        mailbox.pump()
        assert mailbox.gone[1].sentence == "out of memory"
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
        mailbox.describe = "rank {}".format
        ends[1].sendall(pack("goodbye"))
        ends[3].sendall(pack("failed", 9, "rank 9: the cause"))
        ends[2].close()
        pump_until(mailbox, lambda: len(mailbox.gone) == 3)
        with pytest.raises(PeerLost, match=said):
            mailbox.require(needed)
        mailbox.require([4])
        mailbox.require([])

    def test_what_came_before_the_end_is_handled(self):
        mailbox, ends = joined()
        heard = listening(mailbox)
        ends[1].sendall(pack("note", 1) + pack("note", 2))
        ends[1].close()
        pump_until(mailbox, lambda: mailbox.gone)
        assert heard == [(1, 1), (1, 2)]


class TestSilence:
    LIMIT = 0.2

    def judge(self, mailbox, seconds, act=lambda: None):
        """Judge as often as a watchdog does, for some time or until somebody is gone."""
        deadline = time.monotonic() + seconds
        while not mailbox.gone and time.monotonic() < deadline:
            act()
            mailbox.read_if_idle()
            mailbox.judge_silence(self.LIMIT)
            time.sleep(self.LIMIT / 10)

    def test_the_silent_one_is_given_up(self):
        mailbox, ends = joined(others=(1, 2))
        self.judge(mailbox, self.LIMIT / 2)
        assert not mailbox.gone
        self.judge(mailbox, 5.0, lambda: ends[2].sendall(pack("beat", 0.0)))
        assert mailbox.gone.keys() == {1}
        with pytest.raises(PeerLost, match=r"^rank 1 has not been heard from for 0 s: frozen or cut off$"):
            mailbox.require([1, 2])

    def test_part_of_a_message_is_a_sign_of_life(self):
        mailbox, ends = joined()
        ends[1].sendall(pack("note", b"x" * 1000)[:100])
        self.judge(mailbox, 3 * self.LIMIT, lambda: ends[1].sendall(b"x"))
        assert not mailbox.gone

    def test_who_has_left_may_be_silent(self):
        mailbox, ends = joined()
        ends[1].sendall(pack("goodbye"))
        mailbox.pump()
        for _ in range(20):
            time.sleep(self.LIMIT / 10)
            mailbox.judge_silence(self.LIMIT)
        assert mailbox.gone[1].how == "left"

    def test_a_process_that_stood_still_itself_accuses_nobody(self):
        """After Ctrl-Z of all, none has been heard from, and all are alive."""
        mailbox, _ends = joined()
        mailbox.judge_silence(self.LIMIT)
        time.sleep(1.5 * self.LIMIT)
        mailbox.judge_silence(self.LIMIT)
        assert not mailbox.gone
        self.judge(mailbox, 5.0)
        assert mailbox.gone[1].how == "lost"


class TestClose:
    def test_while_other_threads_are_at_it(self):
        for _ in range(5):
            mailbox, other = all_joined(2)
            with (
                in_thread(mailbox.read_if_idle),
                in_thread(mailbox.beat),
                in_thread(mailbox.ring),
                in_thread(lambda box=mailbox: box.judge_silence(9.0)),
                in_thread(other.beat),
            ):
                time.sleep(5e-3)
                mailbox.close()
                time.sleep(5e-3)

    def test_nothing_happens_afterwards(self):
        mailbox, ends = joined()
        mailbox.close()
        descriptors = [*socket.socketpair(), *socket.socketpair()]  # may get the numbers of the closed ones
        mailbox.ring()
        mailbox.read_if_idle()
        mailbox.pump()
        mailbox.post(1, "note")
        mailbox.beat()
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
    @settings(max_examples=200, deadline=None)
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
            mailbox.beat()
        for mailbox in (zero, one, two):
            mailbox.pump()
        pump_until(one, lambda: one.clock.samples)
        assert one.clock.samples == 1 and zero.clock.samples == 0
        assert abs(one.clock.offset) <= one.clock.precision < 5.0

    def test_offset_of_another_machine(self):
        mailbox, ends = joined(rank=3, others=(0, 1))
        for number in range(5):
            mailbox.beat()
            topic, sent = received(ends[0])
            assert topic == "beat"
            ends[0].sendall(pack("echo", sent, time.perf_counter() - 1234.5))
            pump_until(mailbox, lambda number=number: mailbox.clock.samples > number)
        assert abs(mailbox.clock.offset + 1234.5) <= mailbox.clock.precision < 1.0


TOKEN = "0123abcd"


class Handshakes:
    """Ranks that connect in threads of this process."""

    def __init__(self, count, seconds=5.0):
        self.listeners = [listen("127.0.0.1") for _ in range(count)]
        self.addresses = [listener.getsockname()[:2] for listener in self.listeners]
        self.found, self.errors, self.seconds = {}, {}, seconds
        self.threads = {}

    def start(self, *ranks, token=TOKEN):
        for rank in ranks:
            self.threads[rank] = threading.Thread(target=self._connect, args=(rank, token), daemon=True)
            self.threads[rank].start()

    def _connect(self, rank, token):
        try:
            self.found[rank] = connect(self.listeners[rank], self.addresses, rank, token, self.seconds)
        except Exception as error:
            self.errors[rank] = error

    def join(self, *ranks):
        for rank in ranks or self.threads:
            self.threads[rank].join(10.0)
            assert not self.threads[rank].is_alive()

    def call(self, rank, frame=b""):
        caller = socket.create_connection(self.addresses[rank], timeout=5.0)
        caller.sendall(frame)
        return caller


def dropped(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


class TestHandshake:
    def test_every_pair_is_connected(self):
        ranks = Handshakes(4)
        ranks.start(0, 1, 2, 3)
        ranks.join()
        mailboxes = [opened(rank, ranks.found[rank]) for rank in range(4)]
        heard = [listening(mailbox) for mailbox in mailboxes]
        for rank, mailbox in enumerate(mailboxes):
            assert list(mailbox.ranks) == [other for other in range(4) if other != rank]
            mailbox.post_all("note", rank)
        for mailbox, notes in zip(mailboxes, heard, strict=True):
            pump_until(mailbox, lambda notes=notes: len(notes) == 3)
            assert all(rank == said for rank, said in notes)
        assert all(
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for sockets in ranks.found.values()
            for connection in sockets.values()
        )

    @pytest.mark.parametrize(
        "hello",
        [
            pack("hello", "wrong token", 1),
            pack("hello", "", 1),
            pack("hello", TOKEN.encode(), 1),
            pack("hello", TOKEN, "1"),
            pack("hello", TOKEN),
            pack("goodbye"),
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0\0\0\0",
            b"\xff\xff\xff\xff",
            (LARGEST_HELLO + 1).to_bytes(4, "big") + b"x",
            b"\0\0\0\4\x91\x81\x90\x01",
        ],
        ids=range(11),
    )
    def test_strangers_are_dropped_with_a_line(self, hello, caplog):
        ranks = Handshakes(2)
        with caplog.at_level(logging.WARNING):
            ranks.start(0)
            with ranks.call(0, hello) as stranger:
                assert dropped(stranger)
                caller = stranger.getsockname()
            ranks.start(1)
            ranks.join()
        assert [r.getMessage() for r in caplog.records] == [
            f"dropped a connection from {caller} that is not of this run"
        ]
        assert ranks.found.keys() == {0, 1}

    @pytest.mark.parametrize("rank", [-1, 0, 1, 3, 99])
    def test_ranks_that_are_not_awaited_are_dropped(self, rank):
        """Rank 1 of 3 awaits rank 2, and only once."""
        ranks = Handshakes(3)
        ranks.start(0, 1)
        with ranks.call(1, pack("hello", TOKEN, rank)) as odd:
            assert dropped(odd)
        ranks.start(2)
        ranks.join()
        assert not ranks.errors and ranks.found[1].keys() == {0, 2}

    def test_silent_strangers_hold_nobody_up(self):
        ranks = Handshakes(2)
        began = time.monotonic()
        ranks.start(0)
        with ExitStack() as strangers:
            silent = [
                strangers.enter_context(ranks.call(0, hello)) for hello in (b"", b"\0", b"\0\0\0\x20\x93")
            ]
            reset_connection(ranks.call(0))
            ranks.start(1)
            ranks.join()
            assert time.monotonic() - began < 2.0 and ranks.found.keys() == {0, 1}
            assert all(map(dropped, silent))

    def test_a_hello_may_come_in_pieces(self):
        ranks = Handshakes(2)
        ranks.start(0)
        with ranks.call(0) as caller:
            for byte in pack("hello", TOKEN, 1):
                caller.sendall(bytes([byte]))
                time.sleep(1e-3)
            ranks.join()
            assert ranks.found[0].keys() == {1}

    def test_what_follows_the_hello_belongs_to_the_mailbox(self):
        ranks = Handshakes(2)
        ranks.start(0)
        with ranks.call(0, pack("hello", TOKEN, 1) + pack("note", "at once") + pack("note", "twice")):
            ranks.join()
            mailbox = opened(0, ranks.found[0])
            heard = listening(mailbox)
            mailbox.pump()
            assert heard == [(1, "at once"), (1, "twice")]

    def test_a_missing_rank_is_named(self):
        ranks = Handshakes(4, seconds=1.0)
        ranks.start(0, 2)
        ranks.join(0)
        assert isinstance(ranks.errors[0], TrainingError)
        assert str(ranks.errors[0]) == "rank 0: no connection from rank 1, 3 in time"
        with pytest.raises(ConnectionRefusedError):  # it listens no longer
            ranks.call(0)

    def test_a_rank_that_cannot_be_reached_is_named(self):
        ranks = Handshakes(2, seconds=0.5)
        ranks.listeners[0].close()
        ranks.start(1)
        ranks.join()
        assert isinstance(ranks.errors[1], TrainingError)
        host, port = ranks.addresses[0]
        assert f"rank 1 cannot reach rank 0 at {host}:{port}: " in str(ranks.errors[1])
        assert "RRFP_BIND" in str(ranks.errors[1])
        with pytest.raises(ConnectionRefusedError):
            ranks.call(1)

    @given(st.binary(max_size=80))
    @settings(max_examples=60, deadline=None)
    def test_no_stranger_ends_the_run(self, body):
        ranks = Handshakes(2)
        ranks.start(0)
        with ranks.call(0, len(body).to_bytes(4, "big") + body):
            ranks.start(1)
            ranks.join()
        assert ranks.found.keys() == {0, 1}
        for sockets in ranks.found.values():
            for connection in sockets.values():
                connection.close()


def test_msgpack_knows_plain_data_only():
    with pytest.raises(TypeError):
        pack("note", object())
    assert msgpack.unpackb(pack("note", (1, 2))[4:]) == ["note", [1, 2]]
