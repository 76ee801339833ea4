"""Nodes as clusters have them: other addresses, names and clocks, file systems that cache, several runs."""

import os
import shutil
import sys
import time

import pytest

from tests.nodes import ranks
from tests.nodes.test_links import END_SECONDS, LOOPBACK, START_SECONDS, Meeting

LIMIT_SECONDS = 240.0
ON = ["n0", "n1"]
DOCKER = (
    "ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
)
SIX = "ip address add {six}/64 dev eth0 nodad && ip -4 address flush dev eth0"
NAMELESS = "echo 127.0.0.1 localhost > /run/hosts && mount --bind /run/hosts /etc/hosts"
ODD = {
    "an address that all nodes have": (DOCKER, "10.77.0.10"),
    "two networks": ("ip address add {second}/24 dev eth0", "10.78.0.10"),
    "IPv6 only": (SIX, "[fd00::10]"),
    "no name of a node is known": (NAMELESS, "10.77.0.10"),
    "its own name means loopback": (LOOPBACK, "10.77.0.10"),
}


def on_each(nodes, command):
    for number, node in enumerate(ON):
        given = command.replace("{six}", f"fd00::{10 + number}").replace("{second}", f"10.78.0.{10 + number}")
        done = nodes.run(node, "sh", "-c", given)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow(reason="10 s each: a start on two nodes")
@pytest.mark.parametrize("odd", ODD)
def test_ranks_meet_where(nodes, tmp_path, odd):
    command, host = ODD[odd]
    on_each(nodes, command)
    Meeting(nodes, ON, tmp_path, host=host).met(START_SECONDS)


@pytest.mark.slow(reason="two starts on two nodes, an outage of 8 s")
@pytest.mark.parametrize("heals", [True, False])
def test_a_node_is_cut_off_while_addresses_are_exchanged(nodes, tmp_path, heals):
    command = "tests.nodes.meeting_rank", "waiting", f"{tmp_path}"
    meeting = Meeting(nodes, ON, tmp_path, silence=60.0, command=command)
    deadline = time.monotonic() + START_SECONDS
    while not (tmp_path / "came").exists():
        assert time.monotonic() < deadline, meeting.said()
        time.sleep(0.05)
    nodes.mute("n1")
    (tmp_path / "caused").touch()
    if heals:
        time.sleep(8.0)
        nodes.heal("n1")
        meeting.met(END_SECONDS)
    else:
        assert [rank.wait(timeout=2 * END_SECONDS) for rank in meeting.ranks] == [1, 1]
        assert "rank 1" in meeting.logs[0].read_text()


def train(nodes, folder, runs, more=None, before=(), port=9876):
    """Two ranks of the small run, the second with a command before its own."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ranks.ROOT / "tests" / "nodes" / "small_run.py", folder / "run.py")
    (folder / "activation.py").write_text("from jax.nn import relu as activate\n")
    command = ["-m", "rrfp_jax", "train", f"--config={folder}/run.py", f"--config.directory={runs}"]
    more = {"PYTHONPATH": f"{folder}{os.pathsep}{ranks.ROOT}", **(more or {})}
    more["RRFP_COORDINATOR"] = f"10.77.0.10:{port}"
    return ranks.start(nodes, ON, [*before, sys.executable, *command], folder, more)


def trained(started, folder, runs):
    """The metrics of a run that has ended well."""
    statuses = [rank.wait(LIMIT_SECONDS) for rank in started]
    assert statuses == [0, 0], [ranks.said(folder, rank)[-3000:] for rank in (0, 1)]
    assert (runs / "small.checkpoints" / "4").is_dir()
    return (runs / "small" / "metrics.jsonl").read_text()


@pytest.mark.slow(reason="two runs on two nodes")
def test_two_runs_on_the_same_nodes_at_once(nodes, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    both = [train(nodes, folder, folder, port=9876 + n) for n, folder in enumerate(folders)]
    for folder, started in zip(folders, both, strict=True):
        trained(started, folder, folder)


AHEAD = """
import os, time
def ahead(unit, clock):
    return lambda: clock() + 3600 * unit
time.time, time.time_ns = ahead(1, time.time), ahead(10**9, time.time_ns)
open(f"{os.path.dirname(__file__)}/rank-{os.environ['RRFP_RANK']}", "w").close()
"""


@pytest.mark.slow(reason="a run on two nodes")
def test_clocks_an_hour_apart(nodes, tmp_path):
    """For Python only: libfaketime refuses the sleeps of Python 3.11."""
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "sitecustomize.py").write_text(AHEAD)
    late = f'PYTHONPATH="$PYTHONPATH:{tmp_path}/ahead"'
    before = ["sh", "-c", f'test $RRFP_RANK = 0 && exec "$@" || {late} exec "$@"', "sh"]
    trained(train(nodes, tmp_path, tmp_path, before=before), tmp_path, tmp_path)
    assert [path.name for path in (tmp_path / "ahead").glob("rank-*")] == ["rank-1"]


@pytest.mark.slow(reason="two runs on two nodes")
@pytest.mark.skipif(shutil.which("bindfs") is None, reason="no bindfs here")
@pytest.mark.parametrize("exists", [True, False])
def test_a_shared_folder_whose_attributes_are_cached(nodes, tmp_path, exists):
    """As on NFS, a node sees late what another has written, and later still what it has missed before."""
    shared, seen = tmp_path / "shared", tmp_path / "seen"
    shared.mkdir()
    seen.mkdir()
    if exists:
        (shared / "runs" / "small.checkpoints").mkdir(parents=True)
    cached = "attr_timeout=60,entry_timeout=60,negative_timeout=60,ac_attr_timeout=60"
    for node in ON:
        done = nodes.run(node, "bindfs", "-o", cached, shared, seen)
        assert done.returncode == 0, done.stderr
        nodes.run(node, "ls", "-lR", seen)
        assert nodes.run(node, "stat", seen / "late").returncode == 1
    (shared / "late").touch()
    for node in ON:
        assert nodes.run(node, "stat", seen / "late").returncode == 1, "nothing is cached"
    for _ in range(2):  # the second run resumes
        trained(train(nodes, tmp_path, seen / "runs"), tmp_path, shared / "runs")
    assert "nothing is left to do" in ranks.said(tmp_path, 0)
