"""Proxies: gRPC would ask them to call the coordinator, too, which they usually cannot.

On jax 0.10.2 a proxy in the way ends in an abort after five minutes. Which variables count is as in gRPC's
"Default HTTP Proxy Mapper" guide, and was tried: names in capitals have no effect, nor has `no_proxy=*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address, ip_network

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
"""Of each, only the first that is set counts."""


def proxy_for(host: str, environment: Mapping[str, str]) -> str | None:
    """The variable whose proxy gRPC asks to reach a host; None if it calls it directly."""
    proxy = next((name for name in PROXIES if environment.get(name)), None)
    entries = _exceptions(environment).split(",")
    return None if any(_covers(entry.strip(), host) for entry in entries) else proxy


def directly(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment so that gRPC calls a host directly."""
    if proxy_for(host, environment) is None:
        return {}
    return {EXCEPTIONS[0]: ",".join(filter(None, [_exceptions(environment), host]))}


def _exceptions(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in EXCEPTIONS if environment.get(name)), "")


def _covers(entry: str, host: str) -> bool:
    """Whether an exception is for this host: its name's end, or a network with its address."""
    try:
        return ip_address(host) in ip_network(entry, strict=False)
    except ValueError:
        return bool(entry) and host.endswith(entry)
