"""Runs tests in a fresh pytest process, with a mutant or without, and says what came of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from xml.etree import ElementTree

import psutil  # type: ignore[import-untyped]

from tests.verification.mutation.install import variables
from tests.verification.mutation.table import Mutant

REPOSITORY = Path(__file__).parents[3]
LIMIT_SECONDS = 420.0
"""Of one mutant's tests; a mutant that only this ends is not found."""

Verdict: TypeAlias = Literal["found", "survived", "hung", "never reached", "broken"]

_OURS, _RAISES = (
    r"tests/verification/mutation/\w+\.py",
    r"(?:    .*\n)*(?:E +)?(?:Type|Attribute|Value|Name)Error",
)
OUTDATED = re.compile(
    rf"{_OURS}:\d+: in .*\n{_RAISES}"
    rf'|File "[^"]*{_OURS}", line \d+, in .*\n{_RAISES}'
    r"|E +TypeError: \w+\.<locals>\..* argument"
)
"""How a test fails that meets no bug, but a mutant that fits the code no longer."""


@dataclass(frozen=True)
class Ran:
    """What came of a pytest process."""

    status: int | None
    failed: Mapping[str, str]
    seconds: float
    said: str
    outdated: bool = False

    def fails(self, test: str) -> bool:
        """Whether a test, or one of its cases, failed."""
        return any(failed and _is_of(name, test) for name, failed in self.failed.items())


@dataclass(frozen=True)
class Trial:
    """A mutant and its tests."""

    mutant: Mutant
    verdict: Verdict
    by: Sequence[str]
    ran: Ran


def run(tests: Sequence[str], own: Mapping[str, str], limit: float, *arguments: str) -> Ran:
    """Run tests with variables of their own, and leave no process behind."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *arguments, *tests]
        kept = {"HYPOTHESIS_STORAGE_DIRECTORY": str(Path(folder) / "hypothesis")}
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env={**os.environ, **kept, **own}, stdout=out, stderr=out
            )
            status = _ended(process, limit)
        found = _failed(report) if report.exists() else {}
        said = log.read_text(errors="replace")
        outdated = OUTDATED.search(said) is not None
        return Ran(status, found, time.monotonic() - began, said[-3000:], outdated)


def tried(mutant: Mutant, tests: Sequence[str] = (), limit: float = LIMIT_SECONDS, *arguments: str) -> Trial:
    """Run a mutant's tests, or other ones, with it; other ones find it if any of them fails."""
    wanted = tests or mutant.tests
    with tempfile.TemporaryDirectory() as folder:
        reached = Path(folder) / "reached"
        first = ["-x"] if len(wanted) == 1 else []
        ran = run(wanted, variables(mutant, reached), limit, *first, *arguments)
        by = [name for name, failed in ran.failed.items() if failed]
        if ran.status is None:
            verdict: Verdict = "hung"
        elif ran.outdated or (ran.status not in (0, 1) and not by):  # xdist says 2 when it stops at a failure
            verdict = "broken"
        elif not reached.exists():
            verdict = "never reached"
        elif tests:
            verdict = "found" if by else "survived"
        else:
            verdict = "found" if all(map(ran.fails, wanted)) else "survived"
        return Trial(mutant, verdict, by, ran)


def _ended(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit status; None if it had to be ended, with all that it started."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                try:
                    os.kill(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()


def _failed(report: Path) -> dict[str, str]:
    """By test, how it failed, from pytest's report."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            file = case.get("file") or ""
            inner = (
                case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
            )
            name = (
                "::".join([file, *inner.split("."), case.get("name", "")])
                if inner
                else (f"{file}::{case.get('name')}")
            )
            how = [of.get("message", "failed") for of in (*case.iter("failure"), *case.iter("error"))]
            found[name] = found.get(name, "") or " ".join(" ".join(how).split())
    return found


def _is_of(name: str, test: str) -> bool:
    """Whether a test's name is that of a named test, of one of its cases, or is in a named file."""
    return name == test or name.startswith((f"{test}[", f"{test}::"))
