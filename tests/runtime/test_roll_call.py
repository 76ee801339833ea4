"""Ranks say that they are there, and hear who is missing, before JAX's service takes over the port."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from rrfp_jax.runtime.run.coordinator import MOST_STRANGERS, Coordinator, reserved_port
from rrfp_jax.runtime.run.place import Address, Place
from rrfp_jax.runtime.run.roll_call import RollCall

LIMIT_SECONDS = 30.0


@contextmanager
def served(count):
    with reserved_port() as port:
        coordinator = Coordinator(f"127.0.0.1:{port}", count, linger_seconds=0.0)
        try:
            yield Address("127.0.0.1", port)
        finally:
            coordinator.close()


def call_of(where, rank, count=2):
    return RollCall(Place(where, count, rank, folder=None))


def answers(calls, seconds):
    """What comes of several ranks' waiting at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [*pool.map(lambda call: call.answer(seconds), calls)]


def test_ranks_wait_until_all_have_come_and_hear_who_is_missing():
    with served(4) as where:
        first = [call_of(where, rank, 4) for rank in (0, 2)]
        assert answers(first, 2.5) == [False, False]
        assert [call.said().partition(":")[0] for call in first] == ["ranks 1, 3 are missing"] * 2
        assert answers([call_of(where, rank, 4) for rank in range(4)], LIMIT_SECONDS) == [True] * 4
        assert where.tried(5.0).startswith("somebody answers there")  # JAX's service


def test_one_that_went_away_is_missing_once_all_others_are_there():
    with served(2) as where:
        assert answers([call_of(where, 0)], 0.5) == [False]
        other = call_of(where, 1)
        assert answers([other], 2.5) == [False]
        assert other.said().startswith("rank 0 is missing")


def test_two_that_are_started_as_one_rank_hear_of_it():
    with served(3) as where:
        calls = [call_of(where, rank, 3) for rank in (0, 1, 1)]
        assert answers(calls, 4.0) == [False] * 3
        assert {call.said() for call in calls} == {
            "several processes are started as rank 1: give each its own RRFP_RANK"
        }


@pytest.mark.parametrize("rank", [1, 2])
def test_one_that_counts_other_processes_is_told_until_it_counts_the_same(rank):
    with served(2) as where:
        calls = [call_of(where, 0), call_of(where, rank, 3)]
        assert answers(calls, 2.5) == [False, False]
        assert {call.said() for call in calls} == {
            f"rank {rank} is started with RRFP_PROCESSES=3, rank 0 with 2: give all the same"
        }
        calls = [call_of(where, 0), call_of(where, 1), calls[1]]
        assert answers(calls, 4.0) == [True, True, False]  # the others meet without it
        assert f"rank {rank} is started" in calls[2].said()


def test_one_that_is_started_anew_with_the_right_count_is_as_any_other():
    with served(3) as where:
        assert answers([call_of(where, 1, 2)], 0.5) == [False]
        calls = [call_of(where, rank, 3) for rank in (0, 1)]
        assert answers(calls, 2.5) == [False, False]
        assert calls[0].said().startswith("rank 2 is missing")


def test_one_that_calls_again_while_all_come_learns_it_from_jax_s_service():
    with served(2) as where:
        lost, stranger = call_of(where, 0), call_of(where, 0)
        assert answers([lost], 4.0) == [False]
        assert answers([call_of(where, rank) for rank in range(2)], LIMIT_SECONDS) == [True, True]
        assert answers([lost, stranger], 5.0) == [True, False]  # it may be another run's


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\n",
        b"9 2 \n",
        b"-1 2 \n",
        b"1\n",
        b"1 " + b"9" * 400 + b" \n",
        b"x" * 1000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "²\n".encode(),
    ],
    ids=repr,
)
def test_strangers_change_nothing(said):
    with served(2) as where, ExitStack() as stack:
        for _ in range(MOST_STRANGERS + 3):
            stranger = stack.enter_context(socket.create_connection((where.host, where.port), 10.0))
            stranger.sendall(said)
        assert answers([call_of(where, rank) for rank in range(2)], LIMIT_SECONDS) == [True, True]


def test_what_is_no_coordinator_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        call = call_of(Address(*server.getsockname()), 1)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(call.answer, 1.0)
            for said in (b"\x00\x00\x06\x04\n\n", b"missing x\n", b"x" * 100):
                connection, _ = server.accept()
                connection.sendall(said)
                connection.close()
            assert waiting.result() is False
        assert not call.news.missing


def test_a_rank_0_that_fails_serves_on_for_those_that_have_not_heard_yet():
    with reserved_port() as port:
        coordinator = Coordinator(f"127.0.0.1:{port}", 2, linger_seconds=4.0)
        coordinator.leave()
        call = call_of(Address("127.0.0.1", port), 1)
        assert answers([call], 2.5) == [False]
        assert call.said().startswith("rank 0 is missing")
        coordinator._process.wait(LIMIT_SECONDS)
        assert answers([call], 0.5) == [False]
        assert re.match(r"nobody answers there \(.*\); is rank 0, which serves there, started", call.said())
