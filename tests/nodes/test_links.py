"""Links between nodes that are dead for a while, or for good: who goes on, and who is blamed."""

import itertools
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SILENCE = 6.0
MEETING = ("tests.nodes.meeting_rank", "doubling")
START_SECONDS, END_SECONDS = 120.0, 60.0

ports = itertools.count(9876)
"""One a run: the service of one that has ended lingers."""


class Meeting:
    """Ranks that meet again and again, one on each of some nodes."""

    def __init__(self, nodes, names, folder, bind=None, silence=SILENCE, command=MEETING, host=None):
        self.nodes = nodes
        self.logs = [folder / f"rank-{rank}" for rank in range(len(names))]
        (folder / "token").write_text(secrets.token_hex(32))
        (folder / "token").chmod(0o600)
        given = {
            "RRFP_COORDINATOR": f"{host or names[0]}:{next(ports)}",
            "RRFP_PROCESSES": f"{len(names)}",
            "RRFP_TOKEN_FILE": f"{folder}/token",
            "RRFP_SILENCE_SECONDS": f"{silence:g}",
            "JAX_PLATFORMS": "cpu",
        }
        self.ranks = []
        for rank, name in enumerate(names):
            own = {"RRFP_RANK": f"{rank}", "RRFP_BIND": (bind or {}).get(name, "")}
            environment = {**os.environ, **given, **own}
            with open(self.logs[rank], "w") as log:
                output = {"stdout": log, "stderr": subprocess.STDOUT}
                self.ranks.append(
                    nodes.start(name, sys.executable, "-m", *command, folder=ROOT, env=environment, **output)
                )

    def met(self, seconds):
        """Wait until all have met once more, from now on."""
        now = time.time()
        deadline = time.monotonic() + seconds
        while not all(self._times(log) and self._times(log)[-1] > now for log in self.logs):
            assert all(rank.poll() is None for rank in self.ranks), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def said(self):
        """How each rank has ended: its last words."""
        words = []
        for log in self.logs:
            lines = [line for line in log.read_text().splitlines() if line.startswith("rank ")]
            words.append(lines[-1].partition(": ")[2] if lines else "")
        return words

    def ended(self):
        """The same once all have, each with status 1."""
        assert [rank.wait(timeout=END_SECONDS) for rank in self.ranks] == [1] * len(self.ranks)
        return self.said()

    @staticmethod
    def _times(log):
        whole = log.read_text().rpartition("\n")[0].splitlines()
        return [float(line) for line in whole if line[:1].isdigit()]


@pytest.fixture
def meeting(nodes, tmp_path):
    """Three ranks, one a node."""
    found = Meeting(nodes, ["n0", "n1", "n2"], tmp_path)
    found.met(START_SECONDS)
    return found


@pytest.mark.costly(reason="a run over three nodes")
def test_an_outage_below_the_limit_ends_nothing_and_one_above_it_blames_the_node(meeting):
    """TCP's tries come 0.2, 0.6, 1.4, 3.0 and 6.2 s after a link died: in time for no limit of 6 s."""
    for _ in range(2):
        meeting.nodes.mute("n1")
        time.sleep(4.0)
        meeting.nodes.heal("n1")
        meeting.met(END_SECONDS)
    meeting.nodes.mute("n1")
    time.sleep(SILENCE + 0.3)
    meeting.nodes.heal("n1")  # now all can tell each other of whom they have lost
    zero, one, two = meeting.ended()
    told = "rank 1 (host n1) has not been heard from for 6 s: frozen or cut off"
    # Who is first to give up is chance; on a busy machine the others may be, and tell it.
    assert one in ("lost all other processes at once: cut off, if they were not killed", told)
    for said in (zero, two):
        assert said.startswith("rank 1 (host n1)") and "cut off" in said


@pytest.mark.slow(reason="a run over three nodes; runtime/test_blame.py and test_mailbox.py have the verdict")
def test_a_link_that_is_dead_is_blamed_and_neither_of_its_ends(meeting):
    for node, other in (("n1", "n2"), ("n2", "n1")):
        done = meeting.nodes.run(node, "ip", "route", "add", "blackhole", meeting.nodes.addresses[other])
        assert done.returncode == 0, done.stderr
    said = "the connection between rank 1 (host n1) and rank 2 (host n2) was dead for 6 s"
    for words in meeting.ended():  # rank 0's are those of whoever told it first
        assert words.endswith(said) and "cut off" not in words


@pytest.mark.slow(reason="an outage of 21 s")
def test_an_answer_of_the_coordination_service_outlasts_an_outage(nodes, tmp_path):
    """gRPC's server gives up a connection after 20 s, and JAX aborts the process at its other end."""
    there = tmp_path / "there"
    meeting = Meeting(
        nodes, ["n0", "n1"], tmp_path, silence=60.0, command=("tests.nodes.asking_rank", f"{there}")
    )
    deadline = time.monotonic() + START_SECONDS
    while not all("asks" in log.read_text() for log in meeting.logs):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.5)  # the service tends its connections every second
    nodes.mute("n1")
    there.touch()
    time.sleep(21.0)
    nodes.heal("n1")
    assert [rank.wait(timeout=END_SECONDS) for rank in meeting.ranks] == [0, 0], meeting.said()


LOOPBACK = "sed 's/.* n0$/127.0.1.1 n0/' /etc/hosts > /run/hosts && mount --bind /run/hosts /etc/hosts"


@pytest.mark.slow(reason="two starts on two nodes; runtime/test_links.py has the rule")
def test_a_node_that_takes_its_own_name_for_loopback_is_refused_unless_told_its_address(nodes, tmp_path):
    """As Debian has it: rank 0 would listen, and exchange, where nobody else reaches it."""
    assert nodes.run("n0", "sh", "-c", LOOPBACK).returncode == 0
    refused = Meeting(nodes, ["n0", "n1"], tmp_path)
    assert [rank.wait(timeout=START_SECONDS) for rank in refused.ranks] == [1, 1]
    for log in refused.logs:
        assert "rank 0 on n0 listens on 127.0.0.1, where other machines cannot reach it" in log.read_text()
    told = Meeting(nodes, ["n0", "n1"], tmp_path, bind={"n0": nodes.addresses["n0"]})
    told.met(START_SECONDS)
