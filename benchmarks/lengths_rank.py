"""One of the four processes that `benchmarks.lengths` starts; rank 0 writes what all of them found.

rrfp-launch -n 4 -m benchmarks.lengths_rank FILE ROUNDS
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rrfp_jax as rrfp
from configs import gpt_lengths
from rrfp_jax.core.costs import WorkloadCosts
from rrfp_jax.core.costtable import CostTable, measured
from rrfp_jax.core.csvorder import write_csv
from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.core.rules import StepRules
from rrfp_jax.core.trace import StepTrace
from rrfp_jax.core.workload import Workload
from rrfp_jax.runtime.join import join
from rrfp_jax.runtime.ledger import name_of
from rrfp_jax.sim.ahead import Planned
from rrfp_jax.sim.engine import simulate
from rrfp_jax.train.data import Arrays, Microbatch, buckets_of
from rrfp_jax.train.named import planned_or_schedule
from rrfp_jax.train.pace import Pace
from rrfp_jax.train.paced import PacedRun

EVALUATIONS = 100
"""Simulations for a planned order."""

MEASURED_ROUNDS = 8
"""BFW steps on either data from which the cost table is made; the first of each is left out."""


@dataclass(frozen=True)
class Case:
    """A schedule on microbatches as they are drawn, or balanced."""

    schedule: str
    balanced: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.schedule}, balanced" if self.balanced else self.schedule


CASES = (
    *(Case(name) for name in ("1f1b", "zb-h1", "bf", "bfw", "planned", "planned-split")),
    *(Case(name, balanced=True) for name in ("1f1b", "bfw")),
)


class Turns:
    """Data of which each step says where it comes from: `turn` is the data and the step of that."""

    def __init__(self, plain: rrfp.data.Documents, balanced: rrfp.data.Documents) -> None:
        self._data = plain, balanced
        self.turn = False, 0
        self.buckets = [*plain.buckets, *balanced.buckets]

    def plan(self, step: int) -> Sequence[Microbatch]:
        """Whatever the number, that of the present turn."""
        balanced, own = self.turn
        return self._data[balanced].plan(own)

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """See `Data.load`."""
        return self._data[self.turn[0]].load(microbatch, fields)

    def names(self) -> list[str]:
        """Of the buckets of the present turn's microbatches."""
        return [name_of(bucket) for bucket in buckets_of(self.plan(0))]


def main(file: str, rounds: int) -> None:
    """Measure; all ranks do the same."""
    config = gpt_lengths.get_config()
    data = Turns(config.train_data(), replace(config, balance=True).train_data())
    trainer = rrfp.Trainer(config.pipeline(), config.optimizer(), data=data, mesh=config.mesh, schedule="bfw")
    trainer.start()
    table = cost_table(trainer, data)
    steps = range(MEASURED_ROUNDS, MEASURED_ROUNDS + 10 * rounds)
    known = [step for step in steps if all(knows(table, data, (half, step)) for half in (False, True))]
    found = []
    for case in CASES:  # compiles what is needed, in steps that do not count
        trainer.schedule, data.turn = schedule_of(case, table), (case.balanced, 0)
        next(trainer.steps(1))
    for step in known[:rounds]:
        for case in CASES:
            trainer.schedule, data.turn = schedule_of(case, table), (case.balanced, step)
            (report,) = trainer.steps(1)
            row = {"case": case.name, "step": step, "tokens": report.weight, "real": report.step_seconds}
            row |= {"load": report.load_seconds, "planning": report.planning_seconds}
            row |= {"predicted": report.predicted_seconds}
            found.append(row | stand_ins(case, report.trace, table.workload(data.names())))
            if join().rank == 0:
                print(row, flush=True)
    if join().rank == 0:
        result = {"costs": table.as_json_object(), "rows": found}
        Path(file).write_text(json.dumps(result), encoding="utf-8")


def cost_table(trainer: rrfp.Trainer, data: Turns) -> CostTable:
    """The medians of BFW steps on both data."""
    steps = []
    for step in range(MEASURED_ROUNDS):
        for balanced in (False, True):
            data.turn = balanced, step
            (report,) = trainer.steps(1)
            if step:
                steps.append((report.trace, data.names()))
    table = measured(steps)
    assert table is not None
    return table


def knows(table: CostTable, data: Turns, turn: tuple[bool, int]) -> bool:
    """Whether the table has all buckets of a turn's step; a rare one may be missing."""
    data.turn = turn
    return table.buckets.keys() >= set(data.names())


def schedule_of(case: Case, table: CostTable) -> Any:
    """As a Trainer takes it; planned by the table."""
    schedule = planned_or_schedule(case.schedule)
    if not isinstance(schedule, Planned):
        return schedule
    return replace(schedule, costs=table, evaluations=EVALUATIONS)


def stand_ins(case: Case, trace: StepTrace, workload: Workload) -> dict[str, float]:
    """The same step on paced devices, with messages but no model, and simulated (s).

    The table's transfers are those of real messages, which paced devices have, too. Where the order was
    planned it is the one that `trace` has.
    """
    placement, none = trace.placement, ((0.0,) * workload.microbatches,) * workload.stages
    schedule = planned_or_schedule(case.schedule)
    if isinstance(schedule, Planned):
        rows = tuple(tuple(trace.order(stage)) for stage in range(placement.stages))
        schedule = ListedOrder(placement, workload.microbatches, rows)
    with tempfile.TemporaryDirectory() as folder:
        path, name = Path(folder) / "workload.json", case.schedule
        if isinstance(schedule, ListedOrder):
            (Path(folder) / "order.csv").write_text(write_csv(schedule, placement, workload.microbatches))
            name = f"csv:{folder}/order.csv"
        without = replace(workload, transfer_forward=none, transfer_backward=none)
        path.write_text(json.dumps(without.as_json_object()), encoding="utf-8")
        run = PacedRun(replace(gpt_lengths.get_config(), schedule=name, pace=Pace(workload=str(path))))
        paced = min(report.step_seconds for report in run.steps(2))
    rules = StepRules(
        placement=placement,
        microbatches=workload.microbatches,
        schedule=schedule,
        limit=2 * placement.stages,
    )
    return {"paced": paced, "simulated": simulate(rules, WorkloadCosts(workload, placement)).makespan}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
