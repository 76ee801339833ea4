"""All rivals in JAX beside this runtime in one run: steps of one model, in turns, in living processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import REPOSITORY, Found, bench, on_ranks, say, table
from benchmarks.rivals.calls import call_costs, calls_table
from benchmarks.rivals.living import Living

SPECTRAX = REPOSITORY / ".venv-spectrax"
EQUAL = 1e-4
"""How far losses of the same values may differ, of themselves."""

CALLS_SECONDS = 300.0

TURN_SECONDS = 0.4
"""Of the hand-written loop: all systems run as many steps a turn as it does in this time."""


@dataclass(frozen=True)
class Row:
    """A system in the table; `pads` if it pads microbatches of several lengths to the longest."""

    label: str
    module: str = "one_process"
    pads: bool = False
    only: str = ""
    """Cases that begin with this alone."""


BESIDE = "by-hand"
"""What all others are compared with."""

ROWS: Mapping[str, Row] = {
    "by-hand": Row("1F1B by hand"),
    "by-hand-fused": Row("the same, last stage's F and B one program"),
    "1f1b": Row("ours, `1f1b`"),
    "bf": Row("ours, `bf`"),
    "bf-ready": Row('ours, `bf`, `dispatch="ready"`'),
    "bf-whole": Row("ours, `bf`, a program a stage"),
    "1f1b-whole": Row("ours, `1f1b`, a program a stage"),
    "1f1b-remat": Row('ours, `1f1b`, `remat="full"`'),
    "spmd": Row("SPMD: one jit, `shard_map`, `ppermute`; recomputes", pads=True),
    "spectrax": Row("SpectraX 0.1.4, `Std1F1B`; recomputes", "spectrax_step", pads=True),
    "jaxpp": Row("JaxPP, `Std1F1B`, one process", "jaxpp_step", pads=True),
    "named": Row("1F1B by hand, a mesh a stage, named", only="empty"),
    "set-mesh": Row("1F1B by hand, `jax.set_mesh` around every call", only="empty"),
}
COLUMNS = ("real-8", "real-32", "lengths-8", "lengths-32", "empty-8", "empty-32")
TASKS = {"empty-8": 64, "empty-32": 256}
"""Forwards and backwards of a step, of those cases of which the time of a task is told."""


@dataclass(frozen=True)
class Cell:
    """A system in a case: seconds of a step by round, and by how many bytes its process grew in one."""

    seconds: tuple[float, ...]
    bytes: int | None

    @property
    def median(self) -> float:
        return median(self.seconds)


Cells = Mapping[str, Mapping[str, Cell]]
"""By case, then by system."""


@bench(
    "Steps of one model by all rivals in JAX, in turns: how long, beside a loop by hand?",
    minutes="15 *",
    aims="none yet",
)
def rivals(
    rounds: int = 9,
    systems: tuple[str, ...] = tuple(ROWS),
    cases: tuple[str, ...] = COLUMNS,
    jaxpp: str = "",
    programs: str = "",
) -> Found:
    """A GPT of 4 blocks on 4 stages: one process a system, 4 virtual CPU devices, AdamW, no rematerialisation
    but a system's own. *real*: 128 wide, 2 x 128 tokens a microbatch; *lengths*: 256, 64, 128 and 64 of them;
    *empty*: 8 wide, 8 tokens; then the number of microbatches. The losses of the first 4 steps, from given
    parameters, must be equal. Then everybody trains for a moment in turns, round by round; who does not,
    waits without using the CPU. Ratios are to the loop by hand in the same round. `--jaxpp=FOLDER` has
    JaxPP's sources; `make rivals` installs SpectraX. `--programs=FOLDER` keeps compiled programs for another
    run: most of the time goes into compiling."""
    load = os.getloadavg()[0]
    missing = {name: f"not run: {why}" for name in systems if (why := why_not(name, jaxpp))}
    names = [BESIDE, *(name for name in systems if name != BESIDE and name not in missing)]
    ended = dict[str, str]()
    cells = {}
    with TemporaryDirectory() if not programs else nullcontext(str(Path(programs).resolve())) as cache:
        for case in cases:
            own = [name for name in names if case.startswith(ROWS[name].only)]
            cells[case] = in_turns(case, own, rounds, jaxpp, cache, ended)
            say(f"{case}: " + ", ".join(f"{name} {1e3 * c.median:.1f} ms" for name, c in cells[case].items()))
    figures = {case: {name: asdict(cell) for name, cell in own.items()} for case, own in cells.items()}
    calls = on_ranks(0, call_costs, seconds=CALLS_SECONDS)
    notes = [f"{rounds} rounds; load of the machine before: {load:.1f}."]
    notes += [f"Ended with an error: {who}: {why}." for who, why in ended.items()]
    tables = {
        "side by side": "\n\n".join([steps_table(cells, missing), *notes]),
        "bytes of a step": bytes_table(cells),
        "microseconds a task": tasks_table(cells),
        "microseconds a call": calls_table(calls),
    }
    return Found(
        {"cells": figures, "calls": calls, "not run": missing, "ended": ended, "load": load},
        tables={f"rivals.md {name}": text for name, text in tables.items() if text},
    )


def why_not(system: str, jaxpp: str) -> str:
    """Why a system cannot run here; empty if it can."""
    if system == "spectrax" and not (SPECTRAX / ".installed").exists():
        return f"there is no {SPECTRAX.name}: `make rivals`"
    if system == "jaxpp" and not jaxpp:
        return "on no registry: `--jaxpp=FOLDER` names its sources"
    return ""


def started(system: str, case: str, jaxpp: str, cache: str) -> Living:
    """The process of a system, which still has to say that it is ready; it keeps programs in a folder."""
    python = str(SPECTRAX / "bin" / "python") if system == "spectrax" else sys.executable
    folder = Path(jaxpp).resolve() / "src" if system == "jaxpp" else ""
    return Living(python, f"benchmarks.rivals.{ROWS[system].module}", system, case, str(folder), cache)


def in_turns(
    case: str, systems: Sequence[str], rounds: int, jaxpp: str, cache: str, ended: dict[str, str]
) -> dict[str, Cell]:
    """All systems on a case; they start one after the other, as many programs are the same. Of other people's
    systems, one that ends with an error before its first turn is left out, and noted.

    Raises:
        RuntimeError: a system ended, has other losses, or another version of JAX.
    """
    with ExitStack() as stack:
        running, ready = dict[str, Living](), dict[str, Any]()
        for name in systems:
            living = stack.enter_context(started(name, case, jaxpp, cache))
            try:
                ready[name] = living.answer()
            except RuntimeError as error:
                if ROWS[name].module == "one_process":
                    raise
                ended[f"{name}, {case}"] = str(error).strip().splitlines()[-1]
            else:
                running[name] = living
        check_equal(case, ready)
        count = max(1, round(TURN_SECONDS / running[BESIDE].seconds(1)))
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for number in range(rounds):
            order = list(running)
            at = number % len(order)
            for name in (*order[at:], *order[:at]):  # so that none always follows the same
                seconds[name].append(running[name].seconds(count))
        return {name: Cell(tuple(seconds[name]), own.bytes()) for name, own in running.items()}


def check_equal(case: str, ready: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse systems that compute something else.

    Raises:
        RuntimeError: a loss of a system, or its version of JAX, is not that of the loop by hand.
    """
    known = ready[BESIDE]
    for name, own in ready.items():
        if own["jax"] != known["jax"]:
            raise RuntimeError(f"{name} runs with jax {own['jax']}, {BESIDE} with {known['jax']}")
        pairs = zip(own["losses"], known["losses"], strict=True)
        if not all(abs(one - other) <= EQUAL * abs(other) for one, other in pairs):
            raise RuntimeError(f"{case}: losses of {name} {own['losses']}, of {BESIDE} {known['losses']}")


def ratios(cells: Mapping[str, Cell], system: str) -> list[float]:
    """A system's steps over those of the loop by hand in the same round."""
    pairs = zip(cells[system].seconds, cells[BESIDE].seconds, strict=True)
    return [one / other for one, other in pairs]


def steps_table(cells: Cells, missing: Mapping[str, str]) -> str:
    """Milliseconds of a step, and the ratio with its quartiles."""

    def shown(case: str, system: str) -> str:
        if system not in cells[case]:
            return ""
        took, over = 1e3 * cells[case][system].median, ratios(cells[case], system)
        low, _, high = quantiles(over, n=4) if len(over) > 1 else over * 3
        return f"{took:.{0 if took >= 100 else 1}f}: {median(over):.2f} ({low:.2f}-{high:.2f})"

    rows = []
    for name, row in ROWS.items():
        if name in missing:
            rows.append((row.label, missing[name], *[""] * (len(cells) - 1)))
        elif any(name in own for own in cells.values()):
            pads = " (pads)" if row.pads else ""
            rows.append((row.label, *(shown(c, name) + pads * c.startswith("lengths") for c in cells)))
    return table(["ms a step: times the loop by hand (quartiles)", *cells], rows)


def bytes_table(cells: Cells) -> str:
    """MiB by which processes grow in a step, of cases that compute; empty without any."""
    known = {case: own for case, own in cells.items() if case not in TASKS}

    def shown(cell: Cell | None) -> str:
        return "" if cell is None or cell.bytes is None else f"{cell.bytes / 2**20:.0f}"

    return _by_system("MiB", known, lambda case, cell: shown(cell))


def tasks_table(cells: Cells) -> str:
    """Microseconds of a task: of a whole step, over its forwards and backwards; empty without such cases."""
    known = {case: own for case, own in cells.items() if case in TASKS}

    def shown(case: str, cell: Cell | None) -> str:
        return "" if cell is None else f"{1e6 * cell.median / TASKS[case]:.0f}"

    return _by_system("us a task", known, shown)


def _by_system(what: str, cells: Cells, shown: Callable[[str, Cell | None], str]) -> str:
    rows = [
        (row.label, *(shown(case, own.get(name)) for case, own in cells.items()))
        for name, row in ROWS.items()
        if any(name in own for own in cells.values())
    ]
    return table([what, *cells], rows) if rows else ""
