"""Host names and addresses that do not work, and devices that are not there."""

from __future__ import annotations

from tests.verification.environments.cases_joining import BY_HAND
from tests.verification.environments.living import ALONE, STEPS, case

NAMED = "unshare --uts bash -c 'hostname {name}; $LAUNCH'"
APART = "unshare --net bash -c '{first}; $LAUNCH'"

PORTS = "ip link set lo up; echo {range} > /proc/sys/net/ipv4/ip_local_port_range"
NETWORK = ("unshare", "ip")

CASES = [
    case(
        "names: loopback is down",
        APART.format(first="true"),
        status=2,
        headline="the coordinator .*: no network of this machine leads .*; bring loopback up",
        tracebacks=2,
        needs=NETWORK,
    ),
    *[
        case(
            f"names: {count} ports are free",
            APART.format(first=PORTS.format(range=f"40000 {39999 + count}")),
            status=(1, 2),
            says=["^rrfp launch: .*no port is free: end what holds them"],
            silent=["RRFP_BIND"],
            tracebacks=4,
            needs=NETWORK,
        )
        for count in (1, 3, 4)
    ],
    case(
        "names: a platform that is not there",
        env={"JAX_PLATFORMS": "cuda"},
        status=2,
        headline="all ranks: JAX_PLATFORMS=cuda: JAX finds no such device here",
        tracebacks=2,
    ),
    case(
        "names: a platform that nobody knows, one process",
        ALONE,
        env={"JAX_PLATFORMS": "gpuu"},
        status=2,
        headline="rrfp train: JAX_PLATFORMS=gpuu: JAX finds no such device here .*known backends",
    ),
    case(
        "names: this machine's own has no address",
        NAMED.format(name="nowhere-at-all"),
        steps=STEPS,
        needs=["unshare"],
    ),
    case(
        "names: this machine's own has an address of no interface",
        NAMED.format(name="203.0.113.7"),
        steps=STEPS,
        needs=["unshare"],
    ),
    case(
        "names: the coordinator's has no address",
        BY_HAND.format(one="$TRAIN").replace("127.0.0.1", "nowhere-at-all.invalid"),
        status=2,
        says=["nowhere-at-all.invalid"],
        tracebacks=2,
    ),
]
