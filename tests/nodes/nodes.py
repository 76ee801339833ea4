"""Isolated nodes on one Linux machine, for programs that run over several; root only.

A node has its own network, hostname, /etc/hosts, process ids, System V IPC, boot id, clocks since boot, /run
and the folders of `OWN`. As in a cluster with a shared file system, all other files are shared, and of those
folders what `shared` names. Processors, memory, user ids and the time of day are the machine's.

Node `n2` is 10.77.0.12. Between it and the switch is a bridge of its own:

    eth0 of the node | n2 - bridge b2 - u2 | s2 - bridge sw

What leaves by `n2` goes to the node, what leaves by `u2` comes from it. So the switch loses packets in one
direction or in both, and nothing on the node is told.

Nothing stays behind: each node ends when the pipe to its first process is closed, which the kernel does when
this process ends in whatever way, and all that is made is in namespaces, which end with their processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

OWN = ("/dev/shm", "/tmp", "/var/tmp", "/var/spool", "/var/log")
"""Folders that are empty on each node."""

NAMESPACES = ["--mount", "--uts", "--ipc", "--net", "--pid", "--time", "--fork", "--kill-child"]
SECONDS = 60.0
"""Longest wait for a command that sets something up, which takes milliseconds on a quiet machine."""


class Unavailable(Exception):
    """Nodes can't be had here; the text says why."""


def check() -> None:
    """Raise `Unavailable` where there can be no nodes."""
    if not sys.platform.startswith("linux"):
        raise Unavailable("nodes are namespaces of Linux")
    if os.geteuid() != 0:
        raise Unavailable("making nodes is for root only")
    missing = [name for name in ("unshare", "nsenter", "ip", "bridge", "tc") if shutil.which(name) is None]
    if missing:
        raise Unavailable(f"no {', '.join(missing)} here (packages util-linux and iproute2)")
    trial = "mount -t proc p /proc && mount -t tmpfs t /run && hostname n && ip link add sw type bridge"
    done = _call(["unshare", *NAMESPACES, "sh", "-c", trial], check=False)
    if done.returncode:
        raise Unavailable(f"no namespaces here: {done.stderr.strip()}")


def _call(command: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Nodes:
    """`count` nodes n0, n1, ... on a switch. Use it in a `with` statement, or close it."""

    def __init__(self, count: int, shared: Iterable[Path | str] = ()) -> None:
        check()
        self.names = [f"n{number}" for number in range(count)]
        self.addresses = {name: f"10.77.0.{10 + number}" for number, name in enumerate(self.names)}
        self._shared = [str(folder) for folder in shared]
        self._first: dict[str, subprocess.Popen[str]] = {}
        self._pids: dict[str, int] = {}
        self._started: dict[str, list[subprocess.Popen[Any]]] = {}
        self._used: set[str] = set()
        self._switch = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo made; cat"],  # until the pipe is closed
            **_pipes(),
        )
        assert self._switch.stdout is not None and self._switch.stdout.readline()
        try:
            self._wire("ip link add sw type bridge", "ip link set sw up")
            self._boot(self.names)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything on all nodes, and the nodes."""
        for name in [*self._first]:
            self._end(name)
        self._switch.kill()
        self._switch.communicate(timeout=SECONDS)

    # What runs on a node.

    def on(self, node: str, *command: Any, folder: Path | str | None = None) -> list[str]:
        """The command that runs `command` on a node, in the present folder or in another."""
        assert node in self._pids, f"{node} is down" if node in self.names else f"there is no node {node}"
        self._used.add(node)
        enter = ["nsenter", "--target", str(self._pids[node]), "--all"]
        return [*enter, "env", "-C", str(folder or Path.cwd()), *map(str, command)]

    def run(
        self, node: str, *command: Any, folder: Any = None, timeout: float = SECONDS, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end; its output is text in `stdout` and `stderr`."""
        options = {"capture_output": True, "text": True, **options}
        entered = self.on(node, *command, folder=folder)
        return subprocess.run(entered, check=False, timeout=timeout, **options)

    def start(self, node: str, *command: Any, folder: Any = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a node. It ends with the node, at the latest when the test ends."""
        options = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True, **options}
        started = subprocess.Popen(self.on(node, *command, folder=folder), **options)
        self._started.setdefault(node, []).append(started)
        return started

    def signal(self, started: subprocess.Popen[Any], number: int) -> None:
        """Send a signal to what `start` has started, not to what that has started itself."""
        deadline = time.monotonic() + SECONDS
        while not (own := _children(started.pid)):  # `nsenter` has not begun it yet
            assert time.monotonic() < deadline and started.poll() is None, "the command has ended"
            time.sleep(0.01)
        os.kill(own[0], number)
        if number == signal.SIGCONT:  # nsenter stops with what it waits for
            started.send_signal(number)

    # Faults. `heal` undoes the first three.

    def cut(self, node: str) -> None:
        """Pull the cable: the node sees that it has no carrier, the others see nothing."""
        self._wire(f"ip link set {node} down")

    def mute(self, node: str, to: bool = True, of: bool = True) -> None:
        """Lose all packets to the node, of the node, or both; all links stay up."""
        self._queue(node, "blackhole", to, of)

    def slow(self, node: str, rate: str) -> None:
        """Let so much through each way, such as "2mbit"; what waits over 400 ms is lost."""
        self._queue(node, f"tbf rate {rate} burst 32kb latency 400ms")

    def heal(self, node: str | None = None) -> None:
        """Undo `cut`, `mute` and `slow` for a node, or for all."""
        for each in [node] if node else self._pids:
            self._wire(f"ip link set {each} up")
            for port in (each, f"u{each[1:]}"):
                self._wire(f"tc qdisc del dev {port} root", check=False)

    def local(self, node: str, folder: Path | str) -> None:
        """Put an empty folder of the node's own in place of a shared one, until the node boots."""
        done = self.run(node, "mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder)
        assert done.returncode == 0, done.stderr

    def crash(self, node: str) -> None:
        """Power failure: nothing on the node runs on, and nobody is told."""
        self.cut(node)  # first: the kernel would say goodbye for what it kills
        self._end(node)

    def boot(self, node: str) -> None:
        """Start a node that crashed, with empty folders of its own."""
        assert node not in self._pids, f"{node} is up"
        self._boot([node])

    def renew(self) -> None:
        """Heal all, end what runs on the nodes, and boot those that were used or have crashed."""
        self.heal()
        used = [name for name in self.names if name in self._used or name not in self._pids]
        for name in used:
            self._end(name)
        self._boot(used)

    # How it is done.

    def _wire(self, *commands: str, check: bool = True) -> None:
        """Run commands where the switch is."""
        for command in commands:
            _call(["nsenter", f"--net=/proc/{self._switch.pid}/ns/net", *command.split()], check)

    def _queue(self, node: str, kind: str, to: bool = True, of: bool = True) -> None:
        for port, wanted in ((node, to), (f"u{node[1:]}", of)):
            if wanted:
                self._wire(f"tc qdisc replace dev {port} root {kind}")

    def _end(self, node: str) -> None:
        first = self._first.pop(node, None)
        if first is not None:
            if node in self._pids:  # the first process takes all others of the node with it
                with suppress(ProcessLookupError):
                    os.kill(self._pids.pop(node), signal.SIGKILL)
            for started in self._started.pop(node, []):
                if started.poll() is None:  # stopped with what it waits for, it would not see that end
                    started.kill()
            first.communicate(timeout=SECONDS)
        self._used.discard(node)

    def _boot(self, names: Iterable[str]) -> None:
        """Start nodes, all at once."""
        hosts = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        for name in names:
            since = str(1000 + 5000 * int(name[1:]))  # other uptimes
            about = {"name": name, "hosts": hosts, "shared": self._shared, "boot_id": str(uuid.uuid4())}
            command = ["unshare", *NAMESPACES, "--monotonic", since, "--boottime", since]
            command += [sys.executable, "-SE", __file__, json.dumps(about)]
            self._first[name] = subprocess.Popen(command, **_pipes())
        for name in names:
            first, number = self._first[name], name[1:]
            assert first.stdout is not None
            said = first.stdout.readline()
            assert said == "ready\n", f"{name} does not start: {said}{first.stdout.read()}"
            self._pids[name] = _children(first.pid)[0]
            self._wire(*(f"ip link del {port}" for port in (name, f"b{number}", f"u{number}")), check=False)
            self._wire(
                f"ip link add {name} type veth peer name eth0 address 02:00:00:00:00:{int(number):02x}"
                f" netns {self._pids[name]}",
                f"ip link add u{number} type veth peer name s{number}",
                f"ip link add b{number} type bridge",
                *(f"ip link set {name} master b{number}", f"ip link set u{number} master b{number}"),
                f"ip link set s{number} master sw",
                *(f"ip link set {port} up" for port in (name, f"u{number}", f"s{number}", f"b{number}")),
            )
            for change in (f"address add {self.addresses[name]}/24 dev eth0", "link set eth0 up"):
                _call(self.on(name, "ip", *change.split(), folder="/"))
            self._used.discard(name)


def _pipes() -> dict[str, Any]:
    pipe = subprocess.PIPE
    both: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.STDOUT, "text": True}
    return both | {"start_new_session": True}  # Ctrl-C is for who made the nodes


def _init(name: str, hosts: str, shared: Sequence[str], boot_id: str) -> None:
    """The first process of a node: finish its namespaces, then live until the pipe is closed."""

    def mount(*arguments: str) -> None:
        _call(["mount", *arguments])

    def own(folder: str, mode: int = 1777) -> None:
        mount("-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", folder)

    mount("--make-rprivate", "/")
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "sysfs", "sysfs", "/sys")  # its network devices only
    own("/run", 755)
    shared = [folder for folder in shared if folder.startswith(tuple(f"{each}/" for each in OWN))]
    for number, folder in enumerate(shared):  # held over the new folders
        os.makedirs(f"/run/shared/{number}")
        mount("--rbind", folder, f"/run/shared/{number}")
    for folder in filter(os.path.isdir, OWN):
        own(folder)
    for number, folder in enumerate(shared):
        os.makedirs(folder, exist_ok=True)
        mount("--rbind", f"/run/shared/{number}", folder)
    files = {"/etc/hosts": f"127.0.0.1 localhost\n{hosts}", "/proc/sys/kernel/random/boot_id": f"{boot_id}\n"}
    for number, (file, text) in enumerate(files.items()):
        Path(f"/run/file{number}").write_text(text)
        mount("--bind", f"/run/file{number}", file)
    _call(["hostname", name])
    _call(["ip", "link", "set", "lo", "up"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that lose their parent leave no zombie
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _init(**json.loads(sys.argv[1]))
