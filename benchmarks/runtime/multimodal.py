"""Images and text on paced devices: which schedule is fastest, and why are stages idle?

    python -m benchmarks.runtime.multimodal [--json=FILE] [--check] [--quick] [--write] [--simulate]

A step of `configs/qwen3_4b_vit_bigg.py`: rows of 1, 2 or 4 images, and text. A task lasts as `rrfp plan`
predicts for an H100, in whole layers, under the split that it suggests for so many stages; all divided by the
same number, so that forwards take 20 ms in the mean. 4 and 8 stages, 48 microbatches; real processes,
messages and scheduling. Once no stage may hold more than 1F1B does, as many microbatches as there are stages;
once hints may hold 32. Beside each stands the step simulated with the same durations and the run's own hop,
and the share of the step in which stages computed, and in which they were idle, by cause. `--simulate` starts
no processes: it gives what the simulator says, with a hop of 0.4 ms, in seconds instead of minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import isnan, nan
from statistics import fmean, median
from typing import Any

from benchmarks.harness import RESULTS, Aim, Compared, finish, parse, put_figures, table
from benchmarks.runtime.paced import PacedCase, PacedTimes
from configs.qwen3_4b_vit_bigg import get_config
from rrfp_jax import Mesh
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.tasks import FORWARD, INPUT, WEIGHT, Kind
from rrfp_jax.forecast.costs import LayerTimes
from rrfp_jax.forecast.devices import ACCELERATORS, LINKS
from rrfp_jax.forecast.forecast import Devices, forecast
from rrfp_jax.trace.costs import Workload
from rrfp_jax.trace.idleness import Cause, shares, stage_times

PAGE = RESULTS / "multimodal.md"
FIXED, HINTS = ("1f1b", "zb-v"), ("bf", "bfw", "ranked:zb-v")
STAGES, MICROBATCHES, SECONDS, MANY = (4, 8), 48, 0.020, 32
HOP = 0.0004
QUICK = (2,), 4, 0.005, 3

COLUMNS = {
    "fills, drains": (Cause.BEGIN, Cause.END),
    "another stage": (Cause.STAGE,),
    "transfer": (Cause.LINK, Cause.INJECTED),
    "fixed order": (Cause.ORDER,),
    "memory": (Cause.MEMORY,),
    "turn": (Cause.TURN,),
    "host": (Cause.HOST, Cause.GROUP),
}
"""Columns of the table; see `rrfp_jax.trace.idleness`."""


@dataclass(frozen=True, kw_only=True)
class Row(Compared):
    """One schedule.

    Attributes:
        real, simulated: of the step (s), the former the median of the run's steps; not a number if it was
            only simulated.
        limit: most microbatches that a stage may hold.
        hop: the run's own (s).
        shares: of the step, mean over stages and the latest steps: "compute", and idle by `COLUMNS`.
    """

    stages: int
    schedule: str
    limit: int
    hop: float
    shares: dict[str, float]

    @property
    def seconds(self) -> float:
        """Real ones if it was run."""
        return self.simulated if isnan(self.real) else self.real

    def as_json_object(self) -> dict[str, Any]:
        """All fields; what was not run is null."""
        return asdict(self) | {"real": None if isnan(self.real) else self.real}

    def __str__(self) -> str:
        idle = ", ".join(f"{name} {100 * share:.1f}" for name, share in self.shares.items())
        real = "" if isnan(self.real) else f"real {self.real:.4f} s ({self.percent:+.2f} %), "
        return (
            f"{self.stages} stages, {self.schedule:12} limit {self.limit:2}: {real}"
            f"simulated {self.simulated:.4f} s; %: {idle}"
        )


def workload_of(stages: int, microbatches: int, seconds: float) -> Workload:
    """The first step of the config, split for so many stages; forwards of `seconds` in the mean."""
    config = replace(get_config(), microbatches=microbatches, mesh=Mesh(pp=stages), schedule="bfw")
    accelerator = ACCELERATORS["h100"]
    devices = Devices(accelerator=accelerator, link=LINKS["nvlink4"], memory=None, setting=None)
    estimate = forecast(config.spec(), devices).estimate
    tasks, ends = LayerTimes(estimate.model, accelerator).tasks, [0]
    for layers in estimate.suggested().split:
        ends.append(ends[-1] + layers)

    def table(kind: Kind) -> list[list[float]]:
        return [
            [sum(tasks[bucket][i][kind] for i in range(first, end)) for bucket in estimate.buckets]
            for first, end in pairwise(ends)
        ]

    scale = seconds / fmean(time for row in table(FORWARD) for time in row)
    kinds = {"forward": FORWARD, "backward_input": INPUT, "backward_weight": WEIGHT}
    tables = {
        name: tuple(tuple(scale * time for time in row) for row in table(kind))
        for name, kind in kinds.items()
    }
    none = ((0.0,) * microbatches,) * stages
    return Workload(**tables, transfer_forward=none, transfer_backward=none)


def measure(workload: Workload, schedule: str, limit: int, simulate: bool) -> Row:
    """Simulate one schedule, and run it unless that is all."""
    case, fixed = PacedCase(workload=workload, schedule=schedule, limit=limit), is_fixed(schedule)
    run = PacedTimes([nan], HOP, [case.simulated_step(HOP)]) if simulate else case.run()
    own = [shares(stage_times(step, fixed)) for step in run.traced]
    found = {"compute": fmean(share["compute"] for share in own)}
    for name, causes in COLUMNS.items():
        found[name] = fmean(sum(share[cause] for cause in causes) for share in own)
    return Row(
        stages=workload.stages,
        schedule=schedule,
        limit=limit,
        real=median(run.steps),
        simulated=case.simulated(run.hop),
        hop=run.hop,
        shares=found,
    )


def is_fixed(schedule: str) -> bool:
    """Whether it is a fixed order, no hint."""
    return isinstance(by_name(schedule), FixedOrder)


def markdown(rows: Sequence[Row]) -> str:
    """A table; idle times in per cent of the step."""
    names = list(rows[0].shares)
    heads = ["stages", "in flight", "schedule", "real, s", "simulated, s", "over 1F1B's", *names]
    cells = []
    for row in rows:
        base = next(one for one in rows if (one.schedule, one.stages) == ("1f1b", row.stages))
        real = "-" if isnan(row.real) else f"{row.real:.3f}"
        took = real, f"{row.simulated:.3f}", f"{row.seconds / base.seconds:.3f}"
        idle = [f"{100 * row.shares[name]:.1f}" for name in names]
        cells.append((row.stages, row.limit, f"`{row.schedule}`", *took, *idle))
    return table(heads, cells)


def main() -> int:
    """Run all cases, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--quick", action="store_true", help="2 stages, 4 microbatches, 5 ms")
    parser.add_argument("--write", action="store_true", help="the table into results/multimodal.md")
    parser.add_argument("--simulate", action="store_true", help="run nothing; a hop takes 0.4 ms")
    options = parser.parse_args()
    every, microbatches, seconds, many = QUICK if options.quick else (STAGES, MICROBATCHES, SECONDS, MANY)
    rows = []
    for stages in every:
        cases = [(name, stages) for name in (*FIXED, *HINTS)] + [(name, many) for name in HINTS]
        workload = workload_of(stages, microbatches, seconds)
        for schedule, limit in cases:
            rows.append(row := measure(workload, schedule, limit, options.simulate))
            print(row, flush=True)
    print(shown := markdown(rows))
    if options.write:
        put_figures(PAGE, "paced", f"\n{shown}\n\n")
    aims = [_aim(rows, stages) for stages in every]
    if not options.simulate:
        aims.append(Aim("real and simulated differ", max(abs(row.percent) for row in rows), 2.0, "%"))
    return finish(options, {"cases": [row.as_json_object() for row in rows]}, aims)


def _aim(rows: Sequence[Row], stages: int) -> Aim:
    """The best hint at the bytes of 1F1B is not slower than the best fixed order."""
    own = [row for row in rows if row.stages == stages and row.limit == stages]
    best = min(row.seconds for row in own if row.schedule in HINTS)
    fixed = min(row.seconds for row in own if row.schedule in FIXED)
    return Aim(f"best hint over best fixed order, {stages} stages", best / fixed, 1.0, "")


if __name__ == "__main__":
    sys.exit(main())
