"""Compiled programs that the tests keep, for processes that they start, and what JAX lowers programs in.

Many Trainers of a test's process have equal programs: each is lowered and compiled for the first of them.
"""

import threading
from collections.abc import Mapping
from typing import Any

import jax
from jax._src.interpreters import mlir

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.runtime.programs.executables import COMPILER_VARIABLES, Executables, ids_of

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


_kinds: dict[Any, str | None] = {}
_programs: dict[Any, jax.stages.Compiled] = {}
_kind = threading.local()


def share_programs() -> None:
    """Have all `Executables` of this process share what JAX's cache would give them, as if it did.

    Not where that is off, nor for those with an environment of their own.
    """
    once, obtain, compile = Executables._once, Executables._obtain, Executables._compile

    def shares(own: Executables) -> bool:
        return own._environment is ENVIRONMENT and bool(jax.config.values["jax_compilation_cache_dir"])

    def flags() -> tuple[str | None, ...]:
        return tuple(ENVIRONMENT.get(name) for name in COMPILER_VARIABLES)

    def once_for_all(self: Executables, made: Any, key: Any, make: Any) -> Any:
        if made is not self._kinds or not shares(self):
            return once(self, made, key, make)
        if (key, flags()) not in _kinds:
            _kinds[key, flags()] = once(self, made, key, make)
        return _kinds[key, flags()]

    def obtained(self: Executables, kind: str, request: Any) -> jax.stages.Compiled:
        _kind.now = kind
        try:
            return obtain(self, kind, request)
        finally:
            _kind.now = None

    def compiled(self: Executables, request: Any) -> tuple[jax.stages.Compiled, bool]:
        key = getattr(_kind, "now", None), ids_of(request.devices)
        if key[0] is None or not shares(self):
            return compile(self, request)
        if key in _programs:
            with self._lock:
                self.compiles += 1
            return _programs[key], True
        found = compile(self, request)
        _programs[key] = found[0]
        return found

    Executables._once, Executables._obtain, Executables._compile = once_for_all, obtained, compiled  # type: ignore[method-assign]
