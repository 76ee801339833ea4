"""Where a run's processes meet: host and port, as users, SLURM and launchers write them."""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from rrfp_jax.errors import UsageError

EXAMPLE = "host0:9876, or [fd00::7]:9876"

_WRITTEN = re.compile(r"(?:\[(?P<inside>[^\[\]]*)\]|(?P<name>[^:\[\]]*)):(?P<port>[0-9]{1,20})")
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")

LONGEST_NAME = 253
"""Characters, by RFC 1035."""

HIGHEST_PORT = 65535

NO_PORT = "no port is free: end what holds them (`ss -s` counts), or widen net.ipv4.ip_local_port_range"
"""What it means that the system finds none for who asks for any."""


@dataclass(frozen=True)
class Address:
    """A host and a port of it.

    Attributes:
        host: a name, or an IP address without brackets.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, name: str) -> Address:
        """Read "host:port".

        Args:
            text: what is written; IPv6 addresses are in brackets.
            name: of the variable that says it.

        Raises:
            UsageError: no such address can exist.
        """
        try:
            return cls._parsed(text)
        except ValueError as error:
            raise UsageError(f"{name}={text!r}: {error}; give host:port, such as {EXAMPLE}") from None

    @classmethod
    def _parsed(cls, text: str) -> Address:
        written = _WRITTEN.fullmatch(text)
        if written is None:
            several = text.count(":") > 1 and "[" not in text
            raise ValueError("an IPv6 address must be in brackets" if several else "that is no host and port")
        port, inside, name = int(written["port"]), written["inside"], written["name"]
        if not 0 < port <= HIGHEST_PORT:
            raise ValueError(f"there is no port {port}, they are 1 to {HIGHEST_PORT}")
        if inside is not None:
            IPv6Address(inside)  # raises ValueError, saying why
        elif re.fullmatch(r"[0-9.]+", name):
            IPv4Address(name)
        elif not name:
            raise ValueError("the host is missing")
        elif not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
            raise ValueError("that is no name of a host")
        found = cls(name if inside is None else inside, port)
        if found._ip is not None and found._ip.is_unspecified:
            raise ValueError("that means every address of a machine: give the one at which rank 0 is reached")
        return found

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside this machine can reach it."""
        return self.host == "localhost" or (self._ip is not None and self._ip.is_loopback)

    @property
    def serving(self) -> str:
        """Where to listen on its machine, as gRPC writes that: no wider than need be.

        A name may be another address here than where it is called from, so that means all addresses.
        """
        return str(self) if self.is_served_alone else f"[::]:{self.port}"

    @property
    def is_served_alone(self) -> bool:
        """Whether its machine listens there only."""
        return self.is_loopback or self._is_here

    def require_known(self) -> None:
        """Look its host up, and the way there.

        Raises:
            UsageError: it has no address, or there is no way to it. If nobody could be asked just now, that
                is not said.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing: the kernel only chooses a route
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                raise UsageError(
                    f"the coordinator {self}: its host has no address here ({error.strerror}); is the name "
                    f"right, and known on this machine? Else give rank 0's IP address"
                ) from None
        except OSError as error:
            up = "bring loopback up: ip link set lo up" if self.is_loopback else "is the address right?"
            raise UsageError(
                f"the coordinator {self}: no network of this machine leads there ({error.strerror}); {up}"
            ) from None

    def tried(self, seconds: float) -> str:
        """What comes of calling it now, in words."""
        try:
            socket.create_connection((self.host, self.port), timeout=seconds).close()
        except OSError as error:
            none = error.errno == errno.EADDRNOTAVAIL
            return NO_PORT if none else f"nobody answers there ({error.strerror or error})"
        return "somebody answers there, but not all have come, or it stands still"

    @property
    def _is_here(self) -> bool:
        """Whether it is an IP address of this machine: behind a translation of addresses it is not."""
        if self._ip is None:
            return False
        try:
            with socket.socket(socket.AF_INET if self._ip.version == 4 else socket.AF_INET6) as probe:
                probe.bind((self.host, 0))
        except OSError:
            return False
        return True

    @property
    def _ip(self) -> IPv4Address | IPv6Address | None:
        try:
            return ip_address(self.host)
        except ValueError:
            return None
