"""Signs of life by datagrams: who is believed; and TCP's pauses, where the kernel can bound them."""

import secrets
import socket
from contextlib import ExitStack

import pytest
from msgspec import msgpack

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.run import coordinator
from rrfp_jax.runtime.run.coordinator import NEVER_MILLISECONDS, RETRY_MILLISECONDS, TCP_RTO_MAX_MS
from rrfp_jax.runtime.run.links import (
    BODY,
    PROOF,
    Card,
    Signs,
    nodes_of,
    require_reachable,
    retry_often_to,
)
from tests.support.mailboxes import TOKEN, opened, tcp_pair

pytestmark = pytest.mark.usefixtures("all_closed")


class Crowd:
    """Ranks with datagrams in this process."""

    def __init__(self, stack, count=3, tokens=None):
        self.sockets = [stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for _ in range(count)]
        for own in self.sockets:
            own.bind(("127.0.0.1", 0))
        ports = [own.getsockname()[1] for own in self.sockets]
        self.cards = {r: Card("127.0.0.1", 1, ports[r], secrets.token_hex(32), "n0") for r in range(count)}
        tokens = tokens or [TOKEN] * count
        self.signs = [Signs(r, self.sockets[r], self.cards, tokens[r]) for r in range(count)]


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def test_all_hear_all_and_each_sign_once(stack):
    crowd = Crowd(stack)
    for own in crowd.signs:
        own.show()
    assert [own.heard() for own in crowd.signs] == [{1, 2}, {0, 2}, {0, 1}]
    assert [own.heard() for own in crowd.signs] == [set()] * 3


def overheard(stack):
    """What rank 1 said to rank 0, and the ranks."""
    crowd = Crowd(stack)
    crowd.signs[1].show()
    assert crowd.signs[2].heard() == {1}
    said, _ = crowd.sockets[0].recvfrom(100)
    return crowd, said


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said[:-1],
        lambda said: said + b"\0",
        lambda said: b"",
        lambda said: said[:-1] + bytes([said[-1] ^ 1]),
        lambda said: BODY.pack(1, 0, 99) + said[BODY.size :],  # a later number
        lambda said: BODY.pack(2, 0, 1) + said[BODY.size :],  # another rank's
        lambda said: BODY.pack(0, 0, 1) + said[BODY.size :],  # its own
        lambda said: BODY.pack(7, 0, 1) + said[BODY.size :],  # nobody's
        lambda said: secrets.token_bytes(BODY.size + PROOF),
    ],
    ids=range(9),
)
def test_what_a_stranger_makes_of_it_is_no_sign_of_life(stack, change):
    crowd, said = overheard(stack)
    crowd.sockets[2].sendto(change(said), crowd.sockets[0].getsockname())
    assert crowd.signs[0].heard() == set()
    crowd.sockets[2].sendto(said, crowd.sockets[0].getsockname())
    assert crowd.signs[0].heard() == {1}


def test_what_was_overheard_counts_once_for_whom_it_was_meant(stack):
    crowd, said = overheard(stack)
    for rank in (0, 0, 2):
        crowd.sockets[1].sendto(said, crowd.sockets[rank].getsockname())
    assert crowd.signs[0].heard() == {1} and crowd.signs[2].heard() == set()
    crowd.sockets[1].sendto(said, crowd.sockets[0].getsockname())
    assert crowd.signs[0].heard() == set()


def test_signs_of_an_earlier_run_with_the_same_token_are_none(stack):
    _, said = overheard(stack)
    later = Crowd(stack)
    later.sockets[1].sendto(said, later.sockets[0].getsockname())
    assert later.signs[0].heard() == set()


def test_another_token_is_another_run(stack):
    crowd = Crowd(stack, tokens=[TOKEN, TOKEN, b"another"])
    for own in crowd.signs:
        own.show()
    assert [own.heard() for own in crowd.signs] == [{1}, {0}, set()]


def test_a_flood_is_read_in_parts_and_nothing_blocks(stack):
    crowd = Crowd(stack)
    for _ in range(100):
        crowd.sockets[2].sendto(b"x" * 60_000, crowd.sockets[0].getsockname())
    crowd.signs[1].show()
    heard = [crowd.signs[0].heard() for _ in range(20)]
    assert set().union(*heard) <= {1}  # the kernel may have dropped it
    crowd.signs[1].show()
    assert crowd.signs[0].heard() == {1}


def test_no_way_there_is_no_error(stack):
    own = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
    own.bind(("127.0.0.1", 0))
    hosts = ("127.0.0.1", "203.0.113.1", "::1")
    shown = Signs(0, own, {rank: Card(host, 1, 9, "", "n") for rank, host in enumerate(hosts)}, TOKEN)
    shown.show()
    assert shown.heard() == set()


def test_silence_is_judged_by_what_came_either_way(stack):
    crowd = Crowd(stack, 2)
    mine, _theirs = tcp_pair()
    mailbox = opened(0, {1: mine}, 0.2, crowd.signs[0])
    heard = mailbox.membership._heard[1]
    mailbox.tick()
    assert mailbox.membership._heard[1] == heard
    crowd.signs[1].show()
    mailbox.tick()
    assert mailbox.membership._heard[1] > heard
    assert crowd.signs[1].heard() == {0}


def test_all_connections_to_the_machines_of_a_run_try_again_often(stack):
    mine, theirs = (stack.enter_context(end) for end in tcp_pair())
    try:
        mine.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
    except OSError:
        pytest.skip("this kernel has no TCP_RTO_MAX_MS")
    before = mine.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
    retry_often_to({"10.0.0.1"})
    assert mine.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS) == before
    retry_often_to({"127.0.0.1"})
    for end in (mine, theirs):
        assert end.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS) == RETRY_MILLISECONDS
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == NEVER_MILLISECONDS


def test_an_older_kernel_does_not_give_up_either(stack, monkeypatch):
    mine, _theirs = (stack.enter_context(end) for end in tcp_pair())
    monkeypatch.setattr(coordinator, "TCP_RTO_MAX_MS", 9999)
    coordinator.retry_often(mine)
    assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == NEVER_MILLISECONDS


def test_what_ranks_say_of_themselves_is_read_as_it_was_said():
    card = Card("fd00::7", 4000, 4001, "ab" * 32, "n0")
    assert msgpack.decode(msgpack.encode(card), type=Card) == card


@pytest.mark.parametrize(
    ("cards", "names"),
    [
        ([("10.0.0.1", "a"), ("10.0.0.2", "b"), ("10.0.0.2", "b")], ["a", "b", "b"]),
        ([("10.0.0.1", "box"), ("10.0.0.2", "box")], ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_machines_are_called_by_name_where_names_tell_them_apart(cards, names):
    assert nodes_of([Card(host, 1, 2, "", name) for host, name in cards]) == names


def test_a_rank_on_loopback_is_refused_where_others_are_on_other_machines():
    require_reachable(["n0", "n0"], ["127.0.0.1", "10.0.0.1"])
    require_reachable(["n0", "n1"], ["10.0.0.1", "fe80::1%eth0"])
    for host in ("127.0.0.1", "::1", "127.0.1.1"):
        with pytest.raises(UsageError, match=f"^rank 1 on n1 listens on {host}, where other .* RRFP_BIND"):
            require_reachable(["n0", "n1"], ["10.0.0.1", host])
