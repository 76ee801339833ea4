"""What benchmarks share: the registry, flags, aims, ranks, tables. Importing it needs no JAX."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rrfp_jax.errors import UsageError

REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
LAUNCH = "rrfp_jax", "launch"
MOST_DIGITS = 9
"""Behind the point, of a value beside its aim."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
U = TypeVar("U")


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


@dataclass(frozen=True)
class Found:
    """What a benchmark found.

    Attributes:
        figures: for `--json`.
        aims: judged figures.
        tables: Markdown by "PAGE.md NAME": printed, and with `--write` put between `<!-- NAME -->` and
            `<!-- end of NAME -->` of that page of results/.
        pictures: what draws each file, by its path below the repository; drawn with `--write`.
    """

    figures: Any
    aims: Sequence[Aim] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """A benchmark: a function whose parameters, all with a default, are its flags; it gives `Found`."""

    run: Callable[..., Found]
    question: str
    minutes: str
    aims: str

    def parser(self) -> argparse.ArgumentParser:
        """Flags by the function's parameters: a tuple is a list of what its first default is."""
        own = parse(f"{self.question}\n\n{inspect.getdoc(self.run) or ''}\n\nMinutes: {self.minutes}.")
        own.prog = f"python -m benchmarks {self.run.__name__}"
        own.formatter_class = argparse.RawDescriptionHelpFormatter
        own.add_argument("--write", action="store_true", help="tables and pictures into benchmarks/results/")
        for name, parameter in inspect.signature(self.run).parameters.items():
            flag, default = f"--{name.replace('_', '-')}", parameter.default
            if isinstance(default, bool):
                own.add_argument(flag, action="store_true")
            else:
                kind = _listed(default) if isinstance(default, tuple) else type(default)
                shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
                given = {"type": kind, "default": default, "metavar": "X", "help": f"({shown})"}
                own.add_argument(flag, action=_Once, **given)
        return own


REGISTRY: dict[str, Bench] = {}
"""By name, those whose modules are imported."""


def bench(question: str, *, minutes: str, aims: str) -> Callable[[F], F]:
    """Enter a function as a benchmark under its name.

    Args:
        question: that it answers.
        minutes: on 2 cores; a star if other work ran beside it, so fewer on a quiet machine.
        aims: what `--check` judges, in words.
    """

    def register(function: F) -> F:
        assert function.__name__ not in REGISTRY, f"{function.__name__}: another benchmark has this name"
        REGISTRY[function.__name__] = Bench(function, question, minutes, aims)
        return function

    return register


def index() -> dict[str, str]:
    """The modules of all benchmarks by name, found in their sources: a bare machine cannot import all."""
    found = {}
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        module = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r"^@bench\(.*?^def (\w+)\(", text, re.MULTILINE | re.DOTALL):
            found[name] = module
    return found


def load(name: str) -> Bench:
    """A benchmark by name, its module imported."""
    importlib.import_module(index()[name])
    return REGISTRY[name]


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a benchmark: print tables and aims, write what flags say; the exit status."""
    own = load(name)
    options = own.parser().parse_args(arguments)
    flags = {flag: value for flag, value in vars(options).items() if flag not in ("json", "check", "write")}
    try:
        found = own.run(**flags)
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    for place, text in found.tables.items():
        print(f"\n{text}\n", flush=True)
        if options.write:
            page, _, part = place.partition(" ")
            put_figures(RESULTS / page, part, f"\n{text}\n\n")
    for path, draw in found.pictures.items() if options.write else ():
        draw(REPOSITORY / path)
    return finish(options, found.figures, found.aims)


class _Once(argparse.Action):
    """Refuses a flag that is given again: a list is one value."""

    def __call__(self, parser: Any, options: Any, value: Any, option: str | None = None) -> None:
        if getattr(options, self.dest) is not self.default:
            parser.error(f"{option} is given twice: give a list, as {option}=A,B")
        setattr(options, self.dest, value)


def _listed(default: tuple[Any, ...]) -> Callable[[str], tuple[Any, ...]]:
    kind = type(default[0]) if default else str

    def words(text: str) -> tuple[Any, ...]:
        found = tuple(kind(word) for word in text.split(","))
        if kind is str and default and (unknown := [word for word in found if word not in default]):
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(default)}")
        return found

    return words


def parse(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark and verification."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit with 1 if an aim is missed")
    return parser


def finish(options: argparse.Namespace, figures: Any, aims: Sequence[Aim]) -> int:
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


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, without a line's end behind it; cells are shown as `str` does.

    Raises:
        ValueError: a row has more or fewer cells than there are heads.
    """
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(f"a row of {len(row)} cells under {len(heads)} heads: {row}")
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Iterable[object]) -> str:
    return "|" + "".join(f" {text} |" if (text := str(cell)) else " |" for cell in cells)


def say(text: object) -> None:
    """Print at once, so that a long benchmark can be watched."""
    print(text, flush=True)


def side_by_side(function: Callable[[T], U], items: Iterable[T], jobs: int = 0) -> list[U]:
    """A function of each item, in so many processes; one for each core if 0."""
    with ProcessPoolExecutor(jobs or os.cpu_count()) as pool:
        return list(pool.map(function, items))


def percent_longer(one: float, other: float) -> float:
    """By how many per cent the first is longer than the other."""
    return 100 * (one / other - 1)


def median_and_p99(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    import numpy as np

    median, p99 = np.percentile(np.asarray(seconds) * 1e6, [50, 99])
    return {"median_us": round(float(median), 1), "p99_us": round(float(p99), 1)}


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


def on_ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float,
    env: Mapping[str, str] = MappingProxyType({"JAX_PLATFORMS": "cpu"}),
) -> Any:
    """What a function gives on rank 0 of so many ranks that the launcher starts, each of which calls it.

    Without any rank it is called in a process of its own. Arguments and result travel as JSON; the ranks'
    folder is gone afterwards.

    Raises:
        RuntimeError: a rank failed; with what the launcher said.
        subprocess.TimeoutExpired: it took longer than so many seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        launch = [*LAUNCH, "-n", str(count), "--directory", folder, "-m"] if count else []
        what = ["--rank", str(file), function.__module__, function.__name__, json.dumps(arguments)]
        output_of([sys.executable, "-m", *launch, "benchmarks", *what], seconds, env)
        return json.loads(file.read_text(encoding="utf-8"))


def rank(file: str, module: str, function: str, arguments: str) -> None:
    found = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    if "RRFP_RANK" in os.environ:
        from rrfp_jax.runtime.run.join import join

        join().gather("the end of the benchmark", None)  # nobody leaves before all are done
    if os.environ.get("RRFP_RANK", "0") == "0":
        Path(file).write_text(json.dumps(found), encoding="utf-8")


def machine() -> dict[str, Any]:
    """Versions and devices that figures belong to; `driver` is the GPU driver's, or None."""
    import jax

    devices = jax.local_devices()
    return {
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "python": platform.python_version(),
        "devices": [f"{d.platform} {d.device_kind}" for d in devices],
        "platform": str(devices[0].client.platform_version),
        "driver": _driver(),
        "cores": os.cpu_count(),
    }


def _driver() -> str | None:
    """As nvidia-smi tells: card, driver, memory."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
