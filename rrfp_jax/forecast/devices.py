"""What accelerators and links can do at most, from their makers' data sheets, and what XLA must know of them.

A program takes the time of its arithmetic at the accelerator's peak rate plus that of its memory traffic at
the accelerator's bandwidth: its operations run one after the other, and most of them are bound by one of the
two. No accelerator reaches its peaks; `efficiency` says which share of both is assumed.

To compile for a GPU that is not there XLA needs a text in the format of its `GpuTargetConfigProto`, made of
few numbers. Sources: per architecture the table "Technical Specifications per Compute Capability" of
NVIDIA's CUDA C++ Programming Guide; per card its data sheet and white paper, and where those round (memory,
clock) what the driver says, as XLA's repository has collected it (xla/backends/gpu/target_config/specs). For
an L40S XLA has no such file: its numbers are those of the data sheet and the white paper of its chip, AD102.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

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


def _sheet(name: str, tera: tuple[float, float], giga: float, gb: int, link: str, *kinds: str) -> Accelerator:
    """Of TFLOP/s in half and single, GB/s, GB."""
    return Accelerator(
        name=name,
        half=tera[0] * 1e12,
        single=tera[1] * 1e12,
        bytes_per_second=giga * 1e9,
        memory=gb * 10**9,
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

MEASURED = "measured"
"""In the place of a card's name: this machine's device."""

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


CUDNN = 9, 10
"""The cuDNN that programs are made for: the oldest that jax 0.10 to 0.12 take."""


class Architecture(NamedTuple):
    """What all cards of a compute capability have in common.

    Attributes:
        capability: major and minor.
        threads: at most on one core.
        shared_bytes, shared_bytes_of_block: shared memory of a core, and of it for one block at most.
        fpus: float32 units of a core.
        special: whether instructions of this capability alone may be used (sm_90a, sm_100a).
    """

    capability: tuple[int, int]
    threads: int
    shared_bytes: int
    shared_bytes_of_block: int
    fpus: int
    special: bool = False


AMPERE = Architecture((8, 0), 2048, 167936, 166912, 64)
ADA = Architecture((8, 9), 1536, 102400, 101376, 128)
HOPPER = Architecture((9, 0), 2048, 233472, 232448, 128, special=True)
BLACKWELL = Architecture((10, 0), 2048, 233472, 232448, 128, special=True)


class Target(NamedTuple):
    """One card.

    Attributes:
        cores: streaming multiprocessors.
        clock_ghz: the highest.
        l2_bytes: of the second-level cache.
        bytes_per_second: of its memory.
        memory: bytes that the driver says it has.
    """

    architecture: Architecture
    cores: int
    clock_ghz: float
    l2_bytes: int
    bytes_per_second: int
    memory: int


TARGETS: Mapping[str, Target] = {
    "a100-40": Target(AMPERE, 108, 1.41, 40 * 2**20, 1_555_200_000_000, 42_331_013_120),
    "a100-80": Target(AMPERE, 108, 1.41, 40 * 2**20, 2_039_040_000_000, 85_100_068_864),
    "h100": Target(HOPPER, 132, 1.98, 50 * 2**20, 3_352_320_000_000, 84_942_979_072),
    "h100-pcie": Target(HOPPER, 114, 1.755, 50 * 2**20, 2_039_040_000_000, 84_942_979_072),
    "h200": Target(HOPPER, 132, 1.98, 50 * 2**20, 4_800_000_000_000, 151_397_597_184),
    "b200": Target(BLACKWELL, 148, 1.965, 132_644_864, 7_672_320_000_000, 191_514_411_008),
    "l40s": Target(ADA, 142, 2.52, 96 * 2**20, 864_000_000_000, 48_000_000_000),
}
"""By the name of the card in `ACCELERATORS`."""


def target_text(accelerator: Accelerator) -> str:
    """What XLA must know of a card, as text."""
    own, of = TARGETS[accelerator.name], TARGETS[accelerator.name].architecture
    major, minor = of.capability
    special = "ACCELERATED_FEATURES" if of.special else "NONE"
    known = {
        **{"threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152},
        **{"shared_memory_per_core": of.shared_bytes, "threads_per_core_limit": of.threads},
        **{"core_count": own.cores, "fpus_per_core": of.fpus, "l2_cache_size": own.l2_bytes},
        **{"block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535},
        **{"thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024, "thread_dim_limit_z": 64},
        **{"memory_bandwidth": own.bytes_per_second, "clock_rate_ghz": own.clock_ghz},
        **{"device_memory_size": own.memory, "shared_memory_per_block_optin": of.shared_bytes_of_block},
        **{"registers_per_core_limit": 65536, "registers_per_block_limit": 65536},
    }
    lines = "".join(f"  {name}: {value}\n" for name, value in known.items())
    return (
        f"gpu_device_info {{\n{lines}"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {special} }}\n"
        f'}}\nplatform_name: "CUDA"\n'
        f"dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}\n"
        f'device_description_str: "{accelerator.kinds[0]}"'
    )
