"""Compiled programs that the tests keep, for processes that they start."""

from collections.abc import Mapping

import jax

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
