"""The check of this machine's GPU: its parts, each in a process with a time limit, and what they find.

Only JAX, flax, optax, NumPy, msgspec, what these need, `rrfp_jax`, `models` and `configs` may be imported
here and by the parts: a GPU machine may have no network, and nothing can be installed on it then.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import jax

from benchmarks.harness import REPOSITORY, Aim, Found, bench, machine, say
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.run.place import MEMORY, OLD_MEMORY


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the check: its module has `measure(found: Findings) -> None`; limit in seconds, compiling and
    the start of the process included; share of the GPU's memory that its process takes; flags for XLA."""

    number: int
    title: str
    module: str
    seconds: float
    memory: float
    flags: str = ""


PARTS: Sequence[Part] = (
    Part(number=1, title="open questions", module="benchmarks.gpu.questions", seconds=60, memory=0.3),
    # With tuning, compiling for float32 took 143 s on an H200; it changes nothing that is asked here.
    Part(
        number=2,
        title="parity",
        module="benchmarks.gpu.parity",
        seconds=100,
        memory=0.4,
        flags="--xla_gpu_autotune_level=0",
    ),
    Part(number=3, title="the tax", module="benchmarks.gpu.throughput", seconds=75, memory=0.9),
    Part(number=4, title="settings", module="benchmarks.gpu.settings", seconds=110, memory=0.9),
    Part(number=6, title="layer costs", module="benchmarks.gpu.costs", seconds=240, memory=0.9),
)
"""In the order in which they are run; their limits add up to less than 10 minutes."""

PASSED = "passed"


class Unavailable(Exception):
    """Something cannot be had on this platform; the message says what and why."""


class Findings:
    """The figures of one part, by section, written into a file whole at every change, so that a part that is
    ended early keeps what it has. `folder` is for further files; aims of `quick` sizes are not judged; the
    part is ended after so many seconds.
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


def run_part(module: str, file: str, folder: str, seconds: float, quick: bool) -> None:
    """One part in this process, which leaves its findings in the file."""
    found = Findings(Path(file), Path(folder), quick=quick, seconds=seconds)
    # Whoever ends this part learns from the log where it was. Other threads' frames cannot be read safely.
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    if jax.devices()[0].platform == "cpu" and not quick:
        found.fail("JAX found no GPU here, only cpu; --quick runs on one")
    else:
        importlib.import_module(module).measure(found)
    found.conclude()


RESULTS, LOG = "results.json", "log.txt"
LAST_SECONDS = 5.0
"""A part may look at the clock and stop by itself; it is told that it has so much less than it has."""
GRACE_SECONDS = 6.0
"""From the request to end until it is enforced: a part's own children have to be ended, too."""


class Results:
    """`results.json` of a folder: the findings of all parts that have been run into it."""

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
    given = [part.module, str(file), str(folder.resolve()), part.seconds - LAST_SECONDS, quick]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "--rank", os.devnull, __name__, "run_part", json.dumps(given)],
        cwd=REPOSITORY,
        env=_environment(os.environ, part),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        with _terminated_is_an_exception():
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


@contextmanager
def _terminated_is_an_exception() -> Iterator[None]:
    """SIGTERM ends this process only after the part, which is of a session of its own and has the GPU."""

    def end(number: int, _: Any) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _environment(base: Mapping[str, str], part: Part) -> dict[str, str]:
    """The part's share of the GPU's memory, whatever the user usually gives a process; its flags."""
    kept = {name: value for name, value in base.items() if name != OLD_MEMORY}
    flags = f"{base.get('XLA_FLAGS', '')} {part.flags}".strip()
    return {**kept, MEMORY: str(part.memory), "XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1"}


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


def table(results: Results) -> str:
    rows = []
    for number, found in results.parts.items():
        size = "quick" if found["quick"] else "full"
        verdict = found["verdict"] if found["verdict"] != PASSED else f"{PASSED}  {found['headline']}"
        rows.append(f"{number}  {found['title']:15} {size:5} {found['seconds']:6.1f} s  {verdict}")
    return "\n".join(rows)


NUMBERS = tuple(part.number for part in PARTS)


@bench(
    "Everything that is not known on a GPU: what does the device do, are gradients right, what does it cost?",
    minutes="10 at most",
    aims="no part fails or runs out of time",
)
def gpu(out: str = "gpu-check", quick: bool = False, parts: tuple[int, ...] = NUMBERS) -> Found:
    """Checks the runtime on this machine's GPU and measures it; see results/gpu.md for what each part
    answers. Writes OUT/results.json, with what earlier calls found about other parts, OUT/costs.json (part 6)
    and OUT/log.txt. `--quick` runs tiny sizes, also without a GPU, whose figures mean nothing."""
    chosen = [part for part in PARTS if part.number in parts]
    if unknown := [number for number in parts if number not in [part.number for part in PARTS]]:
        raise UsageError(
            f"there is no part {unknown[0]}; choose from {','.join(str(p.number) for p in PARTS)}"
        )
    results = run(chosen, Path(out), quick=quick)
    say(table(results))
    verdicts = [results.parts[str(part.number)]["verdict"] for part in chosen]
    bad = sum(verdict.startswith(("failed", "ran out")) for verdict in verdicts)
    return Found(results.parts, [Aim("parts that failed or ran out of time", bad, 0, "")])
