"""What a link between machines needs that may be dead for a while: life is told apart from data.

TCP doubles the pause between its tries, so after an outage of 14 s its next one may come 11 s later. Signs of
life must not wait for that: they go by datagrams, too, which come as soon as the link is back. And where the
kernel knows how (Linux 6.15), all connections to the machines of the run try again every second.

A datagram has a fixed length: both ranks, a number that only grows, a proof by a key of this run and pair.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from struct import Struct
from typing import NamedTuple

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.run.coordinator import retry_often, tcp_connections
from rrfp_jax.runtime.run.handshake import PROOF

BODY = Struct("!IIQ")

MOST_A_PEER = 8
"""Datagrams that are read of each peer at once, strangers' among them; more are left for later."""

BYTES_A_PEER = 2**14
"""For datagrams that wait to be read, as the kernel counts them."""


def retry_often_to(hosts: Collection[str]) -> None:
    """Have all TCP connections of this process to these IP addresses try again often, JAX's and UCX's too."""
    for connection, host in tcp_connections():
        if host in hosts:
            retry_often(connection)


class Card(NamedTuple):
    """What a rank tells the others of itself before they meet."""

    host: str  # an IP address
    port: int  # where it takes calls
    datagrams: int  # the port where it takes those
    number: str  # hexadecimal digits that were never used before
    node: str  # its machine's name


class Signs:
    """Signs of life by datagrams between ranks that have told these of themselves. One thread at a time."""

    def __init__(self, rank: int, own: socket.socket, cards: Mapping[int, Card], token: bytes) -> None:
        self._rank, self._socket, self._count = rank, own, 0
        self._peers = {other: card for other, card in cards.items() if other != rank}
        # Shared by two ranks in this run alone, by the numbers of their cards.
        numbers = {r: " ".join(sorted([cards[rank].number, card.number])) for r, card in self._peers.items()}
        self._keys = {r: hmac.digest(token, f"signs of life{n}".encode(), sha256) for r, n in numbers.items()}
        self._latest = dict.fromkeys(self._peers, 0)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BYTES_A_PEER * len(self._peers))  # if allowed
        own.setblocking(False)

    def show(self) -> None:
        """Send one to everybody; returns at once."""
        self._count += 1
        for rank, peer in self._peers.items():
            body = BODY.pack(self._rank, rank, self._count)
            with suppress(OSError):  # no way there just now
                proof = hmac.digest(self._keys[rank], body, sha256)
                self._socket.sendto(body + proof, (peer.host, peer.datagrams))

    def heard(self) -> Collection[int]:
        """The ranks from which new ones have come; returns at once."""
        found = set()
        for _ in range(MOST_A_PEER * len(self._peers)):
            try:
                said = self._socket.recv(BODY.size + PROOF + 1)
            except OSError:  # there are no more
                break
            if (rank := self._sender(said)) is not None:
                found.add(rank)
        return found

    def retry_often(self) -> None:
        """Have all TCP connections of this process to the others' machines try again often."""
        retry_often_to({peer.host for peer in self._peers.values()})

    def close(self) -> None:
        self._socket.close()

    def _sender(self, said: bytes) -> int | None:
        """Who sent it; None for a stranger's, one that has been heard before, or one for another rank."""
        if len(said) != BODY.size + PROOF:
            return None
        body, proof = said[: BODY.size], said[BODY.size :]
        rank, to, count = BODY.unpack(body)
        is_new = rank in self._peers and to == self._rank and count > self._latest[rank]
        if not is_new or not hmac.compare_digest(proof, hmac.digest(self._keys[rank], body, sha256)):
            return None
        self._latest[rank] = count
        return int(rank)


def require_reachable(nodes: Sequence[str], hosts: Sequence[str]) -> None:
    """UsageError for a rank that other machines cannot reach, given every rank's machine and IP address."""
    for rank, (node, host) in enumerate(zip(nodes, hosts, strict=True)):
        if ip_address(host.partition("%")[0]).is_loopback and len({*nodes}) > 1:
            raise UsageError(
                f"rank {rank} on {node} listens on {host}, where other machines cannot reach it: there the "
                f"coordinator's name means loopback (/etc/hosts); set RRFP_BIND on {node} to an address that "
                f"the others reach, or give the coordinator as an IP address"
            )


def nodes_of(cards: Sequence[Card]) -> Sequence[str]:
    """What to call each rank's machine: by its name, or by its address where several have one name."""
    names, hosts = [card.node for card in cards], [card.host for card in cards]
    return hosts if len(set(names)) < len(set(hosts)) else names
