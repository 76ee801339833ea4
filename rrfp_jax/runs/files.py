"""The files that a run keeps in `<directory>/<name>/`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.files import MOVED_AWAY, move_away, named, read_whole
from rrfp_jax.json_files import LARGEST_LINES, Count, Unreadable, as_kind, parse_json, read_json
from rrfp_jax.live.step_file import NAME as STEP_FILE
from rrfp_jax.live.step_file import Reported, StepFile
from rrfp_jax.runs.config import RunConfig, as_json
from rrfp_jax.runs.origin import origin_of
from rrfp_jax.runtime.processes.world import World

ORIGIN = "_origin"
"""Of `config.json`, beside the config's own fields: where the run comes from."""


class MetricsLine(msgspec.Struct, frozen=True):
    """A line of `metrics.jsonl`, as far as it must be known; its other keys are figures of the step."""

    step: Count


class _Named(msgspec.Struct, frozen=True):
    """A run's `config.json`, as far as it must be known."""

    name: str


class RunFiles:
    """What rank 0 writes: the config, the ledger, a line per step, trace and costs of the latest steps.

    Where a launcher has made a folder for the logs, that becomes the run's folder.

    Args:
        config: of the run.
        world: its processes.
        writes: files that are written at the end, each by a function of its path.
        done: steps of the run before this start, whose lines are kept.
        source: file of the config; None if there is none.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        writes: Mapping[str, Callable[[Path], None]],
        done: int = 0,
        source: Path | None = None,
    ) -> None:
        self.folder = Path(config.directory) / config.name
        self._config, self._world, self._writes, self._source = config, world, writes, source
        self._steps, self._done = 0, done
        self._latest = StepFile(self.folder)
        parent = Path(config.directory)
        while not parent.exists():
            parent = parent.parent
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(f"{self.folder}: {parent} cannot be written; set --config.directory")

    def __enter__(self) -> RunFiles:
        if self._world.rank > 0:
            return self
        try:
            self._take_place()
            self.write("config.json", as_json(self._config) | {ORIGIN: origin_of(self._source)})
            part, metrics = self.folder / ".metrics.part", self.folder / "metrics.jsonl"
            lines = _lines_before(self._done, self.folder)
            part.unlink(missing_ok=True)  # whatever it may be
            part.write_text("".join(lines), encoding="utf-8")
            part.replace(metrics)  # whoever is killed here leaves all lines, or none that were cut short
            self._metrics = metrics.open("a", encoding="utf-8")
        except OSError as error:
            reason = f"{self.folder}: cannot be written: {error.strerror}; set --config.directory"
            raise UsageError(reason) from error
        return self

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file beside the others."""
        if self._world.rank == 0:
            with self._written(name):
                text = json.dumps(content, indent=2, default=str)
                (self.folder / name).write_text(text + "\n", encoding="utf-8")

    def add(self, report: Reported, line: Mapping[str, Any]) -> None:
        """Write a step's line; complete at once, so a run can be watched and nothing is lost.

        Args:
            report: of the step, whose tasks are kept for whoever looks meanwhile.
            line: of `metrics.jsonl`.
        """
        self._steps += 1
        resumed = {"resumed": True} if self._done and self._steps == 1 else {}
        if self._world.rank == 0:
            with self._written("metrics.jsonl"):
                self._metrics.write(json.dumps({**line, **resumed}) + "\n")
                self._metrics.flush()
            with self._written(STEP_FILE):
                self._latest.add(report)

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if self._world.rank > 0:
            return
        self._metrics.close()
        failed = ""
        for name, write in {STEP_FILE: self._write_latest, **self._writes}.items():
            try:
                write(self.folder / name)
            except UsageError as refused:
                failed = str(refused)
        if kind is None and failed:
            raise TrainingError(failed)
        if kind is not None:
            how = "interrupted" if kind is KeyboardInterrupt else "broken off"
            print(f"\n{how} after {self._steps} steps; files: {self.folder}/", flush=True)

    def _write_latest(self, path: Path) -> None:
        try:
            self._latest.flush()
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from None

    @contextmanager
    def _written(self, name: str) -> Iterator[None]:
        """Inside, a file is written; if it cannot be, the run breaks off."""
        try:
            yield
        except OSError as error:
            reason = f"{self.folder / name}: cannot be written: {error.strerror}"
            raise TrainingError(reason) from None

    def _take_place(self) -> None:
        made = self._world.folder
        if made is not None and self.folder.exists() and self.folder.samefile(made):
            return
        if self.folder.exists():
            print(f"an earlier run is kept as {move_away(self.folder)}", flush=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if made is None or not made.parent.samefile(self.folder.parent):
            self.folder.mkdir()
        else:
            made.rename(self.folder)


def _lines_before(step: int, folder: Path) -> list[str]:
    """The complete lines of the steps before this one, from an earlier start of the run.

    They are in the run's folder, or else in the latest of those that were moved away: a start that was killed
    too early to have lines of its own may have taken the place. A file with other lines is kept beside it.
    """
    if step == 0:
        return []
    own = folder / "metrics.jsonl"
    moved = [path for path in named(folder.parent, folder.name, MOVED_AWAY) if _may_be(path, folder.name)]
    there = [file for path in moved if (file := path / own.name).exists()]
    places = [own] if own.exists() else sorted(there, key=lambda path: path.stat().st_mtime)
    if not places:
        return []
    found, wrong = _lines_of(places[-1])
    if wrong:
        kept = move_away(own) if own.exists() else places[-1]
        print(f"{places[-1]}: {wrong}; it is kept as {kept}, and the run goes on without that", flush=True)
    return [line for number, line in found if number < step]


def _may_be(folder: Path, name: str) -> bool:
    """Whether a folder's run has this name, as far as its config tells: a run may itself be named `a.1`."""
    with suppress(Unreadable):
        return read_json(folder / "config.json", _Named).name == name
    return True


def _lines_of(path: Path) -> tuple[list[tuple[int, str]], str]:
    """The lines of a `metrics.jsonl` with their steps, and what is wrong with the others, if anything is.

    A last line that was cut short is not wrong: somebody was killed while it was written.
    """
    try:
        lines = read_whole(path, LARGEST_LINES).split(b"\n")[:-1]
    except OSError as error:
        return [], f"cannot be read: {error.strerror}"
    found, wrong = [], ""
    for number, line in enumerate(lines, 1):
        try:
            found.append((as_kind(parse_json(line), MetricsLine).step, f"{line.decode()}\n"))
        except ValueError as error:
            wrong = wrong or f"line {number} is no step's: {error}"
    return found, wrong
