"""Compiled programs: equal ones are compiled once, and kept in files, so the next start compiles nothing.

Programs that are equal but for their devices are of one kind: those of equal layers on several stages, or of
replicas. The first one is compiled, and the others are loaded from it once it is serialised.

JAX's own compilation cache is written by process 0 only. Here every process stores its own programs. What is
in JAX's cache, if that is on, is not stored here: on CPU a program that is serialised a second time loads but
cannot be run ("Function wrapped_multiply not found", jax 0.10.2 and 0.12.0).

Loading a file can run code that is in it, and whoever may write into a folder can put a file there, or
exchange one between two looks at it. So the open file is asked, never its name: it and its folder must belong
to this user, and nobody else may write them. The file must begin with a seal: a hash of its name and its
content that takes a key which only this user can read. Nothing of the content is handed out before that.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import pickle
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
from jax.experimental import serialize_executable

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.fields import expanded
from rrfp_jax.files import OTHERS_READ, OTHERS_WRITE, open_own, require_own
from rrfp_jax.printing import warn
from rrfp_jax.runtime._jax import calls_python, load_for
from rrfp_jax.runtime.run.alike import found_versions

KEY_FILE = "RRFP_KEY_FILE"

KEY = SEAL = 32  # bytes

PART = ".part"
"""Ends the name of a file that is being written."""

ENDING = ".executable"

KEPT_DAYS = 30
"""A file that nobody has used for so long is removed."""


class SealedFiles:
    """Files that only this user can have written; PermissionError for what must not be read or written."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self._environment = folder, environment

    def read(self, name: str) -> bytes | None:
        """A file's content; None if there is none."""
        try:
            with self._opened() as folder, os.fdopen(open_own(name, OTHERS_WRITE, folder), "rb") as file:
                found = file.read()
                with suppress(OSError):  # on a file system that can only be read
                    os.utime(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return None
        seal, content = found[:SEAL], found[SEAL:]
        if not hmac.compare_digest(seal, self._seal(name, content)):
            raise PermissionError(errno.EPERM, "it is damaged, or not sealed with this user's key")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all."""
        seal = self._seal(name, content)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = f".{secrets.token_hex(8)}{PART}"
        with self._opened() as folder:
            try:
                made = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
                with os.fdopen(made, "wb") as out:
                    out.write(seal + content)
                os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(OSError):  # it is there no more, if all went well
                    os.unlink(part, dir_fd=folder)

    def remove_unused(self, ending: str, oldest: float) -> None:
        """Remove what has not been used or written since a time (s), as far as that is allowed."""
        with suppress(OSError, ValueError), self._opened() as folder:
            for name in os.listdir(folder):
                with suppress(OSError):  # several processes may do this at once
                    used = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
                    if name.endswith((ending, PART)) and used < oldest:
                        os.unlink(name, dir_fd=folder)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                require_own(folder, OTHERS_WRITE)
            except PermissionError as error:
                reason = f"its folder {self.folder} is not safe, {error.strerror}: chmod 700, or use another"
                raise PermissionError(errno.EPERM, reason) from None
            yield folder
        finally:
            os.close(folder)

    @cached_property
    def _key(self) -> bytes:  # two threads may both look: they find the same
        return user_key(self._environment)

    def _seal(self, name: str, content: bytes) -> bytes:
        return hmac.digest(self._key, len(name).to_bytes(4, "big") + name.encode() + content, "sha256")


def user_key(environment: Mapping[str, str]) -> bytes:
    """The user's key, in RRFP_KEY_FILE or the user's folder, made if missing; PermissionError if unsafe."""
    path = None
    try:
        given = environment.get(KEY_FILE)
        path = expanded(KEY_FILE, given) if given else Path.home() / ".rrfp" / "programs.key"
        with suppress(FileNotFoundError):
            return _read_key(path)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=PART, buffering=0) as out:  # mode 0600
            out.write(secrets.token_bytes(KEY))
            with suppress(FileExistsError):  # another process was faster, and a link replaces nothing
                os.link(out.name, path)
        return _read_key(path)
    except (OSError, RuntimeError, ValueError) as error:  # no home; a name with NUL
        why = error.strerror if isinstance(error, OSError) else str(error)
        reason = (
            f"the key that seals programs, {path or '~/.rrfp/programs.key'}: {why}; let {KEY_FILE} name a "
            f"file in a folder of your own, or remove a key that is not right"
        )
        raise PermissionError(errno.EPERM, reason) from None


def _read_key(path: Path) -> bytes:
    with os.fdopen(open_own(path, OTHERS_READ | OTHERS_WRITE), "rb") as file:
        key = file.read(KEY + 1)
    if len(key) != KEY:
        raise ValueError(f"it has not {KEY} bytes")
    return key


Serialized: TypeAlias = tuple[Any, tuple[int, ...]]
"""What JAX gives of a program, and ids of the devices that it was compiled for. Loading runs code in it."""


def ids_of(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """What tells devices apart in all processes of a run."""
    return tuple(device.id for device in devices)


def load(serialized: Serialized, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """A program, ready to run on these devices; they need not be those that it was compiled for."""
    content, made_for = serialized
    if made_for == ids_of(devices):
        load_here = serialize_executable.deserialize_and_load
        return load_here(*content, execution_devices=devices)  # type: ignore[no-any-return, misc]
    found = load_for(content, made_for, devices)
    runs_on = found.runtime_executable().local_devices()  # type: ignore[union-attr]
    if list(runs_on) != list(devices):
        raise RuntimeError(f"it would run on {runs_on}, not on {list(devices)}")
    return found


COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

GPU_COMPILERS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt", "jax-rocm7-pjrt")
"""Packages of which one is the compiler for GPUs."""

COMPILER_SETTINGS = (
    *("jax_compiler_enable_remat_pass", "jax_disable_most_optimizations", "jax_enable_pgle"),
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_effort", "jax_memory_fitting_level"),
    *("jax_optimization_level", "jax_xla_profile_version"),
)
"""JAX's settings that tell the compiler something; all others show in the program's text."""

Effort: TypeAlias = Literal["steps", "once", "roughly"]

LEVEL = "xla_backend_optimization_level"

CPU_OPTIONS: Mapping[Effort, Mapping[str, Any]] = {
    "steps": {},
    "once": {LEVEL: 1, "xla_cpu_use_fusion_emitters": False},
    "roughly": {LEVEL: 0, "xla_cpu_use_fusion_emitters": False},
}
"""How XLA compiles for CPUs what runs in every step, what runs once, and what may give other bits, too.

Without emitters, of which each loop has an MLIR context of its own, and at level 1 a program is compiled in
half the time and takes up to twice as long. At level 0 bits change, and it takes 2 to 5 times as long.
"""

ADDING = ("reduce", "dot", "convolution", "scatter", "select_and_scatter", "fft", "custom_call", "composite")
"""Beginnings of the StableHLO operations that may add values up, below XLA's own level in another order."""


@dataclass(frozen=True)
class Request:
    """A program for devices in the order of its mesh; `effort` says how it is compiled for CPUs."""

    program: jax.stages.Lowered | jax.stages.Traced
    devices: Sequence[jax.Device]
    effort: Effort = "steps"

    @cached_property
    def lowered(self) -> jax.stages.Lowered:
        """Lowered when that is asked for: few of those that are equal are."""
        return self.program.lower() if isinstance(self.program, jax.stages.Traced) else self.program

    def kind(self, environment: Mapping[str, str]) -> str | None:
        """A hash of all that the compiled program depends on, but of which devices it is for.

        None if it calls Python functions: which ones they are cannot be told. Where other processes have some
        of its devices, these belong to it: it is used on no others.
        """
        if calls_python(self.lowered):
            return None
        device = self.devices[0]
        program = self._text, self.lowered.in_tree, self.lowered.out_tree, self._options(environment)
        compiler = jax.__version__, version("jaxlib"), compiler_of(device)
        machine = device.platform, device.device_kind, len(self.devices)
        shared_by = ids_of(self.devices) if self._shared else ()
        processor = _processor() if device.platform == "cpu" else ""
        flags = [flags_for(device.platform, environment.get(name)) for name in COMPILER_VARIABLES]
        settings = [jax.config.values.get(name) for name in COMPILER_SETTINGS]
        parts = [*program, *compiler, *machine, *shared_by, processor, *flags, *settings]
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()

    def compile(self, environment: Mapping[str, str]) -> jax.stages.Compiled:
        """Compiled by this process alone, as others that share it may load it instead; untried on GPUs."""
        options = self._options(environment)
        try:
            return self.lowered.compile(options)
        except jax.errors.JaxRuntimeError as error:
            later = {name: value for name, value in options.items() if name == LEVEL}
            if later == options or "No such compile option" not in str(error):
                raise
            return self.lowered.compile(later)  # jaxlib 0.12 has no emitters to be left out

    @cached_property
    def _text(self) -> str:
        return self.lowered.as_text()

    @property
    def _shared(self) -> bool:
        return len({device.process_index for device in self.devices}) > 1

    def _options(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """Options that JAX does not have already, from a flag or setting of the user's."""
        platform = self.devices[0].platform
        if self._shared and platform == "gpu":
            return {"xla_gpu_shard_autotuning": False}
        if platform != "cpu" or jax.config.values.get("jax_disable_most_optimizations"):
            return {}
        given = environment.get("XLA_FLAGS", "")
        adds = self.effort == "once" and any(f"stablehlo.{name}" in self._text for name in ADDING)
        options = CPU_OPTIONS["steps" if adds else self.effort]
        return {name: value for name, value in options.items() if f"--{name}" not in given}


def compiler_of(device: jax.Device) -> str:
    """The compiler's version; of GPUs its package's, since the client of an absent one does not tell."""
    found = found_versions(GPU_COMPILERS if device.platform == "gpu" else ())
    told = ", ".join(f"{name} {number}" for name, number in found.items())
    return told or str(device.client.platform_version)


def flags_for(platform: str, value: str | None) -> str | None:
    """A variable's flags, without those for CPUs where the program is for something else."""
    if platform == "cpu" or value is None:
        return value
    return " ".join(flag for flag in value.split() if not flag.startswith("--xla_cpu_")) or None


@cache
def _processor() -> str:
    """The instructions that this machine's processor has, as far as the system tells."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


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

    `say` is told once of each reason for which something cannot be used. `here` says whether programs can be
    loaded on their devices; those for absent devices are only stored.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        environment: Mapping[str, str] = ENVIRONMENT,
        say: Callable[[str], None] = warn,
        here: bool = True,
    ) -> None:
        self._environment, self._say, self._here = environment, say, here
        self._files = None if folder is None else SealedFiles(Path(folder), environment)
        self._writable = True
        self._lock = threading.Lock()
        self._processors = threading.Semaphore(os.cpu_count() or 1)
        self._kinds: dict[Hashable, Future[str | None]] = {}  # by key
        self._made: dict[Hashable, Future[jax.stages.Compiled]] = {}  # by kind and devices
        self._firsts: dict[Hashable, Future[tuple[jax.stages.Compiled, Any, bool]]] = {}  # by kind
        self._reasons: set[str] = set()
        self.compiles = self.loads = 0  # what is loaded is from a file, or from an equal program

    def compiled(
        self,
        program: jax.stages.Lowered | jax.stages.Traced,
        devices: Sequence[jax.Device],
        effort: Effort = "steps",
        key: Hashable = None,
    ) -> jax.stages.Compiled:
        """A program for these devices: the same as before, from its file, from an equal one, or compiled.

        It must be of `jax.jit(..., keep_unused=True)`: which arguments another leaves out cannot be told from
        its text, nor from anything else that is public. One that calls Python functions is compiled for
        itself. `effort`: see `CPU_OPTIONS`. Of programs with equal keys, if any, one is lowered.
        """
        request = Request(program, devices, effort)
        find = partial(request.kind, self._environment)
        machine = effort, devices[0].platform, devices[0].device_kind
        kind = find() if key is None else self._once(self._kinds, (key, machine), find)
        if kind is None:
            return self._compile(request)[0]
        # One for absent devices stands for those of all others: nothing of it is run, and see `outputs`.
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
        devices = request.devices
        first, made_for, lends = self._once(self._firsts, kind, lambda: self._first(kind, request))
        if made_for == ids_of(devices):
            return first  # type: ignore[no-any-return]
        found = self._from_file(kind, devices)
        if found is None and lends:
            what = "a program is not taken over from another device, it is compiled anew"
            found = self._load(lambda: (serialize_executable.serialize(first), made_for), devices, what)
        return found or self._compile(request)[0]

    def _first(self, kind: str, request: Request) -> tuple[jax.stages.Compiled, tuple[int, ...], bool]:
        """A program from its file or the compiler, its devices, and whether others may be loaded from it."""
        ids = ids_of(request.devices)
        if stored := self._from_file(kind, request.devices):
            return stored, ids, False  # the others have the file, too
        found, by_jax = self._compile(request)
        cached = jax.config.values.get("jax_compilation_cache_dir") is not None
        if not (cached and (by_jax or jax.process_index() == 0)):
            self._store(kind, found, ids)
        # JAX may have read it for another Trainer of this process, which it does not tell.
        return found, ids, self._here and not cached

    def _compile(self, request: Request) -> tuple[jax.stages.Compiled, bool]:
        """From the compiler, for as many threads at once as there are processors; whether JAX had it."""
        with self._processors:
            before = _cache_hits.count
            found = request.compile(self._environment)
        with self._lock:
            self.compiles += 1
        return found, _cache_hits.count > before

    def _from_file(self, kind: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        if self._files is None or not self._here:
            return None
        what = f"{self._files.folder / kind}{ENDING} is not used, the program is compiled anew"
        return self._load(partial(_read, self._files, kind + ENDING), devices, what)

    def _load(
        self, source: Callable[[], Serialized | None], devices: Sequence[jax.Device], what: str
    ) -> jax.stages.Compiled | None:
        """A program that was serialised; None if there is none, or if loading fails, which `what` says."""
        try:
            serialized = source()
            found = None if serialized is None else load(serialized, devices)
        except Exception as error:
            self._complain(what, error)
            return None
        with self._lock:
            self.loads += found is not None
        return found

    def _store(self, kind: str, found: jax.stages.Compiled, made_for: tuple[int, ...]) -> None:
        if self._files is None or not self._writable:
            return
        try:
            self._files.write(kind + ENDING, pickle.dumps((serialize_executable.serialize(found), made_for)))
        except Exception as error:
            self._writable = self._writable and not isinstance(error, OSError)
            self._complain(f"{self._files.folder / kind}{ENDING} is not stored", error)

    def _complain(self, what: str, error: Exception) -> None:
        """Say what cannot be done and why, unless that was said before."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            text = str(error.strerror or error)
        reason = text.splitlines()[0]
        with self._lock:
            known = reason in self._reasons
            self._reasons.add(reason)
        if not known:
            self._say(f"{what}: {reason}")


def _read(files: SealedFiles, name: str) -> Serialized | None:
    """A program from its file; the only place where anything that was read is unpickled."""
    sealed = files.read(name)
    return None if sealed is None else pickle.loads(sealed)
