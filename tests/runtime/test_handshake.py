"""The handshake that makes connections of control messages, and whom it turns away."""

import errno
import logging
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run import coordinator
from rrfp_jax.runtime.run.handshake import GREETING, HEARD, NUMBER, PROOF, _call, listen, proof
from tests.support.mailboxes import (
    TOKEN,
    Handshakes,
    answered,
    dropped,
    greeting,
    introduced,
    listening,
    note,
    noted,
    opened,
    pump_until,
    reset_connection,
)

pytestmark = pytest.mark.usefixtures("all_closed")


class TestHandshake:
    def test_every_pair_is_connected(self):
        ranks = Handshakes(4)
        ranks.start(0, 1, 2, 3)
        ranks.join()
        mailboxes = [opened(rank, ranks.found[rank]) for rank in range(4)]
        heard = [listening(mailbox) for mailbox in mailboxes]
        for rank, mailbox in enumerate(mailboxes):
            assert list(mailbox.ranks) == [other for other in range(4) if other != rank]
            mailbox.post_all(note(rank))
        for mailbox, notes in zip(mailboxes, heard, strict=True):
            pump_until(mailbox, lambda notes=notes: len(notes) == 3)
            assert all(rank == said for rank, said in notes)
        assert all(
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for sockets in ranks.found.values()
            for connection in sockets.values()
        )

    @pytest.mark.parametrize(
        "said",
        [
            greeting(magic=b"RRFP1"),
            b"GET / HTTP/1.1\r\nHost: somewhere.example.org\r\n\r\n",
            b"\0" * GREETING.size,
            b"\xff" * 10_000,
            greeting() + b"\0" * PROOF,
            greeting() + b"x" * 10_000,
        ],
        ids=range(6),
    )
    def test_strangers_are_dropped_with_a_line(self, said, caplog):
        ranks = Handshakes(2)
        with caplog.at_level(logging.WARNING):
            ranks.start(0)
            with ranks.call(0, said) as stranger:
                caller = stranger.getsockname()
                with suppress(ConnectionResetError):
                    answered(stranger)
                assert dropped(stranger)
            ranks.start(1)
            ranks.join()
        assert [r.getMessage() for r in caplog.records] == [
            f"dropped a connection from {caller} that is not of this run"
        ]
        assert ranks.found.keys() == {0, 1}

    @pytest.mark.parametrize("rank", [2**32 - 1, 0, 1, 3, 99])
    def test_ranks_that_are_not_awaited_are_dropped(self, rank):
        """Rank 1 of 3 awaits rank 2, and only once."""
        ranks = Handshakes(3)
        ranks.start(0, 1)
        with ranks.call(1, greeting(rank)) as odd:
            assert dropped(odd)
        ranks.start(2)
        ranks.join()
        assert not ranks.errors and ranks.found[1].keys() == {0, 2}

    def test_a_second_one_of_a_rank_is_dropped(self):
        """Even one that has the token: rank 1 is there already, rank 2 not yet."""
        ranks = Handshakes(3)
        ranks.start(0)
        with ranks.call(0) as first:
            first.sendall(introduced(first))
            with ranks.call(0) as second:
                second.sendall(greeting())
                assert dropped(second)
            with ranks.call(0) as other:
                other.sendall(introduced(other, rank=2))
                ranks.join()
        assert ranks.found[0].keys() == {1, 2}

    def test_silent_strangers_hold_nobody_up(self):
        ranks = Handshakes(2)
        began = time.monotonic()
        ranks.start(0)
        with ExitStack() as strangers:
            silent = [strangers.enter_context(ranks.call(0, said)) for said in (b"", b"\0", greeting()[:-1])]
            reset_connection(ranks.call(0))
            ranks.start(1)
            ranks.join()
            assert time.monotonic() - began < 2.0 and ranks.found.keys() == {0, 1}
            assert all(map(dropped, silent))

    def test_a_proof_may_come_in_pieces(self):
        ranks = Handshakes(2)
        ranks.start(0)
        with ranks.call(0) as caller:
            for byte in introduced(caller):
                caller.sendall(bytes([byte]))
                time.sleep(1e-3)
            ranks.join()
            assert ranks.found[0].keys() == {1}

    def test_what_follows_the_proof_belongs_to_the_mailbox(self):
        ranks = Handshakes(2)
        ranks.start(0)
        with ranks.call(0) as caller:
            caller.sendall(introduced(caller) + noted("at once") + noted("twice"))
            ranks.join()
            mailbox = opened(0, ranks.found[0])
            heard = listening(mailbox)
            mailbox.pump()
            assert heard == [(1, "at once"), (1, "twice")]

    def test_a_proof_of_another_call_proves_nothing(self):
        """What one has overheard, greeting and proof, is worth nothing the next time."""
        first, second = Handshakes(2), Handshakes(2)
        first.start(0)
        second.start(0)
        with first.call(0) as caller, second.call(0, greeting()) as replayed:
            overheard = introduced(caller)
            answered(replayed)
            replayed.sendall(overheard)
            assert dropped(replayed)
            caller.sendall(overheard)
            first.join()
        second.start(1)
        second.join()
        assert second.found.keys() == {0, 1}

    def test_the_answer_of_a_rank_is_no_proof_of_a_caller(self):
        """A stranger gets a proof for its greeting: sent back, it opens nothing."""
        ranks = Handshakes(2)
        ranks.start(0)
        with ranks.call(0, greeting()) as stranger:
            stranger.sendall(answered(stranger)[NUMBER:])
            assert dropped(stranger)
        ranks.start(1)
        ranks.join()
        assert ranks.found.keys() == {0, 1}

    def test_a_caller_says_nothing_to_who_cannot_prove_to_be_the_rank(self):
        """A stranger at the address of rank 0 sees a greeting, which is no secret, and nothing else."""
        ranks = Handshakes(2)
        heard = bytearray()

        def pretend():
            caller, _ = ranks.listeners[0].accept()
            with caller:
                heard.extend(caller.recv(GREETING.size, socket.MSG_WAITALL))
                caller.sendall(b"\0" * (NUMBER + PROOF))
                while data := caller.recv(100):
                    heard.extend(data)

        stranger = threading.Thread(target=pretend, daemon=True)
        stranger.start()
        ranks.start(1)
        ranks.join(1)
        stranger.join(5.0)
        host, port = ranks.addresses[0]
        said = str(ranks.errors[1])
        assert said.startswith(f"rank 1: who answers as rank 0 at {host}:{port} has another token")
        assert len(heard) == GREETING.size and TOKEN not in heard

    def test_who_has_another_token_is_told_so(self):
        ranks = Handshakes(2, seconds=1.0)
        ranks.start(0)
        ranks.start(1, token=b"another")
        ranks.join()
        assert "has another token than this rank: give all ranks the same" in str(ranks.errors[1])
        assert str(ranks.errors[0]) == "rank 0: no connection from rank 1 in time"

    def test_strangers_are_few_at_a_time(self, monkeypatch):
        monkeypatch.setattr(coordinator, "MOST_STRANGERS", 4)
        ranks = Handshakes(2, seconds=10.0)
        ranks.start(0)
        with ExitStack() as strangers:
            silent = [strangers.enter_context(ranks.call(0, b"R")) for _ in range(100)]
            assert all(map(dropped, silent[:96]))
            ranks.start(1)
            ranks.join()
            assert ranks.found.keys() == {0, 1}

    def test_a_stranger_has_little_time(self, monkeypatch):
        monkeypatch.setattr(coordinator, "STRANGER_SECONDS", 0.2)
        ranks = Handshakes(2)
        ranks.start(0)
        with ranks.call(0, greeting()) as stranger:
            answered(stranger)
            assert dropped(stranger)
        ranks.start(1)
        ranks.join()
        assert ranks.found.keys() == {0, 1}

    def test_a_call_that_was_dropped_among_strangers_is_made_again(self):
        ranks = Handshakes(2)

        def drop_once():
            caller, _ = ranks.listeners[0].accept()
            caller.close()
            ranks.start(0)

        once = threading.Thread(target=drop_once, daemon=True)
        once.start()
        ranks.start(1)
        once.join(5.0)
        ranks.join()
        assert not ranks.errors and ranks.found.keys() == {0, 1}

    def test_no_more_descriptors_end_nothing(self, monkeypatch):
        ranks, accept, refused = Handshakes(2), socket.socket.accept, []

        def sparse(self):
            if len(refused) < 3:
                refused.append(self)
                raise OSError(errno.EMFILE, "Too many open files")
            return accept(self)

        monkeypatch.setattr(socket.socket, "accept", sparse)
        ranks.start(0, 1)
        ranks.join()
        assert len(refused) == 3 and ranks.found.keys() == {0, 1}

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

    @given(st.binary(max_size=80), st.booleans())
    @settings(max_examples=60, deadline=None)
    def test_no_stranger_ends_the_run(self, body, greeted):
        ranks = Handshakes(2)
        ranks.start(0)
        with ranks.call(0, greeting() + body if greeted else body):
            ranks.start(1)
            ranks.join()
        assert ranks.found.keys() == {0, 1}
        for sockets in ranks.found.values():
            for connection in sockets.values():
                connection.close()


def test_a_call_that_is_dropped_after_its_proof_is_made_again():
    with listen("127.0.0.1") as listener:

        def called():
            for said in (b"", HEARD):
                caller, _ = listener.accept()
                *_, own = GREETING.unpack(caller.recv(GREETING.size, socket.MSG_WAITALL))
                mine = b"m" * NUMBER
                caller.sendall(mine + proof(TOKEN, b"called", 1, 0, own + mine))
                caller.recv(PROOF, socket.MSG_WAITALL)
                caller.sendall(said)
                caller.close()
                heard.append(said)

        heard = []
        thread = threading.Thread(target=called)
        thread.start()
        _call(0, listener.getsockname(), 1, TOKEN, time.monotonic() + 10).close()
        thread.join()
    assert heard == [b"", HEARD]
