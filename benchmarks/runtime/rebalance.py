"""Layers that move while training: what it gains, what it costs, and whether it leaves balanced runs alone.

    python -m benchmarks.runtime.rebalance [--json=FILE] [--check] [--quick] [--part=training|alone|paced]

*training*: a Trainer of 16 equal layers on 4 stages, whose tasks last as long as their layers are told to;
stage 2 is 1.5 x slower, or the layers are cut 2, 4, 8, 2. `rebalance="auto"` moves them. Beside it stands the
best split in hindsight: of all splits the three that are fastest in the simulator by the true times, run. The
pause is what the steps from the decision to the move, and the move, took longer than usual steps would have,
in steps. Then layers move to and fro ten times, and losses are compared to the bit with a run that stays.

*alone*: 20 runs of 200 steps with jitter only (J1 to J3), simulated, and one of 80 steps that is trained: no
layer may move. What watching costs is reckoned for 1,000 steps: one first look, and the later ones as often.

*paced*: 8 paced stages, 64 layers, a stage that is slow or a last layer that is heavy, in steps of families
that others have measured (`sim/families.py`): 1F1B and BFW at equal limits, cut evenly and as it was decided
by simulated steps of 1F1B, each with draws of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeAlias

from benchmarks.harness import Aim, finish, parse, parts_flag
from benchmarks.runtime.layer_paced import trainer
from benchmarks.runtime.paced import PacedCase
from benchmarks.studies.virtual_training import Machine, train
from rrfp_jax.sim import families
from rrfp_jax.sim.splits import MOST

LAYERS, STAGES, MICROBATCHES, SECONDS = 16, 4, 12, 0.004
EVEN = (4, 4, 4, 4)
CASES = {"stage 2 is 1.5 x slower": ((1, 1, 1.5, 1), EVEN), "cut badly": ((1, 1, 1, 1), (2, 4, 8, 2))}
STEPS, HINDSIGHT_STEPS, AFTER = 48, 5, 8
"""Of a run that moves, of one that stays, and of those those that are judged."""

PACED_STAGES, PACED_LAYERS, PACED_MICROBATCHES = 8, 64, 32
DECIDED = 200
"""Simulated steps in which it is decided; in fewer some moves would not be worth their pause."""

PACED_SECONDS = families.FORWARD_SECONDS * PACED_STAGES / PACED_LAYERS
"""Of a layer, so that families' tasks and transfers are in proportion."""

Imbalance: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""How heavy layers are, and how slow stages."""

SLOW_STAGE: Imbalance = ([1.0] * PACED_LAYERS, [1, 1, 1, 1.5, 1, 1, 1, 1])
HEAVY_HEAD: Imbalance = ([1.0] * (PACED_LAYERS - 1) + [5.0], [1] * PACED_STAGES)
PACED: dict[str, tuple[str, Imbalance]] = {
    **{
        f"{family}, a stage 1.5 x slower": (family, SLOW_STAGE)
        for family in ("constant", "log-normal", "length-imbalanced", "slow-link")
    },
    **{f"{family}, a head of 5 layers": (family, HEAVY_HEAD) for family in ("constant", "log-normal")},
}
"""By name a family, and what is unbalanced."""

LEVELS = ("J1", "J2", "J3")


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A run that moved layers by itself: seconds of a step, and the pause in steps."""

    case: str
    before: float
    after: float
    split: Sequence[int]
    hindsight: float
    best: Sequence[int]
    pause: float

    def __str__(self) -> str:
        return (
            f"{self.case}: {self.before:.3f} s a step, then {self.after:.3f} s with {self.split}; in "
            f"hindsight {self.hindsight:.3f} s with {self.best}; pause {self.pause:.1f} steps"
        )


def moved(case: str) -> Moved:
    """Train with a move, and with the best splits in hindsight."""
    slowness, split = CASES[case]
    made = trainer([SECONDS] * LAYERS, slowness, split, MICROBATCHES, rebalance="auto")
    steps = [(report, made.split) for report in made.steps(STEPS)]
    first = [report for report, own in steps if own == [*split]]
    last = [report for report, _ in steps[-AFTER:]]
    usual = median(report.wall_seconds for report in first[2:])
    # The report of the first step with the new split includes the move, which comes before it.
    beside = [report.wall_seconds for report, _ in steps[2 : len(first) + 1]]
    slower = [wall - usual for wall in beside[:-1]] + [beside[-1] - median(r.wall_seconds for r in last)]
    best, seconds = hindsight(slowness)
    return Moved(
        case=case,
        before=median(report.step_seconds for report in first[2:]),
        after=median(report.step_seconds for report in last),
        split=made.split,
        hindsight=seconds,
        best=best,
        pause=sum(wall for wall in slower if wall > 0.02 * usual) / usual,
    )


def hindsight(slowness: Sequence[float]) -> tuple[Sequence[int], float]:
    """The fastest split, and what a step takes with it (s), as it was run."""
    machine = Machine([SECONDS] * LAYERS, lambda step: slowness, STAGES, microbatches=MICROBATCHES)
    ranked = sorted(_splits(LAYERS, STAGES), key=lambda split: machine.step(0, split).trace.makespan)
    made = trainer([SECONDS] * LAYERS, slowness, ranked[0], MICROBATCHES)
    found = []
    for split in ranked[:3]:
        made.split = split
        steps = [report.step_seconds for report in made.steps(HINDSIGHT_STEPS)]
        found.append((median(steps[1:]), split))
    seconds, best = min(found)
    return best, seconds


def _splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(1, layers - stages + 2):
        for rest in _splits(layers - first, stages - 1):
            yield (first, *rest)


def losses_to_and_fro() -> tuple[list[float], list[float]]:
    """Losses of a run whose layers move ten times, always back before a step, and of one that stays."""
    made = [trainer([0.0] * LAYERS, [1] * STAGES, EVEN, 4) for _ in range(2)]
    moving, staying = made
    first = [next(one.steps(1)).loss for one in made]
    found = first[:1]
    for _ in range(5):
        moving.split = [2, 6, 3, 5]
        moving.split = EVEN
        found += [report.loss for report in moving.steps(1)]
    return found, [*first[1:], *(report.loss for report in staying.steps(5))]


def moves_in_jitter(runs: int, steps: int) -> int:
    """Moves in simulated runs that nothing is wrong with."""
    found = 0
    for run in range(runs):
        seconds, level = [SECONDS] * 2 * LAYERS, LEVELS[run % len(LEVELS)]
        machine = Machine(seconds, lambda step: [1] * STAGES, level=level, seed=run)
        found += len(train(machine, [8] * STAGES, steps).moves)
    return found


def watching(steps: int) -> dict[str, float]:
    """A trained run with jitter only: its moves, and what looks cost (s)."""
    made = trainer([SECONDS] * LAYERS, [1] * STAGES, EVEN, MICROBATCHES, level="J2", rebalance="auto")
    watch = made._stepper._rebalancing  # a Trainer has no face for this
    assert watch is not None
    costs, reports, before = [], [], 0.0
    for report in made.steps(steps):
        costs.append(watch.watched_seconds - before)
        before = watch.watched_seconds
        reports.append(report)
    looks = sorted(costs, reverse=True)
    usual = median(costs)
    later = median(cost for cost in looks[1:4])  # three more in so many steps
    step = median(report.wall_seconds for report in reports)
    whole = looks[0] + (1000 / MOST + 3) * later + 1000 * usual
    return {
        "moves": float(made.split != [*EVEN]),
        "first_look": looks[0],
        "later_look": later,
        "every_step": usual,
        "step": step,
        "share_percent": 100 * whole / (1000 * step),
    }


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A paced run: what a step took (s)."""

    family: str
    schedule: str
    split: Sequence[int]
    seconds: float


def paced(name: str) -> list[Cell]:
    """1F1B and BFW, cut evenly and as it was decided."""
    family, (layers, slowness) = PACED[name]
    even = (PACED_LAYERS // PACED_STAGES,) * PACED_STAGES
    machine = Machine(
        [PACED_SECONDS * layer for layer in layers],
        lambda step: slowness,
        PACED_STAGES,
        estimates=[1.0] * PACED_LAYERS,
        schedule="1f1b",
        microbatches=PACED_MICROBATCHES,
        limit=PACED_STAGES,
        family=families.by_name(family),
    )
    moves = train(machine, even, DECIDED).moves
    decided = moves[-1][1].split if moves else even
    found = []
    for split in (even, decided):
        workload = machine.workload(0, split)
        for schedule in ("1f1b", "bfw"):
            case = PacedCase(workload=workload, schedule=schedule, limit=PACED_STAGES)
            cell = Cell(family=name, schedule=schedule, split=split, seconds=median(case.run().steps))
            print(f"{name}: {schedule} with {','.join(map(str, split))}: {cell.seconds:.3f} s", flush=True)
            found.append(cell)
    return found


def gains(cells: Sequence[Cell]) -> dict[str, float]:
    """By how many per cent a step is shorter than with 1F1B and an even cut."""
    base, schedule, balanced, both = (cell.seconds for cell in cells)
    found = {"schedule": schedule, "rebalancing": balanced, "both": both}
    return {name: 100 * (1 - seconds / base) for name, seconds in found.items()}


def _training(quick: bool) -> tuple[dict[str, Any], list[Aim]]:
    found = [moved(case) for case in ([*CASES][:1] if quick else CASES)]
    print(*found, sep="\n", flush=True)
    moving, staying = losses_to_and_fro()
    behind = [100 * (one.after / one.hindsight - 1) for one in found]
    return {"moved": [asdict(one) for one in found], "losses": [moving, staying]}, [
        Aim("longer than the best split in hindsight, most", max(behind), 3.0, "%"),
        Aim("pause, longest", max(one.pause for one in found), 2.0, "steps"),
        Aim("losses that ten moves change", sum(map(float.__ne__, moving, staying)), 0, ""),
    ]


def _alone(quick: bool) -> tuple[dict[str, Any], list[Aim]]:
    simulated, real = moves_in_jitter(2 if quick else 20, 40 if quick else 200), watching(20 if quick else 80)
    print(f"a first look {real['first_look']:.3f} s, a later one {real['later_look']:.4f} s", flush=True)
    return {"moves_simulated": simulated, "trained": real}, [
        Aim("moves in runs with jitter only", simulated + real["moves"], 0, ""),
        Aim("watching, of 1,000 steps", real["share_percent"], 0.2, "%"),
    ]


def _paced(quick: bool) -> tuple[dict[str, Any], list[Aim]]:
    found = {name: paced(name) for name in ([*PACED][:1] if quick else PACED)}
    figures = {family: gains(cells) for family, cells in found.items()}
    for family, own in figures.items():
        told = ", ".join(f"{name} {value:.1f} %" for name, value in own.items())
        print(f"{family}: shorter by {told}", flush=True)
    least = min(own["both"] - max(own["schedule"], own["rebalancing"]) for own in figures.values())
    cells = [asdict(cell) for own in found.values() for cell in own]
    return {"cells": cells, "gains": figures}, [
        Aim("both gain more than either, at least by", least, 0.0, "% of a step", at_least=True)
    ]


PARTS: dict[str, Callable[[bool], tuple[dict[str, Any], list[Aim]]]] = {
    "training": _training,
    "alone": _alone,
    "paced": _paced,
}


def main() -> int:
    """Run the parts, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="one case of each part, and fewer runs")
    parts_flag(parser, PARTS)
    options = parser.parse_args()
    figures, aims = {}, []
    for name in options.part or PARTS:
        figures[name], own = PARTS[name](options.quick)
        aims += own
    return finish(options, figures, aims)


if __name__ == "__main__":
    sys.exit(main())
