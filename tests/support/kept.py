"""Compiled programs that the tests keep, for processes that they start."""

import jax


def with_cache(environment):
    """Variables of a process, with which JAX takes programs from there (tests/conftest.py)."""
    return {
        **environment,
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
