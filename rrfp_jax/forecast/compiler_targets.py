"""What XLA's compiler must know of a GPU to compile for one that is not there.

On a machine with the GPU its driver says so. Here it is a text in the format of XLA's `GpuTargetConfigProto`,
made of few numbers. Sources: per architecture the table "Technical Specifications per Compute Capability" of
NVIDIA's CUDA C++ Programming Guide; per card its data sheet and white paper, and where those round (memory,
clock) what the driver says, as XLA's repository has collected it (xla/backends/gpu/target_config/specs). For
an L40S XLA has no such file: its numbers are those of the data sheet and the white paper of its chip, AD102.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.accelerators import Accelerator

CUDNN = 9, 10
"""The cuDNN that programs are made for: the oldest that jax 0.10 to 0.12 take."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
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


AMPERE = Architecture(
    capability=(8, 0), threads=2048, shared_bytes=167936, shared_bytes_of_block=166912, fpus=64
)
ADA = Architecture(
    capability=(8, 9), threads=1536, shared_bytes=102400, shared_bytes_of_block=101376, fpus=128
)
HOPPER = Architecture(
    capability=(9, 0), threads=2048, shared_bytes=233472, shared_bytes_of_block=232448, fpus=128, special=True
)
BLACKWELL = Architecture(
    capability=(10, 0),
    threads=2048,
    shared_bytes=233472,
    shared_bytes_of_block=232448,
    fpus=128,
    special=True,
)


@dataclass(frozen=True, kw_only=True)
class Target:
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

    def text(self, kind: str) -> str:
        """For XLA; `kind` is what JAX calls the card."""
        of, (major, minor) = self.architecture, self.architecture.capability
        special = "ACCELERATED_FEATURES" if of.special else "NONE"
        known = {
            **{"threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152},
            **{"shared_memory_per_core": of.shared_bytes, "threads_per_core_limit": of.threads},
            **{"core_count": self.cores, "fpus_per_core": of.fpus, "l2_cache_size": self.l2_bytes},
            **{"block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535},
            **{"thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024, "thread_dim_limit_z": 64},
            **{"memory_bandwidth": self.bytes_per_second, "clock_rate_ghz": self.clock_ghz},
            **{"device_memory_size": self.memory, "shared_memory_per_block_optin": of.shared_bytes_of_block},
            **{"registers_per_core_limit": 65536, "registers_per_block_limit": 65536},
        }
        return "\n".join(
            [
                "gpu_device_info {",
                *(f"  {name}: {value}" for name, value in known.items()),
                f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {special} }}",
                "}",
                'platform_name: "CUDA"',
                f"dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}",
                f'device_description_str: "{kind}"',
            ]
        )


TARGETS: Mapping[str, Target] = {
    "a100-40": Target(
        architecture=AMPERE,
        cores=108,
        clock_ghz=1.41,
        l2_bytes=40 * 2**20,
        bytes_per_second=1_555_200_000_000,
        memory=42_331_013_120,
    ),
    "a100-80": Target(
        architecture=AMPERE,
        cores=108,
        clock_ghz=1.41,
        l2_bytes=40 * 2**20,
        bytes_per_second=2_039_040_000_000,
        memory=85_100_068_864,
    ),
    "h100": Target(
        architecture=HOPPER,
        cores=132,
        clock_ghz=1.98,
        l2_bytes=50 * 2**20,
        bytes_per_second=3_352_320_000_000,
        memory=84_942_979_072,
    ),
    "h100-pcie": Target(
        architecture=HOPPER,
        cores=114,
        clock_ghz=1.755,
        l2_bytes=50 * 2**20,
        bytes_per_second=2_039_040_000_000,
        memory=84_942_979_072,
    ),
    "h200": Target(
        architecture=HOPPER,
        cores=132,
        clock_ghz=1.98,
        l2_bytes=50 * 2**20,
        bytes_per_second=4_800_000_000_000,
        memory=151_397_597_184,
    ),
    "b200": Target(
        architecture=BLACKWELL,
        cores=148,
        clock_ghz=1.965,
        l2_bytes=132_644_864,
        bytes_per_second=7_672_320_000_000,
        memory=191_514_411_008,
    ),
    "l40s": Target(
        architecture=ADA,
        cores=142,
        clock_ghz=2.52,
        l2_bytes=96 * 2**20,
        bytes_per_second=864_000_000_000,
        memory=48_000_000_000,
    ),
}
"""By the name of the card in `ACCELERATORS`."""


def target_text(accelerator: Accelerator) -> str:
    """What XLA must know of a card, as text.

    Raises:
        UsageError: it is no GPU.
    """
    target = TARGETS.get(accelerator.name)
    if target is None:
        raise UsageError(
            f"--card={accelerator.name}: nothing is known for compiling; choose one of {', '.join(TARGETS)}"
        )
    return target.text(accelerator.kinds[0])
