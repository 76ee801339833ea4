"""What accelerators and links can do at most, from their makers' data sheets, for predicting durations.

A program takes the time of its arithmetic at the accelerator's peak rate plus that of its memory traffic at
the accelerator's bandwidth: its operations run one after the other, and most of them are bound by one of the
two. No accelerator reaches its peaks; `efficiency` says which share of both is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

HALF = frozenset(["bfloat16", "float16"])


@dataclass(frozen=True, kw_only=True)
class Link:
    """What carries messages from one stage to the next.

    Attributes:
        bytes_per_second: in one direction.
        latency: seconds that even an empty message takes.
    """

    bytes_per_second: float
    latency: float

    def seconds(self, size: float) -> float:
        """How long a message of so many bytes takes."""
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device.

    Attributes:
        half, single: operations per second of matrix products of bfloat16 and float16, and of float32 (as
            JAX has them computed by default: in TF32), accumulated in float32, without sparsity.
        bytes_per_second: of its memory.
        memory: bytes; None if there is no limit that JAX keeps.
        link: the name in `LINKS` of what usually connects it.
        kinds: JAX's names for it (`device_kind`).
        source: of these numbers.
        together: how many such devices can compute at the same time, if they are cores of one machine.
    """

    name: str
    half: float
    single: float
    bytes_per_second: float
    memory: int | None
    link: str
    source: str
    kinds: tuple[str, ...] = ()
    together: int | None = None

    def seconds(self, flops: Mapping[str, float], size: float) -> float:
        """How long a program takes with so many operations, by the dtype of its products, and bytes moved."""
        arithmetic = sum(n / (self.half if dtype in HALF else self.single) for dtype, n in flops.items())
        return arithmetic + size / self.bytes_per_second

    def at(self, efficiency: float) -> Accelerator:
        """The same accelerator reaching this share of its peak rates."""
        rates = {name: efficiency * getattr(self, name) for name in ("half", "single", "bytes_per_second")}
        return replace(self, **rates)


def _sheet(
    name: str, tera: tuple[float, float], giga: float, memory: int, link: str, *kinds: str
) -> Accelerator:
    """Of TFLOP/s in half and single, GB/s, GB."""
    return Accelerator(
        name=name,
        half=tera[0] * 1e12,
        single=tera[1] * 1e12,
        bytes_per_second=giga * 1e9,
        memory=memory * 10**9,
        link=link,
        kinds=kinds,
        source="NVIDIA's data sheet",
    )


CPU = Accelerator(
    name="cpu",
    half=90e9,
    single=90e9,
    bytes_per_second=6e9,
    memory=None,
    link="loopback",
    kinds=("cpu",),
    source="one core of the machine of benchmarks/results/benchmarks.md",
)

ACCELERATORS: Mapping[str, Accelerator] = {
    known.name: known
    for known in (
        _sheet("a100-40", (312, 156), 1555, 40, "nvlink3", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        _sheet("a100-80", (312, 156), 2039, 80, "nvlink3", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        _sheet("h100", (989, 494), 3350, 80, "nvlink4", "NVIDIA H100 80GB HBM3"),
        _sheet("h100-pcie", (756, 378), 2000, 80, "pcie5", "NVIDIA H100 PCIe"),
        _sheet("h200", (989, 494), 4800, 141, "nvlink4", "NVIDIA H200"),
        _sheet("b200", (2250, 1125), 8000, 180, "nvlink5", "NVIDIA B200"),
        _sheet("l40s", (362, 183), 864, 48, "pcie4", "NVIDIA L40S"),
        CPU,
    )
}

LINKS: Mapping[str, Link] = {
    "nvlink3": Link(bytes_per_second=300e9, latency=10e-6),
    "nvlink4": Link(bytes_per_second=450e9, latency=10e-6),
    "nvlink5": Link(bytes_per_second=900e9, latency=10e-6),
    "pcie4": Link(bytes_per_second=32e9, latency=10e-6),
    "pcie5": Link(bytes_per_second=64e9, latency=10e-6),
    "hdr": Link(bytes_per_second=25e9, latency=10e-6),
    "ndr": Link(bytes_per_second=50e9, latency=10e-6),
    "ethernet100": Link(bytes_per_second=12.5e9, latency=50e-6),
    "loopback": Link(bytes_per_second=1.5e9, latency=370e-6),
}
"""Rates in one direction are the standards'; latencies are assumed, but that of loopback, which is what a hop
between two processes of a machine with 2 cores takes in a running pipeline."""


def accelerator_of_kind(kind: str) -> Accelerator | None:
    """The accelerator that JAX calls by this `device_kind`; None if it is not in the table."""
    return next((known for known in ACCELERATORS.values() if kind in known.kinds), None)
