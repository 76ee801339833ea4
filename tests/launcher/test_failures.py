"""Cells of the table of failures (`python -m tests.verification.failures`), and what they rest on."""

import socket
import threading
import time

import pytest

from rrfp_jax.errors import PeerLost, UsageError
from rrfp_jax.runtime.run.exits import Watchdog, exit_report
from rrfp_jax.runtime.run.mailbox import Mailbox, pack
from rrfp_jax.runtime.run.membership import Failed, Goodbye
from rrfp_jax.runtime.run.place import SILENCE_SECONDS, silence_seconds
from rrfp_jax.runtime.run.world import World
from tests.support.commands import launch as main
from tests.verification.failures import (
    BRISK_SILENCE,
    END_SECONDS,
    FREEZE_SECONDS,
    Cell,
    faults_of,
    run_by_hand,
    run_launched,
)


def check(cell, outcome):
    assert faults_of(cell, outcome) == [], outcome.text
    limit = outcome.silence + FREEZE_SECONDS if cell.way == "freeze" else END_SECONDS
    assert outcome.seconds < limit, outcome.text


@pytest.mark.slow(reason="10 s: four processes; train/test_processes.py and test_spawn.py have such ends")
@pytest.mark.parametrize(
    ("cell", "how"),
    [
        (Cell(2, "kill", "step"), "was killed by SIGKILL"),
        (Cell(1, "raise", "step"), "raised ValueError: failing in step"),
        (Cell(3, "freeze", "step"), "was frozen (stopped)"),
        # Its watchdog and a thread of JAX hear of it at the same moment; mostly, not always, ours is first.
        # JAX's aborts, and has crashed in doing so, once in a hundred.
        (Cell(1, "cut", "compile"), ("was cut off", "aborted (SIGABRT)", "was killed by SIGSEGV")),
        (Cell(0, "kill", "validation"), "was killed by SIGKILL"),
    ],
    ids=str,
)
def test_with_the_launcher(cell, how, tmp_path):
    outcome = run_launched(cell, BRISK_SILENCE, tmp_path)
    check(cell, outcome)
    who = f"rrfp launch: rank {cell.rank} (stage {cell.rank}) "
    assert outcome.sentences[0].startswith(who) and outcome.sentences[0].removeprefix(who).startswith(how)
    beside = [line for line in outcome.text.splitlines() if line.startswith("  rank ")]
    # Whoever was computing, and not waiting, says instead whom it lost.
    told = [": waited for " in line or f"rank {cell.rank} " in line for line in beside]
    assert len(beside) == 3 and all(told) and any(": waited for " in line for line in beside), outcome.text


@pytest.mark.slow(reason="processes started by hand")
def test_every_rank_started_by_hand_and_the_host_of_the_coordination_dies(tmp_path):
    cell = Cell(0, "kill", "start")
    check(cell, run_by_hand(cell, BRISK_SILENCE, tmp_path))


@pytest.mark.parametrize(("text", "seconds"), [("", SILENCE_SECONDS), ("4", 4.0), ("inf", float("inf"))])
def test_the_limit_on_silence(text, seconds):
    assert silence_seconds({"RRFP_SILENCE_SECONDS": text}) == seconds


@pytest.mark.parametrize("text", ["soon", "1.9", "-3", "nan"])
def test_nonsense_as_the_limit_on_silence_is_refused(text, monkeypatch, tmp_path, capsys):
    with pytest.raises(UsageError, match=f"RRFP_SILENCE_SECONDS={text}"):
        silence_seconds({"RRFP_SILENCE_SECONDS": text})
    monkeypatch.setenv("RRFP_SILENCE_SECONDS", text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["-n", "2", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("rrfp launch: RRFP_SILENCE_SECONDS=")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def watched():
    """The world of rank 3 with its peers' ends, and whom its watchdog has given up."""
    pairs = [socket.socketpair() for _ in range(3)]
    mailbox = Mailbox(3, {rank: ours for rank, (ours, _) in enumerate(pairs)}, 60.0)
    world, given_up = World(3, 4, mailbox), []
    came = threading.Event()

    def give_up(gone):
        given_up.append(gone)
        came.set()

    def start():
        nonlocal watchdog
        watchdog = Watchdog(mailbox, world.recorder.beat, give_up)
        return world, [theirs for _, theirs in pairs], given_up, came

    watchdog = None
    yield start
    began = time.monotonic()
    watchdog.stop()
    assert time.monotonic() - began < 0.4
    mailbox.close()
    for _, theirs in pairs:
        theirs.close()


def test_one_lost_peer_is_left_to_the_main_thread(watched):
    world, peers, _, came = watched()
    peers[1].close()
    assert not came.wait(0.7)
    assert world.mailbox.membership.gone[1].how == "lost" and not world.mailbox.membership.is_cut_off


def test_one_that_has_left_is_not_given_up(watched):
    world, peers, _, came = watched()
    peers[0].sendall(pack(Goodbye()))
    peers[0].close()
    assert not came.wait(0.7)
    assert world.mailbox.membership.gone[0].how == "left"


def test_who_is_cut_off_says_so_at_once(watched):
    world, peers, given_up, came = watched()
    for peer in peers:
        peer.close()
    assert came.wait(0.3)
    words = exit_report(world, PeerLost(given_up[0].sentence, given_up[0].culprit))
    assert (words.kind, words.culprit) == ("peer lost", 3)
    assert words.sentence.startswith("lost all other processes at once")


def test_peers_that_say_why_they_end_do_not_cut_anybody_off(watched):
    world, peers, _, came = watched()
    for peer in peers:
        peer.sendall(pack(Failed(1, "rank 1 raised it")))
        peer.close()
    assert not came.wait(0.7)
    gone = world.mailbox.membership.gone[0]
    words = exit_report(world, PeerLost(gone.sentence, gone.culprit))
    assert (words.culprit, words.sentence) == (1, "rank 1 raised it")
