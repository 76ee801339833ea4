"""What a part finds, written to a file as it goes, so that a part that is ended early keeps what it has."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import Aim, machine

PASSED = "passed"


class Unavailable(Exception):
    """Something cannot be had on this platform; the message says what and why."""


class Findings:
    """The figures of one part, by section.

    Args:
        file: to write to, in JSON, whole at every change.
        folder: for further files.
        quick: tiny sizes, whose figures mean nothing; aims are not judged then.
        seconds: until the part is ended.
    """

    def __init__(self, file: Path, folder: Path, *, quick: bool, seconds: float) -> None:
        self.folder, self.quick = folder, quick
        self._file = file
        self._deadline = time.monotonic() + seconds
        self._figures: dict[str, dict[str, Any]] = {}
        self._aims: list[Aim] = []
        self._failed: list[str] = []
        self._late: list[str] = []
        self._machine = machine()
        self.headline = ""
        self.save()

    @property
    def seconds_left(self) -> float:
        """Until the part is ended."""
        return self._deadline - time.monotonic()

    @contextmanager
    def section(self, name: str) -> Iterator[dict[str, Any]]:
        """Collect figures under a name. An error in it is noted, and hides nothing that comes after it."""
        figures: dict[str, Any] = {}
        self._figures[name] = figures
        began = time.monotonic()
        try:
            yield figures
        except Unavailable as reason:
            figures["skipped"] = str(reason)
        except Exception as error:
            traceback.print_exc()
            figures["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
            self._failed.append(f"{name}: {figures['failed']}")
        print(
            f"{name} ({time.monotonic() - began:.1f} s): {json.dumps(figures)}", file=sys.stderr, flush=True
        )
        self.save()

    def fail(self, reason: str) -> None:
        """The part fails for this reason, at its end."""
        self._failed.append(reason)

    def too_late(self, what: str) -> None:
        """This was left out because the time is up."""
        self._late.append(what)

    def aim(self, aim: Aim) -> None:
        """Judge a figure at full size; missing it fails the part."""
        if not self.quick:
            self._aims.append(aim)

    def conclude(self) -> None:
        """Give the verdict."""
        self.save(self._verdict())

    def save(self, verdict: str = "") -> None:
        """Write everything so far; without a verdict the part is still under way."""
        found = {
            "verdict": verdict,
            "headline": self.headline,
            "quick": self.quick,
            "machine": self._machine,
            "figures": self._figures,
            "aims": [asdict(aim) | {"met": aim.met} for aim in self._aims],
        }
        write_json(self._file, found)

    def _verdict(self) -> str:
        missed = [" ".join(str(aim).split()) for aim in self._aims if not aim.met]
        if self._failed or missed:
            return f"failed: {'; '.join(self._failed + missed)}"
        if self._late:
            return f"ran out of time: not measured: {', '.join(self._late)}"
        sections = list(self._figures.values())
        if sections and all("skipped" in section for section in sections):
            return f"skipped: {sections[0]['skipped']}"
        return PASSED


def write_json(file: Path, value: Any) -> None:
    """Write a file that is never seen half-written."""
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, file)
