"""Compiled programs that the tests keep, for processes that they start, and what JAX lowers programs in."""

import threading
from collections.abc import Mapping
from typing import Any

import jax
from jax._src.interpreters import mlir

FAST_COMPILING = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""XLA_FLAGS with which programs compile in less time: not optimized, and each in one part."""

if jax.__version_info__ < (0, 11):  # unknown to later ones, which would end the process without a word
    FAST_COMPILING += " --xla_cpu_use_fusion_emitters=false"


def with_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process, with which JAX takes programs from there (tests/conftest.py)."""
    return {
        **environment,
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }


LOWERED_IN_ONE = 20
"""Programs that a thread lowers in one of MLIR's contexts, which grow; each takes 4 ms of CPU to make."""


def share_contexts() -> None:
    """Have each thread lower several programs in one context, as JAX does itself from 0.12 on."""
    if jax.__version_info__ >= (0, 12):
        return
    make, own = mlir.make_ir_context, threading.local()

    def shared() -> Any:
        if (count := getattr(own, "count", 0)) % LOWERED_IN_ONE == 0:
            own.context = make()
        own.count = count + 1
        return own.context

    mlir.make_ir_context = shared
