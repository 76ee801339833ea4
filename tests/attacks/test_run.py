"""A run of two processes while strangers do what they can at every port of ours that it opens to join."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from rrfp_jax.runtime.run.coordinator import reserved_port
from rrfp_jax.runtime.run.handshake import GREETING, MAGIC, NUMBER, PROOF, proof

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240.0
TOKEN = "0123456789abcdef" * 4

HALF_OPEN = 300
"""Connections that say nothing: more than a rank hears at a time."""


def started(port, rank, folder):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "RRFP_COORDINATOR": f"127.0.0.1:{port}",
        "RRFP_PROCESSES": "2",
        "RRFP_RANK": str(rank),
        "RRFP_TOKEN": TOKEN,
    }
    command = [sys.executable, "-m", "tests.attacks.victim", folder / "go"]
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=log, start_new_session=True
        )


def listening(process):
    """Where a process listens."""
    with suppress(psutil.Error):
        found = psutil.Process(process.pid).net_connections("tcp")
        return [tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN]
    return []


def until(condition, process):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return found


def attack(address, stack):
    """Whatever strangers can do without the token; their connections stay open."""

    def call(said=b""):
        connection = stack.enter_context(socket.create_connection(address, timeout=10.0))
        with suppress(OSError):  # it may have been dropped meanwhile
            connection.sendall(said)
        return connection

    call(os.urandom(100_000))  # garbage
    call(b"\xff\xff\xff\xff" + b"x" * 100_000)  # a frame without an end
    call(b"GET / HTTP/1.1\r\nHost: rank-0\r\n\r\n")
    for _ in range(HALF_OPEN):
        call()
    # A second rank 1, which has no token: it guesses, and it sends back what it was told.
    greeting = GREETING.pack(MAGIC, 1, b"n" * NUMBER)
    guessing, reflecting = call(greeting), call(greeting)
    answer = guessing.recv(NUMBER + PROOF, socket.MSG_WAITALL)
    guessing.sendall(proof(b"guessed", b"caller", 1, 0, b"n" * NUMBER + answer[:NUMBER]))
    reflecting.sendall(reflecting.recv(NUMBER + PROOF, socket.MSG_WAITALL)[NUMBER:])
    for connection in (guessing, reflecting):
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b"", "a stranger was let in"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel who listens where")
def test_a_run_goes_on_whatever_strangers_do_and_tells_them_nothing(tmp_path):
    with reserved_port() as port, ExitStack() as stack:
        ranks = [started(port, rank, tmp_path) for rank in range(2)]
        for rank in ranks:
            stack.callback(rank.wait)
            stack.callback(rank.kill)
        ours = until(lambda: listening(ranks[0]), ranks[0])
        assert {host for host, _ in ours} == {"127.0.0.1"}, "more of the network than need be"
        attack(ours[0], stack)
        (tmp_path / "go").touch()  # now rank 1 calls rank 0, which has listened to strangers only
        statuses = [rank.wait(LIMIT_SECONDS) for rank in ranks]
        logs = [(tmp_path / f"{rank}.log").read_text()[-3000:] for rank in range(2)]
        assert statuses == [0, 0], logs
    said = [json.loads((tmp_path / f"{rank}.out").read_text()) for rank in range(2)]
    assert [one["ranks"] for one in said] == [[0, 1]] * 2
    for one in said:
        assert one["stored"] and TOKEN.encode().hex() not in json.dumps(one["stored"])
        assert one["named"] == [], "what the ranks start would have the token"
