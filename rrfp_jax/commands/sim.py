"""`rrfp sim`: what schedules would cost on a workload, in virtual time."""

from __future__ import annotations

import argparse
from pathlib import Path

from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.commands.simulation import SCHEDULES, simulate, simulation_inputs
from rrfp_jax.core.schedules import RANKED
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.fields import check_not_read
from rrfp_jax.json_files import write_json
from rrfp_jax.report.store import STEPS
from rrfp_jax.report.timeline import check_picture
from rrfp_jax.train.named import CSV

STAGES = 8

GIVEN = ("microbatches", "seeds", "limit", "byte_limit", "chunks", "jitter")
"""Flags that `rrfp.simulate` takes as they are."""


def main(options: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    if (options.workload is None) == (options.family is None):
        raise UsageError("give one of --workload=FILE.json and --family=NAME (see --help)")
    schedules = list(dict.fromkeys(options.schedule or SCHEDULES))
    outputs = [path for path in (options.out, options.trace, options.plot) if path is not None]
    if options.workload is not None and options.stages is not None:
        raise UsageError(f"--stages is for --family: the workload of {options.workload} has its own")
    source = options.family if options.workload is None else options.workload
    read = [Path(schedule.removeprefix(RANKED).removeprefix(CSV)) for schedule in schedules]
    if options.workload is not None:
        read.append(options.workload / STEPS)
    for file in outputs:
        check_not_read("output", file, read)
    stages = STAGES if options.stages is None else options.stages
    if options.plot is not None:
        drawn, panels = stages, len(schedules)
        if options.workload is not None:
            step = simulation_inputs(source, stages, options.microbatches, 1, 1)[0]
            drawn = step.actual.stages
            panels += step.ran is not None and options.jitter == "J0"  # as it ran
        check_picture(options.plot, drawn * panels)
    given = {name: getattr(options, name) for name in GIVEN}
    comparison = simulate(source, schedules, stages=stages, **given)
    if options.out is not None:
        found = comparison.as_json_object()
        only = found if len(found) > 1 else next(iter(found.values()))
        write_json(options.out, only, indent=1)
    if options.trace is not None:
        comparison.write_trace(options.trace)
    if options.plot is not None:
        comparison.timeline().save(options.plot)
    print_whole(str(comparison))
    return DONE
