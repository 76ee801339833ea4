"""The files that a run keeps in `<directory>/<name>/`, and where it says that it comes from: code, versions,
config, command line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import subprocess
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias

import msgspec

from rrfp_jax import printing
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import counted
from rrfp_jax.files import MOVED_AWAY, is_used, move_away, named, written_whole
from rrfp_jax.json_files import Count, Unreadable, read_json, write_output
from rrfp_jax.name_lock import used_folder
from rrfp_jax.printing import Say
from rrfp_jax.report.store import LATEST, METRICS, StepFile, lines_as
from rrfp_jax.runs.config import RunConfig, as_json
from rrfp_jax.runtime.run.alike import found_versions
from rrfp_jax.runtime.run.world import World
from rrfp_jax.trace.records import RecordedStep
from rrfp_jax.typed import typed_command

MOST_WAITING = 2**26
"""Bytes of lines that are kept while they cannot be written."""

ORIGIN = "_origin"
"""Of `config.json`, beside the config's own fields: where the run comes from."""


class _Numbered(msgspec.Struct, frozen=True):
    """A line of `metrics.jsonl`, as far as it must be known, whichever version wrote it."""

    step: Count


class _Named(msgspec.Struct, frozen=True):
    """A run's `config.json`, as far as it must be known."""

    name: str


class KeptLines:
    """Lines that are added to a file. What a full disk does not take is kept, and added when it does.

    The file has whole lines only.
    """

    def __init__(self, path: Path, lines: Sequence[str]) -> None:
        with written_whole(path) as part:  # whoever is killed here leaves all lines, none that were cut short
            part.write_text("".join(lines), encoding="utf-8")
        self._path, self._waiting, self._bytes, self._dropped = path, deque[bytes](), 0, 0
        self._there, self._file = len(lines), self._opened()

    @property
    def missing(self) -> int:
        """How many lines the file lacks."""
        return len(self._waiting) + self._dropped

    def add(self, line: str) -> None:
        """Add a line, and those that wait."""
        self._waiting.append(line.encode())
        self._bytes += len(self._waiting[-1])
        while self._bytes > MOST_WAITING:
            self._bytes -= len(self._waiting.popleft())
            self._dropped += 1
        self.flush()

    def flush(self) -> None:
        """Add the lines that wait; raises as `add` does."""
        if not os.fstat(self._file).st_nlink:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            removed, self._file = self._file, self._opened(os.O_CREAT)
            self._dropped, self._there = self._dropped + self._there, 0
            os.close(removed)
            raise FileNotFoundError(errno.ENOENT, "somebody has removed it")
        while self._waiting:
            size, rest = os.fstat(self._file).st_size, self._waiting[0]
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            finally:
                if rest:
                    os.ftruncate(self._file, size)
            self._bytes -= len(self._waiting.popleft())
            self._there += 1

    def close(self) -> None:
        """Add no more."""
        os.close(self._file)

    def _opened(self, how: int = 0) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | how, 0o644)


def check_place(config: RunConfig) -> None:
    """Refuse a run that could not keep its files; nothing is compiled yet."""
    folder = Path(config.directory) / config.name
    parent = folder.parent
    while not os.path.exists(parent):  # also none that this user may not look into
        parent = parent.parent
    saved = [folder.with_name(f"{folder.name}.checkpoints")] if config.checkpoint.wanted else []
    for place in (parent, *saved):
        if os.path.exists(place) and not os.path.isdir(place):
            raise UsageError(f"{folder}: {place} is no folder; set --config.directory, or move it away")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: {parent} cannot be written; set --config.directory")


class RunFiles:
    """What rank 0 writes: the config, the ledger, a line per step, trace and costs of the latest steps.

    Where a launcher has made a folder for the logs, that becomes the run's folder.

    Attributes:
        trouble: at the end, what is not there as it should be, in words; "" if all is.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        writes: Mapping[str, Callable[[Path], None]],
        done: int = 0,
        source: Path | None = None,
        hardware: Mapping[str, Any] = MappingProxyType({}),
        say: Say = printing.say,
    ) -> None:
        self.trouble = ""
        self._say, self._failing, self._use = say, dict[str, str](), ExitStack()
        self.folder = Path(config.directory) / config.name
        self._config, self._world, self._writes = config, world, writes
        self._origin = source, hardware
        self._steps, self._done = 0, done
        self._latest = StepFile(self.folder)

    def __enter__(self) -> RunFiles:
        if self._world.rank > 0:
            return self
        try:
            with ExitStack() as use:
                self._take_place()
                use.enter_context(used_folder(self.folder))
                self.write("config.json", as_json(self._config) | {ORIGIN: origin_of(*self._origin)})
                lines = _lines_before(self._done, self.folder, self._say)
                self._metrics = KeptLines(self.folder / METRICS, lines)
                self._use = use.pop_all()
        except OSError as error:
            reason = f"{self.folder}: cannot be written: {error.strerror}; set --config.directory"
            raise UsageError(reason) from error
        return self

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file beside the others, before the first step."""
        if self._world.rank == 0:
            write_output(self.folder / name, f"{json.dumps(as_json(content), indent=2)}\n".encode())

    def add(self, step: RecordedStep, line: Mapping[str, Any]) -> None:
        """Write a step's line; complete at once, so a run can be watched and nothing is lost.

        Training goes on if that cannot be done, and the line is written as soon as it can.
        """
        self._steps += 1
        resumed = {"resumed": True} if self._done and self._steps == 1 else {}
        if self._world.rank == 0:
            text = json.dumps({**line, **resumed}) + "\n"
            self._try(METRICS, lambda: self._metrics.add(text), "; its lines are kept in memory")
            self._try(LATEST, lambda: self._latest.add(step))

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if self._world.rank > 0:
            return
        with self._use:
            self._try(METRICS, self._metrics.flush)
            self._try(LATEST, self._latest.flush)
            lost = self._metrics.missing
            troubles = [f"{self.folder / METRICS} lacks the lines of {lost} steps"] if lost else []
            with suppress(OSError):  # somebody may have moved it away
                self.folder.mkdir(parents=True, exist_ok=True)
            for name, write in self._writes.items():
                try:
                    write(self.folder / name)
                except UsageError as refused:
                    troubles.append(str(refused))
            try:
                self._metrics.close()
            except OSError as failed:  # a network file system may tell only now what it did not write
                troubles.append(f"{self.folder / METRICS} may lack lines: {failed.strerror}")
        self.trouble = "; ".join(troubles)
        if kind is not None:
            how = "interrupted" if kind is KeyboardInterrupt else "broken off"
            self._say("\n".join([*troubles, f"\n{how} after {self._steps} steps; files: {self.folder}/"]))

    def _try(self, name: str, write: Callable[[], None], more: str = "") -> None:
        """Write to a file; say once that this cannot be done, and once that it can again."""
        try:
            write()
        except OSError as error:
            reason = error.strerror or str(error)
            if self._failing.get(name) != reason:
                self._say(f"{self.folder / name}: cannot be written: {reason}; training continues{more}")
            self._failing[name] = reason
        else:
            if self._failing.pop(name, None) is not None:
                self._say(f"{self.folder / name}: can be written again")

    def _take_place(self) -> None:
        made = self._world.folder
        if made is not None and self.folder.exists() and self.folder.samefile(made):
            return
        if is_used(self.folder):
            raise UsageError(f"{self.folder}: another live run is there: give this one another --config.name")
        if self.folder.exists():
            self._say(f"an earlier run is kept as {move_away(self.folder)}")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if made is None or not made.exists() or not made.parent.samefile(self.folder.parent):
            self.folder.mkdir()
        else:
            made.rename(self.folder)


def _lines_before(step: int, folder: Path, say: Say) -> list[str]:
    """The complete lines of the steps before this one, from an earlier start of the run.

    They are in the run's folder, or else in the latest of those that were moved away: a start that was killed
    too early to have lines of its own may have taken the place. A file with other lines is kept beside it.
    """
    if step == 0:
        return []
    own = folder / METRICS
    moved = [path for path in named(folder.parent, folder.name, MOVED_AWAY) if _may_be(path, folder.name)]
    there = [file for path in moved if (file := path / own.name).exists()]
    places = [own] if own.exists() else sorted(there, key=lambda path: path.stat().st_mtime)
    if not places:
        return []
    found, wrong = lines_as(_Numbered, places[-1])
    if wrong:
        kept = move_away(own) if own.exists() else places[-1]
        say(f"{places[-1]}: {wrong}; it is kept as {kept}, and the run continues without that")
    return [f"{text.decode()}\n" for line, text in found if line.step < step]


def _may_be(folder: Path, name: str) -> bool:
    """Whether a folder's run has this name, as far as its config tells: a run may itself be named `a.1`."""
    with suppress(Unreadable):
        return read_json(folder / "config.json", _Named).name == name
    return True


PACKAGES = ("rrfp_jax", "jax", "jaxlib", "flax", "optax")

GIT_SECONDS = 5.0
"""Within which git must answer: a working directory may lie on a slow disk."""


Here: TypeAlias = tuple[str, Sequence[int], str, Sequence[str]]
"""Of a process: its machine, the numbers of the cores that it may use, and its devices: kind, and names by
which the machine tells them apart."""


def hardware_of(processes: Sequence[Here], on_cpu: bool) -> dict[str, str]:
    """What a run's processes ran on, in words; and whether they shared cores or GPUs, "" if not."""
    machines = Counter(machine for machine, *_ in processes)
    first, _, kind, devices = processes[0]
    own = len({core for machine, cores, *_ in processes if machine == first for core in cores})
    count = len({(machine, name) for machine, *_, names in processes for name in names})
    where, each = counted(len(machines), "machine"), " each" * (len(machines) > 1)
    several = f" in {len(processes)} processes" if len(processes) > 1 else ""
    words = f"{count} x {kind}{several} on {where}, {own} cores{each}"
    if not on_cpu:
        shared = f"{len(processes)} processes on {counted(count, 'GPU')}: idle shares include waiting for one"
        return {"words": words, "shared": shared if len(processes) > count else ""}
    crowd = max(machines.values()) if len(processes) > 1 else len(devices)
    who = "processes" if len(processes) > 1 else "virtual devices"
    shared = f"{crowd} {who} on {counted(own, 'core')}: idle shares include waiting for a core"
    return {"words": words, "shared": shared if crowd > own else ""}


def origin_of(file: Path | None, hardware: Mapping[str, Any] = MappingProxyType({})) -> Mapping[str, Any]:
    """What `config.json` says of the origin of a run."""
    return {
        "started": datetime.now().astimezone().isoformat(" ", "seconds"),
        "hardware": hardware,
        "command": typed_command(),
        "config_file": None if file is None else {"path": str(file.absolute()), "sha256": _sha256(file)},
        "git": commit_of(Path()),
        "versions": {"python": platform.python_version(), **found_versions(PACKAGES)},
    }


def commit_of(folder: Path) -> Mapping[str, Any] | None:
    """The commit that a folder is at, and whether tracked files are otherwise there; None without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changed is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(changed.strip())}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None if it fails, is missing, or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "--no-optional-locks", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _sha256(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
