"""Fixed orders as files, as `rrfp_jax.core.schedules.read_csv` reads them."""

from __future__ import annotations

import csv
import io

from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.tasks import Placement


def write_csv(schedule: FixedOrder, placement: Placement, microbatches: int) -> str:
    """A fixed order as CSV, without idle slots."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for stage in range(placement.stages):
        tasks = schedule.order(stage, placement, microbatches)
        writer.writerow(
            f"{placement.virtual_stage(stage, chunk)}{kind.letter}{microbatch}"
            for kind, chunk, microbatch in tasks
        )
    return out.getvalue()
