"""The handshake that makes connections of control messages, and whom it turns away."""

import logging
import socket
import threading
import time
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.processes.frames import pack
from rrfp_jax.runtime.processes.handshake import LARGEST_HELLO, connect, listen
from tests.support.mailboxes import listening, opened, pump_until, reset_connection

pytestmark = pytest.mark.usefixtures("all_closed")

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
