"""Handshakes between threads of this process, and by hand, as a stranger would try."""

import socket
import threading

from rrfp_jax.runtime.run.handshake import GREETING, MAGIC, NUMBER, PROOF, connect, listen, proof

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
