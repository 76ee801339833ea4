"""The three numbers of a machine, fitted to the rows of `FITTED` and to nothing else.

What is small is the mean square of log(simulated / paper's) over the eight rows and four columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.studies.paper.published import FITTED, ROWS, SCHEDULES, Row
from benchmarks.studies.paper.steps import paper, seconds
from benchmarks.studies.paper.workloads import Machine

FITTED_MACHINES = Path(__file__).parent / "fitted.json"
DIFFERENCE, LONGEST, SHARES, GAIN = 1.1, 0.5, (1.0, 0.3), 0.005
"""Factor for slopes; most that a step changes a logarithm; what parts of a step are tried; the share of the
mean square that a step must gain."""
SEEDS = 1
"""Iterations that are simulated for each row while fitting."""


class Form(NamedTuple):
    """Which three numbers are fitted, and from where; the others are as in `start`."""

    free: tuple[str, str, str]
    start: Machine


FORMS: Mapping[str, Form] = {
    "lengths": Form(("flops", "link", "spread"), Machine(50e12, 3e9, 0.6)),
    "exchanges": Form(("flops", "link", "exchange"), Machine(50e12, 3e9, 0.25, 0.01)),
    "layers": Form(("flops", "layer", "exchange"), Machine(60e12, 3e9, 0.25, 0.01, 0.0003, even=True)),
}
"""In the order in which they were tried.

1. Lengths alone cannot explain the paper's 1F1B.
2. So synchronous messages have a price, and lengths vary as DIP measured: 4.15 x between the lightest and the
   heaviest of about 200 is sd 0.25. Then small models come out too fast and large ones too slow.
3. So a layer has a price beside its operations, stages have equal times whatever their layers, and the link
   is as in `start` of the first.

The third was chosen after the held-out rows of the second had been seen, so for its form they are not blind;
its numbers are fitted to the eight rows all the same.
"""


def errors(machine: Machine, seeds: int, row: Row) -> list[float]:
    """log(simulated / paper's) of each column."""
    how, columns = paper(row, machine), zip(SCHEDULES, row.seconds, strict=True)
    return [math.log(seconds(row, machine, how[name], seeds) / theirs) for name, theirs in columns]


class Fitted(NamedTuple):
    """The best machine found, and the root of the mean square over the fitted rows."""

    machine: Machine
    rms: float


def fit(form: Form, pool: Executor, told: Callable[[str], None]) -> Fitted:
    """The best machine of a form."""
    rows = sorted((row for row in ROWS if row.name in FITTED), key=lambda row: -row.pp * row.batch)

    def residuals(machine: Machine) -> list[float]:
        found = pool.map(partial(errors, machine, SEEDS), rows)
        return [error for own in found for error in own]

    return least_squares(residuals, form, told)


def least_squares(
    residuals: Callable[[Machine], list[float]], form: Form, told: Callable[[str], None]
) -> Fitted:
    """Where the residuals' mean square is least, by Gauss and Newton in the logarithms of what is free."""
    best, at = form.start, np.array(residuals(form.start))
    while True:
        moved = [residuals(_scaled(best, {name: DIFFERENCE})) for name in form.free]
        slopes = (np.array(moved) - at).T / math.log(DIFFERENCE)
        step = np.clip(np.linalg.lstsq(slopes, -at, rcond=None)[0], -LONGEST, LONGEST)
        for share in SHARES:
            factors = dict(zip(form.free, np.exp(share * step), strict=True))
            new = np.array(residuals(candidate := _scaled(best, factors)))
            if new @ new < (1 - GAIN) * (at @ at):
                break
        else:
            return Fitted(best, float(np.sqrt(np.mean(at**2))))
        best, at = candidate, new
        told(f"rms {np.sqrt(np.mean(at**2)):.4f}  {best}")


def _scaled(machine: Machine, factors: Mapping[str, float]) -> Machine:
    changed: dict[str, Any] = {name: float(getattr(machine, name) * by) for name, by in factors.items()}
    return replace(machine, **changed)


def write(found: Mapping[str, Fitted]) -> None:
    """Keep them for the other commands, by form."""
    kept = {
        form: {name: _rounded(value) for name, value in {**asdict(one.machine), "rms": one.rms}.items()}
        for form, one in found.items()
    }
    FITTED_MACHINES.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _rounded(value: float | bool) -> float | bool:
    return value if isinstance(value, bool) else float(f"{value:.4g}")


def fitted() -> dict[str, Fitted]:
    """Those that were kept."""
    kept = json.loads(FITTED_MACHINES.read_text(encoding="utf-8"))
    return {form: Fitted(rms=own.pop("rms"), machine=Machine(**own)) for form, own in kept.items()}
