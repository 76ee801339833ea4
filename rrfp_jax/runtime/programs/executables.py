"""Compiled programs: equal ones are compiled once, and kept in files, so the next start compiles nothing.

Programs that are equal but for their devices are of one kind: those of equal layers on several stages, or of
replicas. The first one is compiled, and the others are loaded from what it is when serialised.

JAX's own compilation cache is written by process 0 only. Here every process stores its own programs. What is
in JAX's cache, if that is on, is not stored here: on CPU a program that is serialised a second time loads but
cannot be run ("Function wrapped_multiply not found", jax 0.10.2 and 0.12.0).
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax

from rrfp_jax.printing import warn
from rrfp_jax.runtime.programs.request import Request
from rrfp_jax.runtime.programs.sealed_files import NotSealed, SealedFiles
from rrfp_jax.runtime.programs.serialized import Serialized, ids_of

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
    """Compiled programs, one of a kind, and kept in a folder that several processes may use at once.

    Loading a file can run code that is in it. So nothing of a file is looked at unless this user alone can
    have written it; see `SealedFiles`.

    Args:
        folder: made when it is needed; None to keep nothing.
        environment: variables of this process.
        say: what to do with a line about what cannot be used. For each reason there is one.
        here: whether programs can be loaded on their devices; those for absent devices are only stored.

    Attributes:
        compiles: how many programs have been compiled.
        loads: how many have been loaded instead, from a file or from an equal program.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        environment: Mapping[str, str] = os.environ,
        say: Callable[[str], None] = warn,
        here: bool = True,
    ) -> None:
        self._environment, self._say, self._here = environment, say, here
        self._files = None if folder is None else SealedFiles(Path(folder), environment)
        self._writable = True
        self._lock = threading.Lock()
        self._processors = threading.Semaphore(os.cpu_count() or 1)
        self._made: dict[Hashable, Future[jax.stages.Compiled]] = {}  # by kind and devices
        self._firsts: dict[Hashable, Future[Callable[[], Serialized] | None]] = {}  # by kind
        self._reasons: set[str] = set()  # that have been said
        self.compiles = self.loads = 0

    def compiled(
        self, lowered: jax.stages.Lowered, devices: Sequence[jax.Device], roughly: bool = False
    ) -> jax.stages.Compiled:
        """A program for these devices: the same as before, from its file, from an equal one, or compiled.

        It must have been lowered by `jax.jit(..., keep_unused=True)`: which arguments another leaves out
        cannot be told from its text, nor from anything else that is public. One that calls Python functions
        is compiled for itself: which ones they are cannot be told either.

        Args:
            lowered: the program.
            devices: in the order of its mesh.
            roughly: see `Request`.
        """
        request = Request(lowered, devices, roughly)
        if request.calls_python:
            return self._compile(request)[0]
        kind = request.kind(self._environment)
        # One for absent devices stands for those of all others: nothing of it is run, and see `results`.
        where = ids_of(devices) if self._here else ()
        return self._once(self._made, (kind, where), lambda: self._obtain(kind, request))  # type: ignore[no-any-return]

    def remove_unused(self) -> None:
        """Remove the files that have not been used for `KEPT_DAYS`, as far as that is allowed."""
        if self._files is not None:
            self._files.remove_unused(ENDING, time.time() - KEPT_DAYS * 24 * 3600)

    def _once(self, made: dict[Hashable, Future[Any]], key: Hashable, make: Callable[[], Any]) -> Any:
        """What is there by a key, made by whoever asks first; the others wait for it."""
        with self._lock:
            first = key not in made
            future = made.setdefault(key, Future())
        if first:
            try:
                future.set_result(make())
            except BaseException as error:
                with self._lock:  # whoever asks next may have more luck
                    del made[key]
                future.set_exception(error)
        return future.result()

    def _obtain(self, kind: str, request: Request) -> jax.stages.Compiled:
        own: list[jax.stages.Compiled] = []  # if this is the first of its kind

        def first() -> Callable[[], Serialized] | None:
            found, serialize = self._first(kind, request)
            own.append(found)
            return serialize

        serialize = self._once(self._firsts, kind, first)
        if own:
            return own[0]
        devices = request.devices
        found = self._load(self._files, kind, devices) or (serialize and self._equal(serialize, devices))
        return found or self._compile(request)[0]

    def _first(
        self, kind: str, request: Request
    ) -> tuple[jax.stages.Compiled, Callable[[], Serialized] | None]:
        """A program from its file or the compiler; and what serialises it for others, if that can be."""
        if stored := self._load(self._files, kind, request.devices):
            return stored, None  # the others have the file, too
        found, by_jax = self._compile(request)
        serialize = partial(Serialized.of, found, request.devices)
        cached = jax.config.values.get("jax_compilation_cache_dir") is not None
        if (
            self._files is not None
            and self._writable
            and not (cached and (by_jax or jax.process_index() == 0))
        ):
            self._store(self._files, kind, serialize)
        # JAX may have read it for another Trainer of this process, which it does not tell.
        return found, None if cached or not self._here else serialize

    def _compile(self, request: Request) -> tuple[jax.stages.Compiled, bool]:
        """From the compiler, for as many threads at once as there are processors; whether JAX had it."""
        with self._processors:
            before = _cache_hits.count
            found = request.compile()
        with self._lock:
            self.compiles += 1
        return found, _cache_hits.count > before

    def _load(
        self, files: SealedFiles | None, kind: str, devices: Sequence[jax.Device]
    ) -> jax.stages.Compiled | None:
        """A program from its file; the only place where anything that was read is unpickled."""
        if files is None or not self._here:
            return None
        name = kind + ENDING
        try:
            sealed = files.read(name)
            if sealed is None:
                return None
            content, made_for = pickle.loads(sealed)
            return self._loaded(Serialized(content, made_for), devices)
        except Exception as error:
            self._complain(f"{files.folder / name} is not used, the program is compiled anew", error)
            return None

    def _equal(
        self, serialize: Callable[[], Serialized], devices: Sequence[jax.Device]
    ) -> jax.stages.Compiled | None:
        """The first of a kind as a program for these devices; None, which is said, if JAX cannot do that."""
        try:
            return self._loaded(serialize(), devices)
        except Exception as error:
            self._complain("a program is not taken over from another device, it is compiled anew", error)
            return None

    def _loaded(self, serialized: Serialized, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
        found = serialized.loaded(devices)
        with self._lock:
            self.loads += 1
        return found

    def _store(self, files: SealedFiles, kind: str, serialize: Callable[[], Serialized]) -> None:
        """Write a program's file, whole or not at all."""
        name = kind + ENDING
        try:
            serialized = serialize()
            files.write(name, pickle.dumps((serialized.content, serialized.made_for)))
        except Exception as error:
            self._writable = self._writable and not isinstance(error, (OSError, NotSealed))
            self._complain(f"{files.folder / name} is not stored", error)

    def _complain(self, what: str, error: Exception) -> None:
        """Say what cannot be done and why, unless that was said before."""
        reason = _first_line(error)
        with self._lock:
            known = reason in self._reasons
            self._reasons.add(reason)
        if not known:
            self._say(f"{what}: {reason}")


def _first_line(error: Exception) -> str:
    if isinstance(error, NotSealed):
        return str(error)
    text = str(error.strerror or error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]
