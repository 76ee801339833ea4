"""A program that is wanted, what it depends on, and how it is compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from rrfp_jax.runtime._jax import calls_python

COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

GPU_COMPILERS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt", "jax-rocm7-pjrt")
"""Packages of which one is the compiler for GPUs."""

COMPILER_SETTINGS = (
    "jax_compiler_enable_remat_pass",
    "jax_disable_most_optimizations",
    "jax_enable_pgle",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_xla_profile_version",
)
"""Those that tell the compiler something; all others show in the program's text."""

ROUGHLY = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Options by which XLA compiles for CPUs in a fifth of the time. What it makes takes 2 to 5 times as long.

Without them most of the time goes into loops: each has an MLIR context of its own, and LLVM optimizes it.
"""

ROUGHLY_LATER: dict[str, Any] = {"xla_backend_optimization_level": 0}
"""The same for compilers that have no emitters to be left out, such as that of jaxlib 0.12."""


@dataclass(frozen=True)
class Request:
    """A program for some devices.

    Attributes:
        lowered: the program.
        devices: in the order of its mesh.
        roughly: for a program that runs once, where compiling takes longer: on CPUs without optimizations.
    """

    lowered: jax.stages.Lowered
    devices: Sequence[jax.Device]
    roughly: bool = False

    @property
    def calls_python(self) -> bool:
        """Whether there is more to it than its text tells."""
        return calls_python(self.lowered)

    def kind(self, environment: Mapping[str, str]) -> str:
        """A hash of all that the compiled program depends on, but of which devices it is for.

        Where other processes have some of its devices, these belong to it: it is used on no others.
        """
        device = self.devices[0]
        of_one_process = len({other.process_index for other in self.devices}) == 1
        parts = [
            self.lowered.as_text(),
            self.lowered.in_tree,
            self.lowered.out_tree,
            self._options,
            jax.__version__,
            version("jaxlib"),
            compiler_of(device),
            device.platform,
            device.device_kind,
            len(self.devices),
            *([] if of_one_process else [other.id for other in self.devices]),
            _processor() if device.platform == "cpu" else "",
            *(flags_for(device.platform, environment.get(name)) for name in COMPILER_VARIABLES),
            *(jax.config.values.get(name) for name in COMPILER_SETTINGS),
        ]
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()

    def compile(self) -> jax.stages.Compiled:
        """Compiled by this process alone: others that share the program must not wait for one that loads it.

        Untried on GPUs, where XLA would tune a shared program together (`xla_gpu_shard_autotuning`).
        """
        try:
            return self.lowered.compile(self._options)
        except jax.errors.JaxRuntimeError as error:
            if not self.roughly or "No such compile option" not in str(error):
                raise
            return self.lowered.compile(ROUGHLY_LATER)

    @property
    def _options(self) -> dict[str, Any]:
        platform = self.devices[0].platform
        shared = len({device.process_index for device in self.devices}) > 1
        if shared and platform == "gpu":
            return {"xla_gpu_shard_autotuning": False}
        return ROUGHLY if self.roughly and platform == "cpu" else {}


def compiler_of(device: jax.Device) -> str:
    """The compiler's version; of GPUs its package's, since the client of an absent one does not tell."""
    if device.platform == "gpu":
        found = []
        for name in GPU_COMPILERS:
            with suppress(PackageNotFoundError):
                found.append(f"{name} {version(name)}")
        if found:
            return ", ".join(found)
    return str(device.client.platform_version)


def flags_for(platform: str, value: str | None) -> str | None:
    """A variable's flags, without those for CPUs where the program is for something else."""
    if platform == "cpu" or value is None:
        return value
    return " ".join(flag for flag in value.split() if not flag.startswith("--xla_cpu_")) or None


@cache
def _processor() -> str:
    """The instructions that this machine's processor has, as far as the system tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return ""
