"""Layers that move while training: what it gains, what it costs, and whether it leaves balanced runs
alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from benchmarks.harness import Aim, Found, bench, say
from benchmarks.layers import Machine, train, trainer
from benchmarks.paced import PacedCase
from rrfp_jax.sim.splits import MOST
from rrfp_jax.studies import families

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

SLOW_STAGE = ([1.0] * PACED_LAYERS, [1, 1, 1, 1.5, 1, 1, 1, 1])
HEAVY_HEAD = ([1.0] * (PACED_LAYERS - 1) + [5.0], [1] * PACED_STAGES)
PACED: dict[str, tuple[str, tuple[Sequence[float], Sequence[float]]]] = {
    **{
        f"{family}, a stage 1.5 x slower": (family, SLOW_STAGE)
        for family in ("constant", "log-normal", "length-imbalanced", "slow-link")
    },
    **{f"{family}, a head of 5 layers": (family, HEAVY_HEAD) for family in ("constant", "log-normal")},
}
"""By name a family, how heavy layers are, and how slow stages."""

LEVELS = ("J1", "J2", "J3")


def moved(case: str) -> dict[str, Any]:
    """Train with a move, and with the best splits in hindsight: seconds of a step, the pause in steps."""
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
    return {
        "case": case,
        "before": median(report.step_seconds for report in first[2:]),
        "after": median(report.step_seconds for report in last),
        "split": made.split,
        "hindsight": seconds,
        "best": best,
        "pause": sum(wall for wall in slower if wall > 0.02 * usual) / usual,
    }


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


def paced(name: str) -> list[dict[str, Any]]:
    """1F1B and BFW, cut evenly and as it was decided: seconds of a step."""
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
            cell = {"family": name, "schedule": schedule, "split": split}
            found.append(cell | {"seconds": median(case.run().steps)})
            say(found[-1])
    return found


Part = tuple[dict[str, Any], list[Aim]]


def _training(quick: bool) -> Part:
    found = [moved(case) for case in ([*CASES][:1] if quick else CASES)]
    say(found)
    moving, staying = losses_to_and_fro()
    behind = [100 * (one["after"] / one["hindsight"] - 1) for one in found]
    return {"moved": found, "losses": [moving, staying]}, [
        Aim("longer than the best split in hindsight, most", max(behind), 3.0, "%"),
        Aim("pause, longest", max(one["pause"] for one in found), 2.0, "steps"),
        Aim("losses that ten moves change", sum(map(float.__ne__, moving, staying)), 0, ""),
    ]


def _alone(quick: bool) -> Part:
    simulated, real = moves_in_jitter(2 if quick else 20, 40 if quick else 200), watching(20 if quick else 80)
    say(f"a first look {real['first_look']:.3f} s, a later one {real['later_look']:.4f} s")
    return {"moves_simulated": simulated, "trained": real}, [
        Aim("moves in runs with jitter only", simulated + real["moves"], 0, ""),
        Aim("watching, of 1,000 steps", real["share_percent"], 0.2, "%"),
    ]


def _paced(quick: bool) -> Part:
    cells, gains = [], {}
    for name in [*PACED][:1] if quick else PACED:
        cells += (own := paced(name))
        base, *others = (cell["seconds"] for cell in own)
        shorter = [100 * (1 - seconds / base) for seconds in others]
        gains[name] = dict(zip(("schedule", "rebalancing", "both"), shorter, strict=True))
        say(f"{name}: shorter by {gains[name]} %")
    least = min(own["both"] - max(own["schedule"], own["rebalancing"]) for own in gains.values())
    return {"cells": cells, "gains": gains}, [
        Aim("both gain more than either, at least by", least, 0.0, "% of a step", at_least=True)
    ]


PARTS: dict[str, Callable[[bool], Part]] = {"training": _training, "alone": _alone, "paced": _paced}


@bench(
    "Layers that move while training: what does it gain and cost, does it leave balanced runs alone?",
    minutes="12",
    aims="3 % behind hindsight, a pause of 2 steps, equal losses; no moves in jitter, 0.2 % of watching",
)
def rebalance(part: tuple[str, ...] = tuple(PARTS), quick: bool = False) -> Found:
    """*training*: a Trainer of 16 equal layers on 4 stages, whose tasks last as long as their layers are told
    to; stage 2 is 1.5 x slower, or the layers are cut 2, 4, 8, 2. `rebalance="auto"` moves them. Beside it
    stands the best split in hindsight: of all splits the three that are fastest in the simulator by the true
    times, run. The pause is what the steps from the decision to the move, and the move, took longer than
    usual steps would have, in steps. Then layers move to and fro ten times, and losses are compared to the
    bit with a run that stays.

    *alone*: 20 runs of 200 steps with jitter only (J1 to J3), simulated, and one of 80 steps that is trained:
    no layer may move. What watching costs is reckoned for 1,000 steps: one first look, and the later ones as
    often.

    *paced*: 8 paced stages, 64 layers, a stage that is slow or a last layer that is heavy, in steps of
    families that others have measured (`studies/families.py`): 1F1B and BFW at equal limits, cut evenly and
    as it was decided by simulated steps of 1F1B, each with draws of its own."""
    found = {name: PARTS[name](quick) for name in part}
    aims = [aim for _, own in found.values() for aim in own]
    return Found({name: figures for name, (figures, _) in found.items()}, aims)
