"""What all benchmark commands share: flags, aims, medians, and a plain table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

REPOSITORY = Path(__file__).parent.parent

RESULTS = REPOSITORY / "benchmarks" / "results"

SIMULATED = RESULTS / "simulated.md"


MOST_DIGITS = 9
"""Behind the point, of a value beside its aim."""


@dataclass(frozen=True)
class Aim:
    """A figure with its limit, both in `unit`; a limit from below with `at_least`."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure is within its limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        aim = f"{'at least ' if self.at_least else ''}{self.limit:g}"
        value = f"{self._shown} {self.unit}".rstrip()
        return f"{verdict:6}  {self.name}: {value} (aim: {aim})"

    @property
    def _shown(self) -> str:
        """The value, with as many digits as tell on which side of the limit it is."""
        fewest = 0 if float(self.value).is_integer() else 1 if abs(self.value) >= 10 else 3
        texts = [f"{self.value:.{digits}f}" for digits in range(fewest, MOST_DIGITS + 1)]
        return next((text for text in texts if replace(self, value=float(text)).met == self.met), texts[-1])


def percent_longer(one: float, other: float) -> float:
    """By how many per cent the first is longer than the other."""
    return 100 * (one / other - 1)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What was measured, and the same simulated, in one unit."""

    real: float
    simulated: float

    @property
    def percent(self) -> float:
        """By which the real one is longer."""
        return percent_longer(self.real, self.simulated)


def parse(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit with 1 if an aim is missed")
    return parser


def parts_flag(parser: argparse.ArgumentParser, parts: Iterable[str]) -> None:
    """Add `--part` of a command that has parts; None stands for all."""
    parser.add_argument(
        "--part", choices=tuple(parts), action="append", help="only this; may be repeated (all)"
    )


def finish(options: argparse.Namespace, figures: dict[str, Any], aims: Sequence[Aim]) -> int:
    """Print the aims, write the file, and give the exit status."""
    print(*aims, sep="\n")
    if options.json:
        judged = [asdict(aim) | {"met": aim.met} for aim in aims]
        found = {"machine": machine(), "figures": figures, "aims": judged}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    missed = [aim.name for aim in aims if not aim.met]
    if options.check and missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
        return 1
    return 0


def put_figures(path: Path, name: str, text: str) -> None:
    """Put Markdown between `<!-- NAME -->` and `<!-- end of NAME -->`, in place of what is there.

    Raises:
        ValueError: the file has no such place.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{path} has no place between {begin.strip()} and {end.strip()}: add both lines")
    path.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Versions and devices that figures belong to; `driver` is the GPU driver's, or None."""
    devices = jax.local_devices()
    return {
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "python": platform.python_version(),
        "devices": [f"{d.platform} {d.device_kind}" for d in devices],
        "platform": str(devices[0].client.platform_version),
        "driver": _driver(),
        "cores": os.cpu_count(),
    }


def output_of(command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None) -> str:
    """What a command prints, run from the repository to its end.

    Raises:
        RuntimeError: it failed; with what it said.
        subprocess.TimeoutExpired: it took longer than so many seconds.
    """
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def found_by_ranks(
    count: int, module: str, *arguments: object, seconds: float, env: Mapping[str, str] | None = None
) -> Any:
    """What the ranks of a module found, started by the launcher in a folder that is gone afterwards.

    The module's first argument is the file into which rank 0 writes that, as JSON; `arguments` follow.

    Raises:
        RuntimeError: a rank failed; with what the launcher said.
        subprocess.TimeoutExpired: it took longer than so many seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "rrfp_jax.commands.launch", "-n", str(count), "--directory", folder]
        output_of([*command, "-m", module, str(file), *map(str, arguments)], seconds, env)
        return json.loads(file.read_text(encoding="utf-8"))


def _driver() -> str | None:
    """As nvidia-smi tells: card, driver, memory."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def median_and_p99(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    values = np.asarray(seconds) * 1e6
    median, p99 = np.percentile(values, [50, 99])
    return {"median_us": round(float(median), 1), "p99_us": round(float(p99), 1)}
