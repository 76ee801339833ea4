"""The paper's smaller tables by the same fitted machine: breakdown, jitter, hints, scaling, limits.

Where the paper does not say which model a table has, it is our guess: Qwen3-4B + ViT-Big with TP 1, PP 8 and
192 microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from benchmarks.harness import table
from benchmarks.studies.paper.published import Row
from benchmarks.studies.paper.steps import How, paper, run
from benchmarks.studies.paper.workloads import Machine, workload
from rrfp_jax.sim.disturbances import Jittered, LateReadiness
from rrfp_jax.trace.jitter import LEVELS

QWEN_4B = "Qwen3-4B + ViT-Big"
UNKNOWN = (0.0, 0.0, 0.0, 0.0)
"""Step times that the paper does not have."""
USUAL = Row(QWEN_4B, 1, 8, 1, 192, UNKNOWN)

BREAKDOWN = {
    1: ((2.581, 0.859), (1.788, 1.020)),
    2: ((2.644, 0.946), (1.824, 1.026)),
    4: ((2.750, 0.938), (1.942, 1.054)),
}
"""Table 3, PP 16, batch 32: by TP, total and compute (s), of 1F1B and of RRFP."""

JITTER = {"J0": (7.19, 4.45), "J1": (7.39, 4.53), "J2": (8.00, 4.75), "J3": (8.49, 4.96)}
"""Table 6, TP 2, PP 8, batch 96: 1F1B and BF (s)."""

HINTS = {"bf": 0.0, "fb": 0.0045, "b-priority": 0.0084, "f-priority": 0.0492}
"""Table 7: by which share a step takes longer than with BF."""

SCALING = {
    ("Qwen3-1.7B + ViT-H", 1, 192): {4: 1.07, 8: 1.94, 16: 2.01},
    (QWEN_4B, 2, 64): {4: 1.03, 8: 1.64, 16: 1.72},
    ("LLaMA3-8B + ViT-5B", 1, 64): {8: 1.79, 16: 2.13, 32: 2.31},
}
"""Table 8: 1F1B's time over BF's by PP, for a model, TP and batch."""

LIMITS = (4, 8, 16, 32, 48)
LATE = (0.0001, 0.001, 0.005)
"""Seconds by which readiness is noticed late."""


@dataclass(frozen=True)
class Figure:
    """One figure of a table; `theirs` None where the paper has none."""

    table: str
    what: str
    simulated: float
    theirs: float | None


def breakdown(machine: Machine) -> list[Figure]:
    """Seconds that a stage computes, and in which it does not, in the mean."""
    found = []
    for tp, both in BREAKDOWN.items():
        row = Row(QWEN_4B, tp, 16, 1, 32, UNKNOWN)
        for name, (total, compute) in zip(("1F1B", "BF"), both, strict=True):
            trace = run(workload(row, machine, 0), paper(row, machine)[name])
            busy = fmean(trace.busy(stage) for stage in range(trace.stages))
            what, blocks = f"TP {tp}, {name}", 1 - busy / trace.makespan
            found += [
                Figure("breakdown", f"{what}: total, s", trace.makespan, total),
                Figure("breakdown", f"{what}: share that blocks", blocks, 1 - compute / total),
            ]
    return found


def jitter(machine: Machine) -> list[Figure]:
    """How much longer a step gets by injected delays."""
    row = Row(QWEN_4B, 2, 8, 1, 96, UNKNOWN)
    work, found = workload(row, machine, 0), []
    for place, name in enumerate(("1F1B", "BF")):
        plain = run(work, paper(row, machine)[name]).makespan
        for level in LEVELS:
            delayed = partial(Jittered, level=LEVELS[level], seed=0)
            seconds = run(work, paper(row, machine)[name], delayed).makespan
            theirs = JITTER[level][place] / JITTER["J0"][place]
            found.append(Figure("jitter", f"{name}, {level}: over J0", seconds / plain, theirs))
    return found


def hints(machine: Machine) -> list[Figure]:
    """Other hints over BF."""
    work = workload(USUAL, machine, 0)
    times = {name: run(work, How(name, "serial")).makespan for name in HINTS}
    return [
        Figure("hints", f"{name} over bf", times[name] / times["bf"], 1 + more)
        for name, more in HINTS.items()
    ]


def scaling(machine: Machine) -> list[Figure]:
    """1F1B's time over BF's with more stages."""
    found = []
    for (name, tp, batch), by_stages in SCALING.items():
        for stages, theirs in by_stages.items():
            row = Row(name, tp, stages, 1, batch, UNKNOWN)
            work = workload(row, machine, 0)
            slow, fast = (run(work, paper(row, machine)[which]).makespan for which in ("1F1B", "BF"))
            found.append(Figure("scaling", f"{name}, TP {tp}, PP {stages}", slow / fast, theirs))
    return found


def limits(machine: Machine) -> list[Figure]:
    """BF's time by its limit, over that with the largest; the paper saw no gain from 16 on."""
    work = workload(USUAL, machine, 0)
    times = {limit: run(work, How("bf", "serial", limit)).makespan for limit in LIMITS}
    return [Figure("limits", f"{n} in flight over 48", times[n] / times[48], None) for n in LIMITS]


def late(machine: Machine) -> list[Figure]:
    """BF's time if every arrival is noticed late, over that at once."""
    work, found = workload(USUAL, machine, 0), []
    plain = run(work, How("bf", "serial")).makespan
    for seconds in LATE:
        slow = run(work, How("bf", "serial"), partial(LateReadiness, seconds=seconds))
        found.append(Figure("late", f"noticed {1e3 * seconds:g} ms late", slow.makespan / plain, None))
    return found


TABLES = (breakdown, jitter, hints, scaling, limits, late)


def markdown(figures: Sequence[Figure]) -> str:
    """All of them, with the paper's beside them."""
    cells = []
    for one in figures:
        theirs = "-" if one.theirs is None else f"{one.theirs:.2f}"
        cells.append((one.table, one.what, f"{one.simulated:.2f}", theirs))
    return table(["table", "figure", "simulated", "paper"], cells)
