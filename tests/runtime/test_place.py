"""What the environment says about a process's place: read, or refused at once with what to write instead."""

import errno
import socket
from types import SimpleNamespace

import pytest

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.runtime import _jax
from rrfp_jax.runtime.mesh import topology
from rrfp_jax.runtime.run import join
from rrfp_jax.runtime.run.coordinator import reserved_port
from rrfp_jax.runtime.run.handshake import _call
from rrfp_jax.runtime.run.place import (
    Address,
    Place,
    SlurmStep,
    address_towards,
    exit_seconds,
    first_host,
    join_seconds,
    tasks_per_node,
)
from tests.launcher.test_slurm_step import LAST

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
    monkeypatch.setattr(Address, "_is_here", True)
    assert Address("10.0.0.7", 7).serving == "10.0.0.7:7"
    assert Address("fd00::7", 7).serving == "[fd00::7]:7"


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
