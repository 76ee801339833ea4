"""Nodes are as isolated as machines, faults do what they say and are undone, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.conftest import until

ECHO = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 7))
print("listens", flush=True)
while True:
    said, who = s.recvfrom(2000)
    print(said.decode(), flush=True)
    s.sendto(said, who)
"""
ASK = """
import select, socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[3])):
    s.sendto(sys.argv[2].encode(), (sys.argv[1], 7))
    if select.select([s], [], [], 0.5)[0]:
        print(s.recv(2000).decode())
        break
"""


def started(nodes, node, program, *arguments, **options):
    """A program in Python on a node that has written its first line."""
    process = nodes.start(
        node, sys.executable, "-SEc", program, *arguments, stdout=subprocess.PIPE, **options
    )
    process.stdout.readline()
    return process


def answers(nodes, of, to, said, times=60):
    """Whether what is sent from one node to another, so many times, comes back."""
    done = nodes.run(of, sys.executable, "-SEc", ASK, to, said, times)
    assert done.returncode == 0 or "unreachable" in done.stderr, done.stderr
    return done.stdout.strip() == said


def test_a_node_has_what_a_machine_has(nodes, tmp_path):
    (tmp_path / "shared").write_text("by all")
    each = {}
    for node in ("n0", "n1"):
        asked = f"""hostname; cat /proc/sys/kernel/random/boot_id; cut -d. -f1 /proc/uptime; echo $$
            ls /tmp /dev/shm; touch /dev/shm/{node} /tmp/{node}
            ip -br address show eth0; cat {tmp_path}/shared"""
        each[node] = nodes.run(node, "sh", "-c", asked, folder="/").stdout.split()
    assert each["n0"][0] == "n0" and each["n1"][0] == "n1"
    assert each["n0"][1] != each["n1"][1] != Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert 4000 < int(each["n1"][2]) - int(each["n0"][2]) < 5500
    assert int(each["n0"][3]) < 100  # process ids of its own
    assert "n0" not in each["n1"] and nodes.addresses["n1"] + "/24" in each["n1"]
    assert each["n1"][-2:] == ["by", "all"]
    assert not Path("/dev/shm/n0").exists() and not Path("/tmp/n0").exists()


@pytest.mark.parametrize(("to", "of"), [(True, True), (True, False), (False, True)])
def test_a_mute_node_loses_packets_in_the_directions_named(nodes, to, of):
    node = started(nodes, "n1", ECHO)
    other = started(nodes, "n0", ECHO)
    assert answers(nodes, "n0", "n1", "before")
    assert answers(nodes, "n1", "n0", "before")
    nodes.mute("n1", to=to, of=of)
    assert nodes.run("n1", "cat", "/sys/class/net/eth0/carrier").stdout == "1\n"
    assert not answers(nodes, "n0", "n1", "to", 2)
    assert not answers(nodes, "n1", "n0", "of", 2)
    nodes.heal()
    assert answers(nodes, "n0", "n1", "after")
    assert answers(nodes, "n1", "n0", "after")
    nodes.renew()
    assert [*dict.fromkeys(node.stdout.read().split())] == ["before", *(["to"] if not to else []), "after"]
    assert [*dict.fromkeys(other.stdout.read().split())] == ["before", *(["of"] if not of else []), "after"]


def test_a_cut_node_has_no_carrier_until_it_is_healed(nodes):
    started(nodes, "n1", ECHO)
    nodes.cut("n1")
    assert nodes.run("n1", "cat", "/sys/class/net/eth0/carrier").stdout == "0\n"
    assert not answers(nodes, "n0", "n1", "to", 2)
    nodes.heal("n1")
    assert answers(nodes, "n0", "n1", "after")


LOAD = """
import socket, sys, time
if sys.argv[1] == "listen":
    listener = socket.create_server(("", 700))
    print("listens", flush=True)
    one, _ = listener.accept()
    while one.recv(1 << 16):
        pass
else:
    one = socket.create_connection(("n1", 700))
    begun = time.monotonic()
    one.sendall(bytes(300_000))
    one.shutdown(socket.SHUT_WR)
    one.recv(1)
    print(time.monotonic() - begun)
"""


def test_a_slow_node_gets_what_the_rate_lets_through(nodes):
    started(nodes, "n1", LOAD, "listen")
    nodes.slow("n1", "2mbit")
    seconds = float(nodes.run("n0", sys.executable, "-SEc", LOAD, "connect").stdout)
    assert 0.9 * 268_000 * 8 / 2e6 < seconds < 30  # the first 32 KB go at once


PEER = """
import socket, sys
if sys.argv[1] == "listen":
    listener = socket.create_server(("", 700))
    print("listens", flush=True)
    one, _ = listener.accept()
    one.recv(1)
    one.recv(1)
else:
    one = socket.create_connection(("n1", 700))
    one.send(b"x")
    print("connected", flush=True)
    one.settimeout(2)
    print(one.recv(1))
"""


def test_nobody_is_told_of_a_crash_and_a_node_boots_anew(nodes):
    peer = started(nodes, "n1", PEER, "listen")
    other = started(nodes, "n0", PEER, "connect", stderr=subprocess.PIPE)
    before = nodes.run("n1", "sh", "-c", "touch /tmp/mine; cat /proc/sys/kernel/random/boot_id").stdout
    nodes.crash("n1")
    assert peer.wait(timeout=30) == -signal.SIGKILL
    assert "TimeoutError" in other.communicate(timeout=30)[1]
    with pytest.raises(AssertionError, match="n1 is down"):
        nodes.run("n1", "true")
    nodes.boot("n1")
    assert nodes.run("n1", "cat", "/proc/sys/kernel/random/boot_id").stdout != before
    assert nodes.run("n1", "ls", "/tmp/mine").returncode != 0
    started(nodes, "n1", ECHO)
    assert answers(nodes, "n0", "n1", "after")


def test_a_local_folder_is_the_nodes_own_until_the_test_ends(nodes, tmp_path):
    (tmp_path / "file").write_text("shared")
    nodes.local("n1", tmp_path)
    assert nodes.run("n1", "ls", tmp_path).stdout == ""
    assert nodes.run("n0", "ls", tmp_path).stdout == "file\n"
    nodes.renew()
    assert nodes.run("n1", "ls", tmp_path).stdout == "file\n"


def test_a_command_is_frozen_goes_on_and_ends_by_signals(nodes):
    program = "print('begun', flush=True)\nwhile input(): print('on', flush=True)"
    one = started(nodes, "n1", program, stdin=subprocess.PIPE)
    nodes.signal(one, signal.SIGSTOP)
    state = [
        "sh",
        "-c",
        "grep -l 'on.,' /proc/[0-9]*/cmdline | cut -d/ -f3 | xargs -I{} grep State /proc/{}/status",
    ]
    until(lambda: "stopped" in nodes.run("n1", *state).stdout)
    nodes.signal(one, signal.SIGCONT)
    one.stdin.write("?\n")
    one.stdin.flush()
    assert one.stdout.readline() == "on\n"
    nodes.signal(one, signal.SIGTERM)
    assert one.wait(timeout=30) in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_what_is_frozen_ends_with_its_node(nodes):
    one = nodes.start("n1", "sleep", "1000")
    nodes.signal(one, signal.SIGSTOP)
    nodes.renew()
    assert one.wait(timeout=30) == -signal.SIGKILL


MADE = """
import os, sys, time
from tests.nodes.nodes import Nodes
with Nodes(2) as nodes:
    nodes.start("n0", "sleep", "1000", folder="/")  # this folder may be one that nodes have of their own
    nodes.start("n1", "sh", "-c", "trap '' TERM INT HUP; sleep 1000", folder="/")
    processes = [nodes._switch, *nodes._first.values()]
    print(*(os.readlink(f"/proc/{process.pid}/ns/net") for process in processes), flush=True)
    print(*(os.readlink(f"/proc/{pid}/ns/net") for pid in nodes._pids.values()), flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_nodes_whose_owner_has_ended(nodes_of, number):
    command = [sys.executable, "-c", MADE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as owner:
        ours = os.readlink("/proc/self/ns/net")
        spaces = {each for _ in range(2) for each in owner.stdout.readline().split()} - {ours}
        if len(spaces) != 3:
            owner.kill()
            pytest.fail(owner.stderr.read())
        owner.send_signal(number)
        owner.wait(timeout=60)
    deadline = time.monotonic() + 60
    while left := [pid for pid in os.listdir("/proc") if pid.isdigit() and space_of(pid) in spaces]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def space_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
