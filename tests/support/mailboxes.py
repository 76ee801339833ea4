"""Mailboxes and handshakes in one process, for tests: made, connected, listened to, closed at the end."""

import itertools
import socket
import struct
import threading
import time
from contextlib import contextmanager
from math import inf
from typing import Any

import msgspec

from rrfp_jax.runtime.run.handshake import GREETING, MAGIC, NUMBER, PROOF, connect, listen, proof
from rrfp_jax.runtime.run.mailbox import Mailbox, Message, pack, unpack

PROMPT_SECONDS = 0.3
"""Less than any pause of the code, more than a loaded machine takes to wake a thread."""


class Note(Message, frozen=True):
    content: list[Any]


def note(*content):
    return Note(list(content))


def noted(*content):
    """The same as a frame."""
    return pack(note(*content))


made: list[Mailbox] = []


def opened(rank, sockets, silence=inf, signs=None):
    """A mailbox that is closed at the end of the test."""
    mailbox = Mailbox(rank, sockets, silence, signs)
    made.append(mailbox)
    return mailbox


def joined(rank=0, others=(1,), silence=inf):
    """A mailbox, and the raw other ends of its connections by rank."""
    pairs = {other: socket.socketpair() for other in others}
    for _, theirs in pairs.values():
        theirs.settimeout(5.0)
    mailbox = opened(rank, {other: mine for other, (mine, _) in pairs.items()}, silence)
    return mailbox, {other: theirs for other, (_, theirs) in pairs.items()}


def all_joined(count):
    """Mailboxes of so many ranks."""
    sockets = [{} for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        sockets[a][b], sockets[b][a] = socket.socketpair()
    return [opened(rank, own) for rank, own in enumerate(sockets)]


def listening(mailbox):
    """The list in which notes appear as (rank, *content)."""
    heard = []
    mailbox.on(Note, lambda rank, message: heard.append((rank, *message.content)))
    return heard


def pump_until(mailbox, condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    mailbox.pump()
    while not condition():
        assert time.monotonic() < deadline
        mailbox.sleep(0.05)
        mailbox.pump()


def received(connection, kind):
    """The next message at a raw end, of this kind."""
    buffer = bytearray()
    while (frame := unpack(buffer)) is None:
        buffer += connection.recv(1)
    assert frame.kind == kind.__name__
    return msgspec.msgpack.decode(frame.body, type=kind)


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


TOKEN = b"0123abcd"


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


def greeting(rank=1, magic=MAGIC, number=b"n" * NUMBER):
    return GREETING.pack(magic, rank, number)


def answered(caller):
    """What a rank says to a greeting."""
    return caller.recv(NUMBER + PROOF, socket.MSG_WAITALL)


def introduced(caller, rank=1, to=0):
    """Begin a handshake by hand; the proof that would end it."""
    caller.sendall(greeting(rank))
    answer = answered(caller)
    numbers = b"n" * NUMBER + answer[:NUMBER]
    assert answer[NUMBER:] == proof(TOKEN, b"called", rank, to, numbers)
    return proof(TOKEN, b"caller", rank, to, numbers)


def dropped(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
