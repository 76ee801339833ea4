"""Runs a case: starts it, does what must happen meanwhile, and holds its end against what it must be."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from textwrap import indent
from typing import Any

from rrfp_jax.checkpoint.folder import CheckpointFolder
from tests.support.kept import FAST_COMPILING
from tests.verification.failures import ROOT

LAUNCHED = "$LAUNCH"
"""The named run of `run.py` in two processes."""
ALONE = "$TRAIN"
"""The same in one process."""
SCRIPT = "$SCRIPT"
"""`script.py` in two processes."""

SECONDS = 120.0
STEPS, EVERY = 8, 4
"""Steps of a run, and between two checkpoints of the named run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run in an environment.

    The shell command runs in a new folder. It finds `$LAUNCH`, `$TRAIN` and `$SCRIPT` (commands that take
    further arguments, see above), `$PYTHON`, `$WATCH` (a folder outside of the run's), and `$SMALL_DISK
    FOLDER KILOBYTES`, which mounts a file system of that size. `run.py` and `script.py` are made from
    `files_of`; they stop at the moments of `then`, until its commands are done.

    Attributes:
        name: unique; begins with the class, such as "full disk: at a checkpoint".
        shell: what is run, by bash.
        env: variables of the environment; None removes one.
        at_import, at_step: Python lines put into both files: before anything else, and after each step,
            where `step` and `rank` are known.
        then: by moment ("import", "build", "step 3"), a bash command run meanwhile. It finds `$LAUNCHER`,
            `$RANK0` and `$RANK1`, the ids of the processes.
        status: the exit status that the shell must have, or several that it may have.
        says: regular expressions; each must match somewhere in what is printed.
        headline: a regular expression that the first sentence of ours must match; "" for any, or none.
        silent: regular expressions that must match nowhere in what is printed.
        steps: lines that `metrics.jsonl` must have, whole and in order; None if that is not looked at.
        checkpoint: the latest that must be complete; None if that is not looked at.
        tracebacks: how many may be printed, as when the user's own code raises.
        files: what must be there at the end, as patterns below the folder, and, after "!", what must not.
        seconds: the limit, after which all is killed and the case has failed.
        needs: commands or rights that the machine must have, such as "mount"; else the case is told as
            not run.
    """

    name: str
    shell: str = LAUNCHED
    env: Mapping[str, str | None] = field(default_factory=dict)
    at_import: str = ""
    at_step: str = ""
    then: Mapping[str, str] = field(default_factory=dict)
    status: int | Collection[int] = 0
    says: Collection[str] = ()
    headline: str = ""
    silent: Collection[str] = ()
    steps: int | None = None
    checkpoint: int | None = None
    tracebacks: int = 0
    files: Collection[str] = ()
    seconds: float = SECONDS
    needs: Collection[str] = ()

    @property
    def statuses(self) -> Collection[int]:
        """Those that the shell may have."""
        return (self.status,) if isinstance(self.status, int) else self.status


def case(name: str, shell: str = LAUNCHED, *, through: int | None = None, **told: Any) -> Case:
    """A case; `through` so many steps its lines go, and its latest checkpoint is there."""
    return Case(name=name, shell=shell, **{"steps": through, "checkpoint": through} | told)


def both(one: Case) -> tuple[Case, Case]:
    """A case of the launched run, and the same in one process."""
    shell, headline = (
        one.shell.replace(LAUNCHED, ALONE),
        one.headline.replace("rrfp launch", "rrfp train"),
    )
    return one, replace(one, name=f"{one.name}, one process", shell=shell, headline=headline)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended."""

    status: int | None = None
    seconds: float = 0.0
    text: str = ""
    left: Collection[str] = ()
    faults: Collection[str] = ()
    missing: str = ""


WATCHED = """\
{at_import}
import os, time

rank = int(os.environ.get("RRFP_RANK", "0"))


def moment(name):
    if rank == 0 and name in os.environ["MOMENTS"].split(","):
        path = os.path.join(os.environ["WATCH"], name.replace(" ", "-"))
        open(path + ".reached", "w").close()
        deadline = time.monotonic() + 400
        while not os.path.exists(path + ".done") and time.monotonic() < deadline:
            time.sleep(0.01)


def after(step):
    moment(f"step {{step}}")
{at_step}


if "RRFP_RANK" in os.environ or "launch" not in " ".join(__import__("sys").orig_argv):
    moment("import")
"""

CONFIG_FILE = """
from dataclasses import dataclass

import rrfp_jax as rrfp
from rrfp_jax.runs.config import Checkpointing
from tests.scripts.toy_run import ToyRun


@dataclass(frozen=True, kw_only=True)
class Run(ToyRun):
    def pipeline(self):
        moment("build")
        return super().pipeline()

    def on_step(self, report):
        after(report.step)


def get_config():
    checkpoint = Checkpointing(every_steps={every})
    return Run(name="trial", steps={steps}, mesh=rrfp.Mesh(pp=2), checkpoint=checkpoint)
"""

SCRIPT_FILE = """
from tests.support import toy

if __name__ == "__main__":
    moment("build")
    trainer = toy.trainer(2)
    for report in trainer.steps({steps}):
        after(report.step)
    if trainer.is_main:
        print("trained", report.step + 1, "steps", flush=True)
"""


def files_of(case: Case) -> dict[str, str]:
    """By name, the Python files of a case's folder."""
    at_step = indent(case.at_step, "    ")
    watched = WATCHED.format(at_import=case.at_import, at_step=at_step)
    return {
        "run.py": watched + CONFIG_FILE.format(steps=STEPS, every=EVERY),
        "script.py": watched + SCRIPT_FILE.format(steps=STEPS),
    }


MARK = "ENVIRONMENTS_MARK"
"""The variable by which all processes of a case are known."""
NAME = "trial"
AFTER_SECONDS = 3.0
"""For what the shell has left to end by itself."""
POLL_SECONDS = 0.01
TRACEBACK = "Traceback (most recent call last)"
SENTENCE = r"^%s((?:rrfp launch|rrfp train|rank \d).*)$"

SMALL_DISK = """#!/bin/bash
mkdir -p "$1" && exec mount -t tmpfs -o size="$2k" small "$1"
"""


def run_case(case: Case, scratch: Path, kept: Path) -> Outcome:
    """Run a case."""
    if missing := [need for need in case.needs if not has(need)]:
        return Outcome(missing=", ".join(missing))
    mark, folder, watch = uuid.uuid4().hex, scratch / "run", scratch / "watch"
    for made in (folder, watch):
        made.mkdir()
    for name, text in files_of(case).items():
        (folder / name).write_text(text, encoding="utf-8")
    env = _environment(case, mark, watch, kept)
    began = time.monotonic()
    try:
        with (scratch / "said").open("wb") as out:
            shell = subprocess.Popen(
                ["bash", "-c", case.shell],
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            status = _awaited(shell, case, began, folder, env)
        seconds = time.monotonic() - began
        left = _left(mark)
        text = (scratch / "said").read_text(encoding="utf-8", errors="replace")
        found = Outcome(status=status, seconds=seconds, text=text, left=left)
        return Outcome(
            status=status, seconds=seconds, text=text, left=left, faults=[*_faults(case, found, folder)]
        )
    finally:
        _kill(mark)
        _clear(folder)


def sentence(text: str) -> str:
    """The first sentence of the launcher's or a lone run's, else of a rank's; without one the last line."""
    searched = (re.search(SENTENCE % before, text, re.MULTILINE) for before in ("", r"\[\d\] "))
    found = next(filter(None, searched), None)
    lines = [line for line in text.splitlines() if line.strip()]
    return found[1] if found else (lines[-1] if lines else "(nothing)")


def has(need: str) -> bool:
    """Whether the machine has a command or, for "mount", lets us mount."""
    if need != "mount":
        return shutil.which(need) is not None
    place = Path(f"/tmp/environments-{os.getpid()}")
    place.mkdir(exist_ok=True)
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "small", place], capture_output=True, check=False)
        if mounted.returncode == 0:
            subprocess.run(["umount", place], check=True)
        return mounted.returncode == 0
    except OSError:
        return False
    finally:
        place.rmdir()


def _environment(case: Case, mark: str, watch: Path, kept: Path) -> dict[str, str]:
    """The variables of a case's shell."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RRFP_")}
    launch = f"{sys.executable} -m rrfp_jax launch"
    small = watch / "small-disk"
    small.write_text(SMALL_DISK, encoding="ascii")
    small.chmod(0o755)
    usual |= {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": FAST_COMPILING,
        "JAX_COMPILATION_CACHE_DIR": str(kept / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "RRFP_KEY_FILE": str(kept / "programs.key"),
        "PYTHON": sys.executable,
        "LAUNCH": f"{launch} --config=run.py",
        "TRAIN": f"{sys.executable} -m rrfp_jax train --config=run.py",
        "SCRIPT": f"{launch} -n 2 --name={NAME} script.py",
        "SMALL_DISK": str(small),
        "WATCH": str(watch),
        "MOMENTS": ",".join(case.then),
        MARK: mark,
    }
    given = {name: value for name, value in case.env.items() if value is not None}
    return {name: value for name, value in usual.items() if name not in case.env} | given


def _awaited(
    shell: subprocess.Popen[bytes], case: Case, began: float, folder: Path, env: Mapping[str, str]
) -> int | None:
    """The shell's status; None if it took too long. Runs the commands of moments that are reached."""
    watch, due = Path(env["WATCH"]), dict(case.then)
    while time.monotonic() - began < case.seconds:
        if (status := shell.poll()) is not None:
            return status
        for moment in list(due):
            path = watch / moment.replace(" ", "-")
            if path.with_name(f"{path.name}.reached").exists():
                told = {**env, **_processes(env[MARK])}
                subprocess.run(
                    ["bash", "-c", due.pop(moment)], env=told, cwd=folder, check=False, timeout=400
                )
                path.with_name(f"{path.name}.done").touch()
        time.sleep(POLL_SECONDS)
    return None


def _processes(mark: str) -> dict[str, str]:
    """By the names that a case's commands know them by, the ids of its processes."""
    found: dict[str, str] = {}
    for number, words, variables in marked(mark):
        alone = "rrfp_jax train" in words
        rank = variables.get("RRFP_RANK", "0" if alone else None)
        name = f"RANK{rank}" if rank is not None else "LAUNCHER"
        if rank is not None or "rrfp_jax launch" in words:
            found.setdefault(name, str(number))
    return found


def marked(mark: str) -> Iterator[tuple[int, str, Mapping[str, str]]]:
    """The living processes of a case, by id: id, command line, variables."""
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(OSError):
            environ = (folder / "environ").read_bytes()
            state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if f"{MARK}={mark}".encode() in environ.split(b"\0") and state not in (b"Z", b"X"):
                pairs = (item.decode("utf-8", "replace").partition("=") for item in environ.split(b"\0"))
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                yield int(folder.name), words, {name: value for name, _, value in pairs}


def _left(mark: str) -> list[str]:
    """The command lines of what is left some time after the shell's end."""
    deadline = time.monotonic() + AFTER_SECONDS
    while (left := [words for _, words, _ in marked(mark)]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return left


def _kill(mark: str) -> None:
    for number, _, _ in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _clear(folder: Path) -> None:
    """Unmount whatever a case has mounted in its folder, and make all of it removable."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for place in sorted((place for place in mounts if Path(place).is_relative_to(folder)), reverse=True):
        subprocess.run(["umount", "-l", place], check=False)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


# What must be so.


def _faults(case: Case, found: Outcome, folder: Path) -> Iterator[str]:
    """What was not as it must be."""
    if found.status is None:
        yield f"it hung: killed after {case.seconds:g} s"
    elif found.status not in case.statuses:
        yield f"exit status {found.status}, not {case.status}"
    if found.left:
        yield f"{len(found.left)} processes were left: {'; '.join(found.left)[:300]}"
    for pattern in case.says:
        if not re.search(pattern, found.text, re.MULTILINE):
            yield f"it does not say {pattern!r}"
    for pattern in case.silent:
        if re.search(pattern, found.text, re.MULTILINE):
            yield f"it says {pattern!r}"
    if not re.search(case.headline, sentence(found.text)):
        yield f"its first sentence is {sentence(found.text)!r}, not {case.headline!r}"
    if (count := found.text.count(TRACEBACK)) > case.tracebacks:
        yield f"{count} tracebacks, not {case.tracebacks}"
    yield from _of_files(case, folder)


def _of_files(case: Case, folder: Path) -> Iterator[str]:
    """What is wrong with the files."""
    if case.steps is not None:
        steps = [json.loads(line)["step"] for line in _metrics(folder)]
        if steps != list(range(case.steps)):
            yield f"metrics.jsonl has the steps {steps}, not those of {case.steps}"
    if case.checkpoint is not None:
        checkpoints = CheckpointFolder(folder / "runs" / f"{NAME}.checkpoints")
        latest = checkpoints.steps()[-1:]
        if latest != [case.checkpoint]:
            yield f"the latest checkpoint is {latest}, not {case.checkpoint}"
        else:
            checkpoints.open(case.checkpoint)  # reads, and raises for one that is not complete
    there = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    for pattern in case.files:
        matching = [name for name in there if fnmatch(name, pattern.removeprefix("!"))]
        if bool(matching) == pattern.startswith("!"):
            yield f"{pattern}: there are {matching}"


def _metrics(folder: Path) -> list[str]:
    """The lines of the run's `metrics.jsonl`; whatever is not whole counts as one, too."""
    with suppress(OSError):
        return (folder / "runs" / NAME / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return []
