"""Compiled programs kept in files, so that the next start of a run compiles nothing.

JAX's own compilation cache is written by process 0 only. Here every process stores its own programs. What is
in JAX's cache, if that is on, is not stored here: on CPU a program that is serialised a second time loads but
cannot be run ("Function wrapped_multiply not found", jax 0.10.2 and 0.12.0).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from rrfp_jax.runtime._jax import calls_python
from rrfp_jax.runtime.programs.sealed_files import NotSealed, SealedFiles

COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

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

ENDING = ".executable"

KEPT_DAYS = 30
"""A file that nobody has used for so long is removed."""


class _CacheHits(threading.local):
    """How many programs JAX has taken from its own cache on this thread."""

    count = 0

    def __call__(self, event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.count += 1


_cache_hits = _CacheHits()
# Once and for ever: JAX passes over a listener if another one is taken away at the same time.
jax.monitoring.register_event_listener(_cache_hits)


class Executables:
    """Compiled programs, each made once, and kept in a folder that several processes may use at once.

    Loading a file can run code that is in it. So nothing of a file is looked at unless this user alone can
    have written it; see `SealedFiles`.

    Args:
        folder: made when it is needed; None to keep nothing.
        environment: variables of this process.
        say: what to do with a line about a file that cannot be used. For each reason there is one.

    Attributes:
        compiles: how many programs have been compiled.
        loads: how many have been loaded instead.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        environment: Mapping[str, str] = os.environ,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self._environment, self._say = environment, say
        self._files = None if folder is None else SealedFiles(Path(folder), environment)
        self._writable = True
        self._lock = threading.Lock()
        self._made: dict[str, Future[jax.stages.Compiled]] = {}
        self._reasons: set[str] = set()  # that have been said
        self.compiles = self.loads = 0

    def compiled(self, lowered: jax.stages.Lowered, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
        """A program for these devices: the same as before, or from its file if that is sound, else compiled.

        It must have been lowered by `jax.jit(..., keep_unused=True)`: which arguments another leaves out
        cannot be told from its text, nor from anything else that is public. One that calls Python functions
        is compiled for itself: which ones they are cannot be told either.
        """
        if calls_python(lowered):
            with self._lock:
                self.compiles += 1
            return _compile(lowered, devices)
        key = self._key(lowered, devices)
        with self._lock:
            first = key not in self._made
            made = self._made.setdefault(key, Future())
        if first:
            try:
                made.set_result(self._obtain(key, lowered, devices))
            except BaseException as error:
                with self._lock:  # whoever asks next may have more luck
                    del self._made[key]
                made.set_exception(error)
        return made.result()

    def remove_unused(self) -> None:
        """Remove the files that have not been used for `KEPT_DAYS`, as far as that is allowed."""
        if self._files is not None:
            self._files.remove_unused(ENDING, time.time() - KEPT_DAYS * 24 * 3600)

    def _obtain(
        self, key: str, lowered: jax.stages.Lowered, devices: Sequence[jax.Device]
    ) -> jax.stages.Compiled:
        found = self._files and self._load(self._files, key, devices)
        if found:
            with self._lock:
                self.loads += 1
            return found
        before = _cache_hits.count
        found = _compile(lowered, devices)
        with self._lock:
            self.compiles += 1
        if self._files is not None and self._writable and not _kept_by_jax(_cache_hits.count > before):
            self._store(self._files, key, found)
        return found

    def _key(self, lowered: jax.stages.Lowered, devices: Sequence[jax.Device]) -> str:
        """A hash of all that the compiled program depends on; its devices are part of what is stored."""
        device = devices[0]
        parts = [
            lowered.as_text(),
            lowered.in_tree,
            lowered.out_tree,
            jax.__version__,
            version("jaxlib"),
            device.client.platform_version,
            device.platform,
            device.device_kind,
            *(device.id for device in devices),
            _processor() if device.platform == "cpu" else "",
            *(self._environment.get(name) for name in COMPILER_VARIABLES),
            *(jax.config.values.get(name) for name in COMPILER_SETTINGS),
        ]
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()

    def _load(
        self, files: SealedFiles, key: str, devices: Sequence[jax.Device]
    ) -> jax.stages.Compiled | None:
        """A program from its file; the only place where anything that was read is unpickled."""
        name = key + ENDING
        try:
            sealed = files.read(name)
            if sealed is None:
                return None
            load = serialize_executable.deserialize_and_load
            serialized, inputs, outputs = pickle.loads(sealed)
            return load(serialized, inputs, outputs, execution_devices=devices)  # type: ignore[no-any-return]
        except Exception as error:
            self._complain(files.folder / name, "not used, the program is compiled anew", error)
            return None

    def _store(self, files: SealedFiles, key: str, compiled: jax.stages.Compiled) -> None:
        """Write a program's file, whole or not at all."""
        name = key + ENDING
        try:
            files.write(name, pickle.dumps(serialize_executable.serialize(compiled)))
        except Exception as error:
            self._writable = self._writable and not isinstance(error, (OSError, NotSealed))
            self._complain(files.folder / name, "not stored", error)

    def _complain(self, file: Path, what: str, error: Exception) -> None:
        """Say what becomes of a file and why, unless that was said of another file."""
        reason = _first_line(error)
        with self._lock:
            known = reason in self._reasons
            self._reasons.add(reason)
        if not known:
            self._say(f"{file} is {what}: {reason}")


def _compile(lowered: jax.stages.Lowered, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """Compiled here alone: processes that share a program must not wait for one that has loaded it instead.

    Untried on GPUs, where XLA would tune a shared program together (`xla_gpu_shard_autotuning`).
    """
    shared = len({device.process_index for device in devices}) > 1
    if shared and devices[0].platform == "gpu":
        return lowered.compile({"xla_gpu_shard_autotuning": False})
    return lowered.compile()


def _kept_by_jax(hit: bool) -> bool:
    """Whether JAX has read a program from its own cache, or may have written it there, as process 0 does."""
    used = jax.config.values.get("jax_compilation_cache_dir") is not None
    return used and (hit or jax.process_index() == 0)


def _first_line(error: Exception) -> str:
    if isinstance(error, NotSealed):
        return str(error)
    text = str(error.strerror or error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]


def _processor() -> str:
    """The instructions that this machine's processor has, as far as the system tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return ""
