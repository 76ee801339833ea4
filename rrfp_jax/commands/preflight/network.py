"""Checks: addresses, ports and proxies, and whether the tasks reach each other."""

from __future__ import annotations

from ipaddress import ip_address

from rrfp_jax.commands.preflight.findings import Finding
from rrfp_jax.commands.preflight.surroundings import Surroundings
from rrfp_jax.runtime.run.place import Address, proxy_for

SKEW_SECONDS = 1.0
"""By which clocks of nodes may differ: logs and the times of files are still in order."""


def check_address(found: Surroundings) -> Finding:
    """Whether this process can listen where others reach it."""
    fix = "export RRFP_BIND=an address of this node that the others reach (hostname -I lists them)"
    if found.address_error:
        return Finding("FAIL", "address", f"cannot listen on {found.address_error}", fix)
    connected = found.meeting is not None and not found.meeting.error
    if _nodes(found) > 1 and _is_loopback(found.address) and not connected:
        said = f"{found.address} is a loopback, which no other node reaches: see {found.host} in /etc/hosts"
        return Finding("FAIL", "address", said, fix)
    return Finding("ok", "address", f"listens on {found.address}")


def check_port(found: Surroundings) -> Finding | None:
    """Whether rank 0 can serve the others at the coordinator's port."""
    if found.place is None or found.meeting is None or found.place.rank:
        return None
    port, other = found.place.coordinator.port, _another_port(found.place.coordinator)
    if not found.meeting.port_taken:
        return Finding("ok", "port", f"{port} is free for the coordinator")
    fix = f"export JAX_COORDINATOR_PORT={other.port}"
    if found.step is None:
        fix = f"export RRFP_COORDINATOR={other} on all ranks"
    return Finding("FAIL", "port", f"cannot serve at {port}: {found.meeting.port_taken}", fix)


def _another_port(address: Address) -> Address:
    return Address(address.host, 1024 + (address.port + 4321) % 60000)


def check_exposure(found: Surroundings) -> Finding | None:
    """Whether machines that no rank is on could reach our ports."""
    place, known = found.place, found.step is not None or bool(found.meeting and found.meeting.hosts)
    if place is None or place.processes == 1 or found.address_error or not known:
        return None
    where = place.coordinator
    if _nodes(found) > 1:
        said = f"control messages and transfers listen on {found.address}"
        if place.rank == 0:
            said += f", the coordination service on {where.serving.replace('[::]', 'every address')}"
        return Finding("ok", "exposure", said)
    if not where.is_loopback:
        said = f"all ranks are on {found.host}, but other machines reach them, and the coordinator at {where}"
        fix = f"export RRFP_COORDINATOR={Address('127.0.0.1', where.port)} on all ranks"
        return Finding("warn", "exposure", said, fix)
    if not _is_loopback(found.address):
        said = f"all ranks are on {found.host}, but other machines reach this one at {found.address}"
        return Finding("warn", "exposure", said, "unset RRFP_BIND")
    return Finding("ok", "exposure", "no other machine reaches the ranks and their coordinator")


def check_peers(found: Surroundings) -> Finding | None:
    """Whether the ranks have met and reach each other."""
    if found.meeting is None:
        return None
    if found.meeting.error:
        fix = "firewall between nodes? RRFP_BIND for the right network; all tasks started? srun rrfp-doctor"
        return Finding("FAIL", "peers", found.meeting.error, fix)
    return Finding("ok", "peers", f"connected to all of {len(found.meeting.hosts)} ranks")


def check_proxy(found: Surroundings) -> Finding:
    """Whether a proxy stands between a rank and the coordinator."""
    host = "" if found.place is None else found.place.coordinator.host
    proxy = proxy_for(host, found.environment) if host else None
    if proxy is None:
        return Finding("ok", "proxy", "none between the ranks")
    said = (
        f"{proxy}={found.environment[proxy]} would be asked for {host}. Our runs call it directly; a program "
        f"that calls jax.distributed.initialize itself is aborted after five minutes"
    )
    return Finding("warn", "proxy", said, f"export no_proxy=$no_proxy,{host}")


def check_clock(found: Surroundings) -> Finding | None:
    """Whether this node's clock agrees with rank 0's."""
    meeting = found.meeting
    if meeting is None or meeting.error:
        return None
    if abs(meeting.ahead) - meeting.ahead_error <= SKEW_SECONDS:
        most = abs(meeting.ahead) + meeting.ahead_error
        return Finding("ok", "clock", f"within {most:.3f} s of rank 0's")
    said = f"rank 0's is {meeting.ahead:+.1f} s from this one: logs and times of files are out of order"
    return Finding(
        "warn", "clock", said, "chronyc tracking, or timedatectl: is this node's time synchronised?"
    )


def _nodes(found: Surroundings) -> int:
    if found.meeting is not None and found.meeting.hosts:
        return len(set(found.meeting.hosts))
    return 1 if found.step is None else len(found.step.tasks_per_node)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
