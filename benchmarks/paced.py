"""Runs on paced devices (real processes, messages and scheduling) beside the same steps simulated."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from math import nan
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import LAUNCH, Aim, Found, bench, output_of, percent_longer, say, table
from benchmarks.lateness import LateReadiness
from benchmarks.steps import held_microbatches, simulated
from rrfp_jax.core.admission import SPARE_GRADIENTS, Accumulation
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.tasks import FORWARD, INPUT, WEIGHT, Kind
from rrfp_jax.report.explanation import TimedStep
from rrfp_jax.report.run_folder import read_run
from rrfp_jax.runtime.engine.device import LEAD_SECONDS
from rrfp_jax.trace.costs import Workload, WorkloadCosts, log_normal
from rrfp_jax.trace.idleness import Cause, shares, stage_times
from rrfp_jax.trace.records import StepTrace

STEPS = 4
RUN_SECONDS = 300.0


class PacedTimes(NamedTuple):
    """What a paced run took: seconds of each step, its median hop (s, see `hop_of`), its latest steps."""

    steps: Sequence[float]
    hop: float
    traced: Sequence[StepTrace]


@dataclass(frozen=True, kw_only=True)
class PacedCase:
    """A step's durations and the rules that it runs under; see `StepRules`."""

    workload: Workload
    schedule: str
    limit: int
    accumulation: Accumulation = "index"
    spare_gradients: int = SPARE_GRADIENTS

    def simulated(self, hop: float) -> StepTrace:
        """A step by its durations and a hop of so many seconds; nothing else takes time.

        A task is chosen as the driver does: up to `LEAD_SECONDS` before the one before it ends.
        """
        return simulated(
            *(self.schedule, self.workload),
            lead=LEAD_SECONDS,
            change=partial(LateReadiness, seconds=hop),
            limit=self.limit,
            accumulation=self.accumulation,
            spare_gradients=self.spare_gradients,
        )

    def run(self) -> PacedTimes:
        """A paced run in as many processes as stages."""
        fields = {"accumulation": self.accumulation, "spare_gradients": self.spare_gradients}
        steps = run_paced(self.workload, self.schedule, self.limit, STEPS, fields)
        traced = [step.recorded.trace for step in steps]
        return PacedTimes([trace.makespan for trace in traced], hop_of(traced, self.workload), traced)


def run_paced(
    workload: Workload,
    schedule: str,
    limit: int,
    steps: int,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> Sequence[TimedStep]:
    """The latest of so many steps of a paced run in as many processes as stages; `fields` of the config."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "workload.json"
        file.write_text(json.dumps(workload.as_json_object()), encoding="utf-8")
        flags = {"schedule": schedule, "max_in_flight": limit, "steps": steps, **fields}
        launched = (*LAUNCH, "-n", str(workload.stages), "-m", "benchmarks.paced_run", f"--workload={file}")
        return run_steps("configs/quickstart.py", Path(name), flags, launched)


def run_steps(
    config: str, folder: Path, fields: Mapping[str, Any], launched: Sequence[str] = LAUNCH
) -> Sequence[TimedStep]:
    """The latest steps of a run of a config that a module starts, with its files in `folder`."""
    flags = [f"--config.{flag}={value}" for flag, value in {"directory": folder, **fields}.items()]
    output_of([sys.executable, "-m", *launched, f"--config={config}", *flags], RUN_SECONDS)
    return read_run(folder / "quickstart").steps


def hop_of(steps: Iterable[StepTrace], workload: Workload) -> float:
    """Median seconds from the end of a task, and its transfer by the workload, to its receiver's `ready`."""
    return median(
        receiver.ready - sender.end - costs.transfer(sender.stage, sender.task)
        for step in steps
        for costs in [WorkloadCosts(workload, step.placement)]
        for sender, receiver in step.transfers()
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A step (s), measured (the median of the run's steps) and simulated with the run's own hop.

    Attributes:
        about: which case it is.
        hop: the run's own (s).
        held: most microbatches that a stage held, a chunk counting as its part of one.
    """

    about: dict[str, Any]
    real: float
    simulated: float
    hop: float
    held: float

    @property
    def percent(self) -> float:
        return percent_longer(self.real, self.simulated)

    def __str__(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self.about.items())
        times = f"real {self.real:.4f} s, simulated {self.simulated:.4f} s, off by {self.percent:+.2f} %"
        return f"{about}: {times}, hop {1e6 * self.hop:.0f} us, held {self.held:g}"


def _row(workload: Workload, schedule: str, limit: int, **about: Any) -> Row:
    case = PacedCase(workload=workload, schedule=schedule, limit=limit)
    run = case.run()
    row = Row(
        about={"schedule": schedule, **about},
        real=median(run.steps),
        simulated=case.simulated(run.hop).makespan,
        hop=run.hop,
        held=max(map(held_microbatches, run.traced)),
    )
    say(row)
    return row


def _drawn(stages: int, microbatches: int, seconds: float, seed: int) -> Workload:
    return log_normal(stages, microbatches, forward=seconds, sigma=0.3, shared=0.5, seed=seed)


@bench(
    "How far are paced runs from what their durations say?",
    minutes="over 10 *",
    aims="3 % in the median, 5 % at worst",
)
def fidelity(
    quick: bool = False, schedule: tuple[str, ...] = ("1f1b", "gpipe", "bf", "bfw", "zb-h1")
) -> Found:
    """For stages x microbatches x task length x schedule, durations are log-normal, half of the variance
    common to all tasks of a microbatch. The hop is the time from the end of a task to the moment the next
    stage knows, the median of the run's own transfers."""
    cases = [(4, 16, 0.01)] if quick else list(product((4, 8), (16, 32), (0.01, 0.03)))
    rows = [
        _row(_drawn(*case, seed=1), name, 8, stages=case[0], microbatches=case[1], seconds=case[2])
        for case in cases
        for name in schedule
    ]
    off = np.abs([row.percent for row in rows])
    return Found(
        {"cases": [asdict(row) | {"percent": row.percent} for row in rows]},
        [
            Aim("median difference", float(np.median(off)), 3.0, "%"),
            Aim("worst difference", float(np.max(off)), 5.0, "%"),
        ],
    )


@bench(
    "At the bytes of 1F1B, on paced devices: which schedule is fastest, and is it what was simulated?",
    minutes="2",
    aims="2 % off what was simulated; no more than 8 microbatches held",
)
def equal_bytes(quick: bool = False, seeds: int = 1) -> Found:
    """8 stages, 32 microbatches, forwards of 30 ms, halves of that where a stage has two chunks. No stage may
    hold more than 1F1B does, 8 microbatches: hints by their limit, and the fixed orders never do; what they
    held is told from what ran."""
    size = (2, 4, 0.010) if quick else (8, 32, 0.030)
    schedules = ("zb-v", "ranked:zb-v", "bfw", "1f1b")
    rows = [
        _row(_drawn(*size, seed), name, size[0], seed=seed)
        for seed in range(1, seeds + 1)
        for name in schedules
    ]
    cells: list[tuple[str, ...]] = []
    own = {name: [row for row in rows if row.about["schedule"] == name] for name in schedules}
    base = median(row.real for row in own[schedules[0]])
    for name, of in own.items():
        real, expected = median(row.real for row in of), median(row.simulated for row in of)
        held = max(row.held for row in of)
        cells.append((name, f"{real:.3f}", f"{expected:.3f}", f"{real / base:.3f}", f"{held:g}"))
    return Found(
        {"cases": [asdict(row) for row in rows]},
        [
            Aim("largest difference of real and simulated", max(abs(row.percent) for row in rows), 2.0, "%"),
            Aim("microbatches held, most", max(row.held for row in rows), size[0], ""),
        ],
        {
            "simulated.md equal bytes, paced": table(
                ["schedule", "real, s", "simulated, s", "over strict ZB-V's", "held"], cells
            )
        },
    )


FIXED, HINTS = ("1f1b", "zb-v"), ("bf", "bfw", "ranked:zb-v")
HOP = 0.0004
CAUSES = {
    "fills, drains": (Cause.BEGIN, Cause.END),
    "another stage": (Cause.STAGE,),
    "transfer": (Cause.LINK, Cause.INJECTED),
    "fixed order": (Cause.ORDER,),
    "memory": (Cause.MEMORY,),
    "turn": (Cause.TURN,),
    "host": (Cause.HOST, Cause.GROUP, Cause.ESTIMATE),
}
"""Columns of the table; see `rrfp_jax.trace.idleness`."""


@bench(
    "Images and text on paced devices: which schedule is fastest, and why are stages idle?",
    minutes="8",
    aims="the best hint not slower than the best fixed order; 2 % off what was simulated",
)
def multimodal(quick: bool = False, simulate: bool = False) -> Found:
    """A step of `configs/qwen3_4b_vit_bigg.py`: rows of 1, 2 or 4 images, and text. A task lasts as
    `rrfp plan` predicts for an H100, in whole layers, under the split that it suggests; all divided by the
    same number, so that forwards take 20 ms in the mean. Once no stage may hold more than 1F1B does, as many
    microbatches as there are stages; once hints may hold 32. Shares of the step in which stages computed, and
    were idle by cause, are means over stages and the latest steps. `--simulate` starts no processes: a hop
    takes 0.4 ms."""
    every, microbatches, seconds, many = ((2,), 4, 0.005, 3) if quick else ((4, 8), 48, 0.020, 32)
    rows: list[dict[str, Any]] = []
    for stages in every:
        workload = workload_of(stages, microbatches, seconds)
        for name, limit in [(n, stages) for n in (*FIXED, *HINTS)] + [(n, many) for n in HINTS]:
            rows.append(_explained(workload, name, limit, simulate))
            say(rows[-1])
    aims = []
    for stages in every:
        own = [row for row in rows if row["stages"] == stages and row["limit"] == stages]
        best, fixed = (min(r["seconds"] for r in own if r["schedule"] in of) for of in (HINTS, FIXED))
        aims.append(Aim(f"best hint over best fixed order, {stages} stages", best / fixed, 1.0, ""))
    if not simulate:
        off = max(abs(percent_longer(row["real"], row["simulated"])) for row in rows)
        aims.append(Aim("real and simulated differ", off, 2.0, "%"))
    return Found({"cases": rows}, aims, {"multimodal.md paced": _multimodal_table(rows)})


def _explained(workload: Workload, schedule: str, limit: int, simulate: bool) -> dict[str, Any]:
    """Simulate one schedule, and run it unless that is all."""
    case = PacedCase(workload=workload, schedule=schedule, limit=limit)
    run = PacedTimes([nan], HOP, [case.simulated(HOP)]) if simulate else case.run()
    fixed, expected = isinstance(by_name(schedule), FixedOrder), case.simulated(run.hop).makespan
    own = [shares(stage_times(step, fixed)) for step in run.traced]
    found = {"compute": fmean(share["compute"] for share in own)}
    for name, causes in CAUSES.items():
        found[name] = fmean(sum(share[cause] for cause in causes) for share in own)
    real = None if simulate else median(run.steps)
    times = {"real": real, "simulated": expected, "seconds": real or expected, "hop": run.hop}
    return {"stages": workload.stages, "schedule": schedule, "limit": limit, **times, "shares": found}


def workload_of(stages: int, microbatches: int, seconds: float) -> Workload:
    """The first step of the config, split for so many stages; forwards of `seconds` in the mean."""
    from configs.qwen3_4b_vit_bigg import get_config
    from rrfp_jax import Mesh
    from rrfp_jax.forecast.costs import LayerTimes
    from rrfp_jax.forecast.devices import ACCELERATORS, LINKS
    from rrfp_jax.forecast.forecast import Devices, forecast

    config = replace(get_config(), microbatches=microbatches, mesh=Mesh(pp=stages), schedule="bfw")
    accelerator = ACCELERATORS["h100"]
    devices = Devices(accelerator=accelerator, link=LINKS["nvlink4"], memory=None, setting=None)
    estimate = forecast(config.spec(), devices).estimate
    tasks, ends = LayerTimes(estimate.model, accelerator).tasks, [0]
    for layers in estimate.suggested().split:
        ends.append(ends[-1] + layers)

    def times(kind: Kind) -> list[list[float]]:
        return [
            [sum(tasks[bucket][i][kind] for i in range(first, end)) for bucket in estimate.buckets]
            for first, end in pairwise(ends)
        ]

    scale = seconds / fmean(time for row in times(FORWARD) for time in row)
    kinds = {"forward": FORWARD, "backward_input": INPUT, "backward_weight": WEIGHT}
    tables = {
        name: tuple(tuple(scale * time for time in row) for row in times(kind))
        for name, kind in kinds.items()
    }
    none = ((0.0,) * microbatches,) * stages
    return Workload(**tables, transfer_forward=none, transfer_backward=none)


def _multimodal_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names, cells = list(rows[0]["shares"]), []
    for row in rows:
        base = next(r for r in rows if (r["schedule"], r["stages"]) == ("1f1b", row["stages"]))["seconds"]
        real = "-" if row["real"] is None else f"{row['real']:.3f}"
        took = real, f"{row['simulated']:.3f}", f"{row['seconds'] / base:.3f}"
        idle = [f"{100 * row['shares'][name]:.1f}" for name in names]
        cells.append((row["stages"], row["limit"], f"`{row['schedule']}`", *took, *idle))
    heads = ["stages", "in flight", "schedule", "real, s", "simulated, s", "over 1F1B's", *names]
    return table(heads, cells)
