"""Runs parts one after the other, each in a process with a time limit, and keeps what they find."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.findings import write_json
from benchmarks.gpu.parts import Part
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.run.place import MEMORY, OLD_MEMORY

REPOSITORY = Path(__file__).parent.parent.parent
RESULTS, LOG = "results.json", "log.txt"
LAST_SECONDS = 5.0
"""A part may look at the clock and stop by itself; it is told that it has so much less than it has."""
GRACE_SECONDS = 6.0
"""From the request to end until it is enforced: a part's own children have to be ended, too."""


class Results:
    """`results.json` of a folder: the findings of all parts that have been run into it.

    Raises:
        UsageError: the folder cannot be made, or holds a `results.json` of something else.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / RESULTS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            earlier = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
            self.parts: dict[str, dict[str, Any]] = dict(earlier.get("parts", {}))
        except OSError as error:
            raise UsageError(f"--out={folder}: {error.strerror}; give a folder that can be written") from None
        except (ValueError, AttributeError):
            raise UsageError(
                f"{self.file} is none of this command's: remove it, or give another --out"
            ) from None

    def add(self, part: Part, record: Mapping[str, Any]) -> None:
        """Keep what a part found, in place of what it found before."""
        self.parts[str(part.number)] = dict(record)
        ordered = {number: self.parts[number] for number in sorted(self.parts, key=int)}
        write_json(self.file, {"parts": ordered})


def run(parts: Sequence[Part], folder: Path, *, quick: bool) -> Results:
    """Run the parts in order; whatever happens in one, the others are run. Their output goes to `log.txt`."""
    results = Results(folder)
    for part in parts:
        print(f"part {part.number}, {part.title}: at most {part.seconds:.0f} s", flush=True)
        with (folder / LOG).open("ab") as log, tempfile.TemporaryDirectory() as scratch:
            results.add(part, _run_one(part, folder, Path(scratch) / "found.json", log, quick))
    return results


def _run_one(part: Part, folder: Path, file: Path, log: IO[bytes], quick: bool) -> dict[str, Any]:
    log.write(f"--- part {part.number}, {part.title}, {time.strftime('%F %T')}\n".encode())
    log.flush()
    start, began = log.tell(), time.monotonic()
    size = "quick" if quick else "full"
    given = str(part.seconds - LAST_SECONDS)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.run_part", part.module, file, folder.resolve(), given, size],
        cwd=REPOSITORY,
        env=_environment(os.environ, part),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        status: int | None = process.wait(part.seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end_group(process)
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if status is None:
        found["verdict"] = f"ran out of time: ended after {part.seconds:.0f} s"
    elif status or not found.get("verdict"):
        found["verdict"] = f"failed: ended with status {status}: {_last_line(Path(log.name), start)}"
    return {"title": part.title, "seconds": round(time.monotonic() - began, 1), "quick": quick} | found


def _environment(base: Mapping[str, str], part: Part) -> dict[str, str]:
    """The part's share of the GPU's memory, whatever the user usually gives a process."""
    kept = {name: value for name, value in base.items() if name != OLD_MEMORY}
    return {**kept, MEMORY: str(part.memory), "PYTHONUNBUFFERED": "1"}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a part and whatever it has started; the next one needs the whole GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)  # raises once nobody is left
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
