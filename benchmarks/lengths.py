"""Documents of natural length in four processes: 1F1B, planned orders, balanced microbatches, and BFW."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import rrfp_jax as rrfp
from benchmarks.harness import Aim, Found, bench, on_ranks, percent_longer, say
from benchmarks.paced_run import Pace, PacedRun
from benchmarks.steps import simulated
from configs import gpt_lengths
from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.core.step_rules import bucket_name
from rrfp_jax.data.contract import Arrays, Microbatch, buckets_of
from rrfp_jax.runtime.run.join import join
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import Planned
from rrfp_jax.trace.costs import CostTable, Workload, measured
from rrfp_jax.train.named import read_schedule

EVALUATIONS = 100
"""Simulations for a planned order."""

FORWARD_SECONDS, PACED_STEPS = 0.1, 2
"""A mean forward on paced devices, and how often a step is repeated there."""

MEASURED_ROUNDS = 6
"""BFW steps on either data from which the cost table is made; the first of each is left out."""


@dataclass(frozen=True)
class Case:
    """A schedule on microbatches as they are drawn, or balanced."""

    schedule: str
    balanced: bool = False

    @property
    def name(self) -> str:
        return f"{self.schedule}, balanced" if self.balanced else self.schedule


CASES = (
    *(Case(name) for name in ("1f1b", "zb-h1", "bf", "bfw", "planned")),
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
        return self._data[self.turn[0]].load(microbatch, fields)

    def tokens(self) -> float:
        return sum(mb.weight or 0.0 for mb in self.plan(0))

    def names(self) -> list[str]:
        """Of the buckets of the present turn's microbatches."""
        return [bucket_name(bucket) for bucket in buckets_of(self.plan(0))]


def all_lengths(rounds: int, costs: dict[str, Any] | None) -> dict[str, Any]:
    """Measure; all ranks do the same. With a cost table of an earlier time nothing is trained."""
    config = gpt_lengths.get_config()
    data = Turns(config.train_data(), replace(config, balance=True).train_data())
    if costs is None:
        known, rows = trained(config, data, rounds)
    else:
        known, rows = CostTable.from_json_object(costs), []
    for step in steps_known(known, data, rounds):
        for case in CASES:
            data.turn = case.balanced, step
            found = {"case": case.name, "step": step, "tokens": data.tokens()}
            rows.append(found | paced(config, case, known.workload(data.names())))
            told(rows[-1])
    return {"costs": known.as_json_object(), "rows": rows}


def trained(config: gpt_lengths.Lengths, data: Turns, rounds: int) -> tuple[CostTable, list[dict[str, Any]]]:
    """The cost table of the run, and its steps under all cases."""
    trainer = rrfp.Trainer(
        config.pipeline(),
        config.optimizer(),
        data=data,
        mesh=config.mesh,
        schedule="bfw",
        executables=Path(config.directory) / ".executables",
    )
    trainer.start()
    table, rows = cost_table(trainer, data), []
    for case in CASES:  # compiles what is needed, in steps that do not count
        trainer.schedule, data.turn = schedule_of(case, table), (case.balanced, 0)
        next(trainer.steps(1))
    for step in steps_known(table, data, rounds):
        for case in CASES:
            trainer.schedule, data.turn = schedule_of(case, table), (case.balanced, step)
            (report,) = trainer.steps(1)
            found = {"case": case.name, "step": step, "tokens": report.weight, "real": report.step_seconds}
            rows.append(found | {"planning": report.planning_seconds, "predicted": report.predicted_seconds})
            told(rows[-1])
    return table, rows


def told(row: Mapping[str, Any]) -> None:
    """On rank 0, so that a long run can be watched."""
    if join().rank == 0:
        say(row)


def steps_known(table: CostTable, data: Turns, rounds: int) -> list[int]:
    """The first steps of whose buckets, on either data, the table has all; it may lack a rare one."""
    found: list[int] = []
    step = MEASURED_ROUNDS
    while len(found) < rounds:
        names: set[str] = set()
        for balanced in (False, True):
            data.turn = balanced, step
            names.update(data.names())
        found += [step] if table.buckets.keys() >= names else []
        step += 1
    return found


def cost_table(trainer: rrfp.Trainer, data: Turns) -> CostTable:
    """The medians of BFW steps on both data."""
    steps = []
    for step in range(MEASURED_ROUNDS):
        for balanced in (False, True):
            data.turn = balanced, step
            (report,) = trainer.steps(1)
            if step:
                steps.append(report.recorded)
    table = measured(steps)
    assert table is not None
    return table


def schedule_of(case: Case, table: CostTable) -> Any:
    """As a Trainer takes it; planned by the table."""
    schedule = read_schedule(case.schedule)
    if not isinstance(schedule, Planned):
        return schedule
    return replace(schedule, costs=table, evaluations=EVALUATIONS)


def paced(config: gpt_lengths.Lengths, case: Case, workload: Workload) -> dict[str, float]:
    """A step on paced devices and simulated (s), its tasks as in the workload but for one common factor.

    Messages are real on paced devices and take no time in the simulator. Planned orders know the workload.
    """
    mean = fmean(chain(*workload.forward))
    factors = ((FORWARD_SECONDS / mean,) * workload.microbatches,) * workload.stages
    none = ((0.0,) * workload.microbatches,) * workload.stages
    scaled = replace(workload, transfer_forward=none, transfer_backward=none).scaled(factors, factors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.json"
        path.write_text(json.dumps(scaled.as_json_object()), encoding="utf-8")
        run = PacedRun(replace(config, schedule=case.schedule), Pace(workload=str(path)))
        reports = list(run.steps(PACED_STEPS))
    schedule = read_schedule(case.schedule)
    if isinstance(schedule, Planned):
        placement = reports[0].trace.placement
        rows = tuple(tuple(reports[0].trace.order(stage)) for stage in range(placement.stages))
        schedule = ListedOrder(placement, workload.microbatches, rows)
    assert not isinstance(schedule, Auto), "no case has it"
    expected = simulated(schedule, scaled, limit=2 * workload.stages).makespan
    return {"paced": median(report.trace.makespan for report in reports), "simulated": expected}


LIMIT_SECONDS, REFERENCE, TIMES = 3000.0, "bfw", ("real", "paced", "simulated")


@bench(
    "Documents of natural length: which schedule is fastest?",
    minutes="-",
    aims="paced steps 5 % off the simulated ones, median",
)
def lengths(rounds: int = 6, costs: str = "") -> Found:
    """`configs/gpt_lengths.py`, one stage a process. A few steps give its cost table (medians by bucket).
    Then all cases take turns, round by round, on the same documents of the same step: on real compute; then
    on paced devices whose tasks last as the table says, times a common factor that makes a mean forward 100
    ms, and simulated with the same durations. Planned orders know the table.

    Balanced microbatches hold other numbers of documents, so times are compared per token: each case's over
    BFW's in the same round, medians over the rounds. `--costs=FILE` takes the table of an earlier `--json`,
    trains nothing."""
    known = json.loads(Path(costs).read_text(encoding="utf-8"))["figures"]["costs"] if costs else None
    found = on_ranks(4, all_lengths, rounds, known, seconds=LIMIT_SECONDS, env={})
    cases = [summary(case.name, found["rows"]) for case in CASES]
    for case in cases:
        say(case)
    off = median(
        abs(percent_longer(row["paced"], row["simulated"])) for row in found["rows"] if "paced" in row
    )
    return Found({"cases": cases} | found, [Aim("paced steps off the simulated ones, median", off, 5.0, "%")])


def summary(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A case: medians of its step times (s), and of its times per token over BFW's in the same round."""
    found: dict[str, Any] = {"case": name}
    for kind in TIMES:
        measured = [row for row in rows if kind in row]
        reference = {row["step"]: row[kind] / row["tokens"] for row in measured if row["case"] == REFERENCE}
        own = [row for row in measured if row["case"] == name]
        if own:
            found[kind] = median(row[kind] for row in own)
            found[f"{kind} over {REFERENCE}"] = median(
                row[kind] / row["tokens"] / reference[row["step"]] for row in own
            )
    planning = [row["planning"] for row in rows if row["case"] == name and row.get("planning") is not None]
    return found | ({"planning": median(planning)} if planning else {})
