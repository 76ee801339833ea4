"""A process's place in a run: read from the environment or refused, its GPUs, and waits while it joins."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.runtime import _jax
from rrfp_jax.runtime.mesh import topology
from rrfp_jax.runtime.run import join, place
from rrfp_jax.runtime.run import join as joining
from rrfp_jax.runtime.run.coordinator import reserved_port
from rrfp_jax.runtime.run.handshake import _call
from rrfp_jax.runtime.run.join import JoinWatchdog
from rrfp_jax.runtime.run.place import (
    MEMORY,
    OLD_MEMORY,
    Address,
    Place,
    SlurmStep,
    address_towards,
    exit_seconds,
    first_host,
    gpu_environment,
    gpu_names,
    join_seconds,
    tasks_per_node,
)
from tests.launcher.test_slurm import LAST

BY_HAND = {"RRFP_COORDINATOR": "host0:9876", "RRFP_PROCESSES": "4", "RRFP_RANK": "3"}

ADDRESSES = {
    "host0:9876": Address("host0", 9876),
    "node-07.cluster.local:1": Address("node-07.cluster.local", 1),
    "rack_2:65535": Address("rack_2", 65535),
    "10.0.0.7:9876": Address("10.0.0.7", 9876),
    "[fd00::7]:9876": Address("fd00::7", 9876),
    "[::1]:9876": Address("::1", 9876),
    "[fe80::1%eth0]:9876": Address("fe80::1%eth0", 9876),
}


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_is_read_and_written_alike(text):
    found = Address.parse(text, "X")
    assert found == ADDRESSES[text] and str(found) == text


NO_ADDRESSES = {
    "host0:99999": "there is no port 99999, they are 1 to 65535",
    "host0:65536": "no port 65536",
    "host0:0": "no port 0",
    ":9876": "the host is missing",
    "[]:9876": "At least 3 parts|Address cannot be empty",
    "host0": "no host and port",
    "host0:": "no host and port",
    "host0:x": "no host and port",
    "host0:-1": "no host and port",
    "host0:9876 ": "no host and port",
    "host0:" + "9" * 5000: "no host and port",
    "host0:٣٤٥": "no host and port",
    "::1:9876": "an IPv6 address must be in brackets",
    "fd00::7": "an IPv6 address must be in brackets",
    "[::1]": "no host and port",
    "[::1:9876": "no host and port",
    "::1]:9876": "an IPv6 address must be in brackets",
    "[10.0.0.7]:9876": "At least 3 parts",
    "[host0]:9876": "At least 3 parts",
    "[fd00::7::1]:9876": "At most one '::'",
    "10.0.0.300:9876": "not permitted",
    "10.0.0:9876": "Expected 4 octets",
    "0.0.0.0:9876": "every address",
    "[::]:9876": "every address",
    "http://host0:9876": "IPv6 address must be in brackets",
    "host 0:9876": "no name of a host",
    "host0/x:9876": "no name of a host",
    "user@host0:9876": "no name of a host",
    "-host:9876": "no name of a host",
    "a..b:9876": "no name of a host",
    "é:9876": "no name of a host",
    "a\0b:9876": "no name of a host",
    "a\nb:9876": "no name of a host",
    "x" * 64 + ":9876": "no name of a host",
    ".".join(["x" * 50] * 6) + ":9876": "no name of a host",
    "": "no host and port",
}


@pytest.mark.parametrize("text", NO_ADDRESSES, ids=lambda text: repr(text[:30]))
def test_no_coordinator_can_be_there(text):
    with pytest.raises(UsageError, match=NO_ADDRESSES[text]) as said:
        Address.parse(text, "RRFP_COORDINATOR")
    assert str(said.value).startswith("RRFP_COORDINATOR=") and "give host:port, such as host0:9876" in str(
        said.value
    )


@pytest.mark.parametrize(
    ("text", "serving"),
    [
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("127.0.1.1:7", "127.0.1.1:7"),
        ("localhost:7", "localhost:7"),
        ("[::1]:7", "[::1]:7"),
        ("host0:7", "[::]:7"),
        ("10.0.0.7:7", "[::]:7"),
    ],
)
def test_it_is_served_no_wider_than_need_be(text, serving):
    assert Address.parse(text, "X").serving == serving


def test_an_ip_address_of_this_machine_is_served_alone(monkeypatch):
    monkeypatch.setattr(place, "_is_here", lambda host: True)
    assert Address("10.0.0.7", 7).serving == "10.0.0.7:7"
    assert Address("fd00::7", 7).serving == "[fd00::7]:7"


@pytest.mark.parametrize(
    ("known", "serving"),
    [
        (["10.0.0.7"], "10.0.0.7:7"),
        (["fd00::7"], "[fd00::7]:7"),
        (["127.0.1.1"], "[::]:7"),  # as Debian has it
        (["127.0.1.1", "10.0.0.7"], "10.0.0.7:7"),
        (["203.0.113.1"], "[::]:7"),  # behind a translation of addresses
        (["203.0.113.1", "10.0.0.7"], "10.0.0.7:7"),
    ],
)
def test_a_name_is_served_at_the_address_that_it_has_on_its_machine(monkeypatch, known, serving):
    told = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 7)) for host in known]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: told)
    monkeypatch.setattr(place, "_is_here", {"10.0.0.7", "fd00::7"}.__contains__)
    assert Address("host0", 7).serving == serving


def test_a_place_is_read():
    assert Place.of({}) is None
    assert Place.of(BY_HAND) == Place(Address("host0", 9876), 4, 3, None)


NO_PLACES = [
    ({"RRFP_RANK": ""}, "RRFP_COORDINATOR is set but not RRFP_RANK"),
    ({"RRFP_RANK": "4"}, "RRFP_PROCESSES=4 RRFP_RANK=4: give the number of processes, and a rank from 0"),
    ({"RRFP_RANK": "-1"}, "RRFP_RANK=-1"),
    ({"RRFP_RANK": "x"}, "RRFP_RANK=x"),
    ({"RRFP_RANK": "²"}, "RRFP_RANK=²"),
    ({"RRFP_RANK": "0", "RRFP_PROCESSES": "0"}, "RRFP_PROCESSES=0"),
    ({"RRFP_PROCESSES": "9" * 5000}, "RRFP_PROCESSES=9"),
    ({"RRFP_COORDINATOR": "host0:0"}, "no port 0"),
    ({"RRFP_FOLDER": "/nonexistent/folder"}, "RRFP_FOLDER=/nonexistent/folder: there is no such folder"),
    ({"RRFP_FOLDER": "/dev/null"}, "RRFP_FOLDER=/dev/null: there is no such folder"),
]


@pytest.mark.parametrize(("more", "said"), NO_PLACES)
def test_a_place_that_there_is_not(more, said):
    with pytest.raises(UsageError, match=said):
        Place.of({**BY_HAND, **more})


NO_STEPS = [
    ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 in a step of 4 tasks; start ranks with srun"),
    ({"SLURM_STEP_NUM_TASKS": "9" * 5000}, "SLURM_STEP_NUM_TASKS is 9"),
    ({"JAX_COORDINATOR_PORT": "99999"}, "no port 99999"),
    ({"JAX_COORDINATOR_PORT": "0"}, "no port 0"),
    ({"SLURM_STEP_NODELIST": "-"}, "no name of a host"),
]


@pytest.mark.parametrize(("more", "said"), NO_STEPS)
def test_a_step_that_there_is_not(more, said):
    with pytest.raises(UsageError, match=said):
        SlurmStep.of({**LAST, **more})


@pytest.mark.parametrize(
    "nodes",
    ["n[1-", "n[", "n]", "n[]", "n[a-b]", "n[1-2]]", "[", ",", "n1,", ",n1", "n1 n2", "n[1--2]", "é", "a;b"],
)
def test_a_list_of_nodes_that_is_none(nodes):
    with pytest.raises(UsageError, match="is no list of nodes; start ranks with srun"):
        first_host(nodes)


@pytest.mark.parametrize("text", ["", "2(x", "2(x3", "-1", "2(x99999999999)", "1(x999999999)", "2,,2", "2 2"])
def test_tasks_per_node_that_are_none(text):
    with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE="):
        tasks_per_node(text)


@pytest.mark.parametrize(("text", "seconds"), [("", 300.0), ("7", 7.0), ("inf", float("inf"))])
def test_how_long_to_wait_for_the_others(text, seconds):
    assert join_seconds({"RRFP_JOIN_SECONDS": text}) == seconds


@pytest.mark.parametrize("text", ["-1", "nan", "soon", "0", "4.9"])
def test_no_time_for_threads_that_outlast_the_work(text):
    assert exit_seconds({}) == 300.0 and exit_seconds({"RRFP_EXIT_SECONDS": "5"}) == 5.0
    with pytest.raises(UsageError, match=f"RRFP_EXIT_SECONDS={text}: give the seconds that threads and exit"):
        exit_seconds({"RRFP_EXIT_SECONDS": text})


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_no_time_to_wait(text):
    with pytest.raises(UsageError, match=f"RRFP_JOIN_SECONDS={text}: give the seconds within which"):
        join_seconds({"RRFP_JOIN_SECONDS": text})


def resolver(monkeypatch, number):
    def fail(*_, **__):
        raise socket.gaierror(number, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)


def test_a_host_without_an_address_is_refused_at_once(monkeypatch):
    resolver(monkeypatch, socket.EAI_NONAME)
    with pytest.raises(
        UsageError, match=r"host9:1: its host has no address here \(Name or service not known\)"
    ):
        Address("host9", 1).require_known()


def test_while_nobody_can_be_asked_for_its_address_one_waits(monkeypatch):
    resolver(monkeypatch, socket.EAI_AGAIN)
    Address("host9", 1).require_known()


def test_what_came_of_calling_is_said():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "somebody answers there" in Address("127.0.0.1", port).tried(1.0)
    assert "nobody answers there (Connection refused)" in Address("127.0.0.1", port).tried(1.0)


@pytest.mark.parametrize(
    ("bind", "address"),
    [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("::1", "::1")],
)
def test_the_address_to_listen_on_may_be_chosen(monkeypatch, bind, address):
    monkeypatch.setenv("RRFP_BIND", bind)
    assert address_towards("host0") == address


def test_a_name_is_looked_up(monkeypatch):
    """JAX's transfer server would take it for every address."""
    monkeypatch.setenv("RRFP_BIND", "localhost")
    assert address_towards("host0") in {"127.0.0.1", "::1"}


@pytest.mark.parametrize("bind", ["0.0.0.0", "[::]", "no such host", "300.1.1.1"])
def test_an_address_that_is_none_to_listen_on(monkeypatch, bind):
    monkeypatch.setenv("RRFP_BIND", bind)
    with pytest.raises(OSError) as error:
        address_towards("127.0.0.1")
    assert error.value.strerror and error.value.errno in {errno.EINVAL, *map(int, GAI_ERRORS)}


GAI_ERRORS = (socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL)


@pytest.mark.parametrize(
    ("address", "remedy"),
    [("127.0.0.1", "bring loopback up: ip link set lo up"), ("10.0.0.7", "is the address right?")],
)
def test_a_coordinator_to_which_no_network_leads_is_refused_at_once(monkeypatch, address, remedy):
    class Probe(socket.socket):
        def connect(self, _):
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Probe)
    with pytest.raises(UsageError) as said:
        Address(address, 7).require_known()
    why = "no network of this machine leads there (Network is unreachable)"
    assert str(said.value) == f"the coordinator {address}:7: {why}; {remedy}"


@pytest.fixture
def no_port_is_free(monkeypatch):
    class Probe(socket.socket):
        def bind(self, _):
            raise OSError(errno.EADDRINUSE, "Address already in use")

        def connect(self, _):
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket, "socket", Probe)


def reserve(monkeypatch):
    with reserved_port():
        pass


def listen(monkeypatch):
    monkeypatch.setattr(join, "own_address", lambda: "127.0.0.1")
    join._listen(1)


def take_part(monkeypatch):
    monkeypatch.setattr(_jax, "in_use", lambda: False)
    monkeypatch.setattr(Address, "require_known", lambda _: None)
    join._require_able(Place.of(BY_HAND), b"token")


def call(monkeypatch):
    _call(0, ("127.0.0.1", 7), 1, b"token", 0.0)


def ask_for_it(monkeypatch):
    raise OSError(Address("127.0.0.1", 7).tried(0.1))


@pytest.mark.usefixtures("no_port_is_free")
@pytest.mark.parametrize("act", [reserve, listen, take_part, call, ask_for_it])
def test_ports_that_are_used_up_are_told_as_such(monkeypatch, act):
    with pytest.raises((OSError, UsageError, TrainingError), match="no port is free: end what holds") as said:
        act(monkeypatch)
    assert "RRFP_BIND" not in str(said.value)


def test_a_rank_0_without_a_temporary_folder_cannot_join(monkeypatch):
    def fails(*_):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryFile", fails)
    by_hand = Place(Address("127.0.0.1", 7), 2, 0, folder=None)
    with JoinWatchdog(0, print) as watchdog, pytest.raises(TrainingError, match=r"join its run: .*temporary"):
        join._meet(by_hand, watchdog, 1.0)


def test_processes_exchange_where_they_listen_whatever_their_machine_is_called(monkeypatch):
    monkeypatch.setattr(join, "own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(_jax._jax, "make_gloo_tcp_collectives", None)
    join._listen(1).close()
    assert _jax._jax.make_gloo_tcp_collectives.keywords == {"hostname": "127.0.0.1"}


@pytest.mark.parametrize(
    ("error", "reason"), [(AssertionError(), ""), (RuntimeError("no CUDA\nat all"), r" \(no CUDA\)")]
)
def test_a_platform_that_is_not_there_is_named(monkeypatch, error, reason):
    def local_devices():
        raise error

    config = SimpleNamespace(jax_platforms="cuda")
    monkeypatch.setattr(topology, "jax", SimpleNamespace(config=config, local_devices=local_devices))
    with pytest.raises(
        UsageError, match=f"JAX_PLATFORMS=cuda: JAX finds no such device here{reason}; unset it"
    ):
        topology._local_devices()
    config.jax_platforms = "cpu"
    with pytest.raises(type(error)):
        topology._local_devices()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The environments of all ranks on a machine with that many GPUs."""
    monkeypatch.setattr(place, "PROC", tmp_path)

    def environments(gpus, count, **environment):
        for i in range(gpus):
            (tmp_path / f"0000:0{i}:00.0").mkdir(exist_ok=True)
        return [gpu_environment(environment, rank, count) for rank in range(count)]

    return environments


def visible(environments):
    return [env["CUDA_VISIBLE_DEVICES"] for env in environments]


def test_one_each(machine):
    assert visible(machine(4, 4)) == ["0", "1", "2", "3"]


def test_several_each(machine):
    assert visible(machine(8, 2)) == ["0,1,2,3", "4,5,6,7"]


def test_shared_with_its_memory(machine):
    found = machine(1, 4)
    assert visible(found) == ["0"] * 4
    assert {env[MEMORY] for env in found} == {"0.225"}


def test_shared_unevenly(machine):
    found = machine(2, 3)
    assert visible(found) == ["0", "0", "1"]
    assert [env[MEMORY] for env in found] == ["0.450", "0.450", "0.900"]


def test_names_are_those_of_the_machine(machine, monkeypatch):
    """JAX counts the devices that a process sees."""
    devices = [SimpleNamespace(local_hardware_id=place) for place in (0, 1)]
    for environment, names in zip(machine(4, 2), (["0", "1"], ["2", "3"]), strict=True):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environment["CUDA_VISIBLE_DEVICES"])
        assert gpu_names(devices) == names
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert gpu_names([SimpleNamespace(local_hardware_id=None)]) == ["5"]


def test_what_the_user_allows(machine):
    assert visible(machine(8, 2, CUDA_VISIBLE_DEVICES="5,7")) == ["5", "7"]


@pytest.mark.parametrize("name", [MEMORY, OLD_MEMORY])
def test_the_memory_that_the_user_allows(machine, name):
    """The rank inherits it; JAX refuses both names at once."""
    assert machine(1, 2, **{name: "0.3"}) == [{"CUDA_VISIBLE_DEVICES": "0"}] * 2


def test_nothing_without_gpus(machine, tmp_path, monkeypatch):
    assert machine(0, 4) == [{}] * 4
    assert machine(2, 2, JAX_PLATFORMS="cpu") == [{}, {}]
    assert machine(2, 1, CUDA_VISIBLE_DEVICES="") == [{}]
    monkeypatch.setattr(place, "PROC", tmp_path / "missing")
    assert gpu_environment({}, 0, 1) == {}


ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(joining, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(joining, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(joining, "REMINDER_SECONDS", 0.1)


@pytest.mark.usefixtures("quick")
class TestJoining:
    def test_the_time_left_and_what_was_tried_are_said_from_time_to_time(self, capfd):
        with JoinWatchdog(1, pytest.fail) as one:
            one.waits_for("all 4 ranks at host0:1", 100.0, lambda: "nobody answers there")
            time.sleep(0.35)
        said = capfd.readouterr().err.splitlines()
        assert set(said) == {"rank 1 waits for all 4 ranks at host0:1, 100 s left: nobody answers there"}
        assert 2 <= len(said) <= 4

    def test_it_ends_at_the_limit_whatever_it_is_stuck_in(self):
        ended, said = threading.Event(), []

        def give_up(error):
            said.append(str(error))
            ended.set()
            one.__exit__(None, None, None)  # a process would be gone

        one = JoinWatchdog(1, give_up)
        one.waits_for("all 4 ranks", 0.1, lambda: "nobody answers there")
        assert ended.wait(5.0)
        assert said == ["all 4 ranks did not come within 0.1 s: nobody answers there"]

    def test_each_wait_has_its_own_limit_and_none_outlives_the_end(self):
        given_up = []
        with JoinWatchdog(1, given_up.append) as one:
            one.waits_for("all 4 ranks", 0.1)
            one.waits_for("their addresses", 100.0)
            time.sleep(0.3)
        one.waits_for("nothing any more", 0.0)
        time.sleep(0.1)
        assert given_up == []


def rank(number, port, **more):
    """One that is started by hand."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "RRFP_COORDINATOR": f"127.0.0.1:{port}",
        "RRFP_PROCESSES": "2",
        "RRFP_RANK": str(number),
        "RRFP_TOKEN": "0123456789abcdef" * 4,
        "RRFP_JOIN_SECONDS": "2",
        **more,
    }
    command = [sys.executable, "-c", "from rrfp_jax.runtime.run.join import join; join()"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def test_ranks_whose_coordinator_is_gone_frozen_or_alone_end_by_themselves():
    with ExitStack() as stack:
        frozen = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        ranks = {
            "somebody answers there": rank(1, frozen),  # as a service that was stopped
            "nobody answers there": rank(1, free),
            "rank 1 is missing": rank(0, free + 1 if free < 60000 else free - 1),  # it serves itself
        }
        for one in ranks.values():
            stack.callback(one.wait)
            stack.callback(one.kill)
        said = {reason: one.communicate(timeout=90.0)[1] for reason, one in ranks.items()}
        wrong = {
            reason: text
            for reason, text in said.items()
            if ranks[reason].returncode != 1 or reason not in text or "127.0.0.1:" not in text
        }
        assert not wrong


WORKERS = """
import multiprocessing
import rrfp_jax as rrfp
rrfp.join(); rrfp.join()
from rrfp_jax.runtime.run.join import join
def joined(_): return join.cache_info().currsize
if __name__ == "__main__":
    with multiprocessing.get_context("METHOD").Pool(1) as pool:
        print(joined(0), *pool.map(joined, [0]), flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_a_rank_that_import_its_script_join_nothing(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(WORKERS.replace("METHOD", method))
    place = {"RRFP_COORDINATOR": "127.0.0.1:9", "RRFP_PROCESSES": "1", "RRFP_RANK": "0"}
    environment = {**os.environ, **place, "PYTHONPATH": str(ROOT), "RRFP_FOLDER": str(tmp_path)}
    command = [sys.executable, script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90.0, check=False)
    assert (done.returncode, done.stdout) == (0, "1 0\n"), done.stderr
