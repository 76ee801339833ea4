"""`rrfp-sim`: what schedules would cost on a workload, in virtual time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rrfp_jax.commands.command_line import Parser, exit_status, path_argument, print_whole
from rrfp_jax.commands.given_steps import given_steps
from rrfp_jax.commands.simulation import PLANNED, POLICIES, Comparison, simulate
from rrfp_jax.core.admission import SPARE_GRADIENTS
from rrfp_jax.core.schedules import NAMED, RANKED
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.fields import check_not_read, output_of
from rrfp_jax.json_files import write_json
from rrfp_jax.report.timeline import check_picture
from rrfp_jax.sim.engine import NETWORKS
from rrfp_jax.sim.families import FAMILIES
from rrfp_jax.sim.planned import EVALUATIONS
from rrfp_jax.trace.jitter import LEVELS
from rrfp_jax.train.named import AUTO, CSV

COMMAND = "rrfp-sim"

STAGES = 8

DESCRIPTION = """\
Simulates one step of pipeline-parallel training under one or several schedules, with the scheduling core that
also runs the training, and prints what each of them takes."""

EPILOG = """\
columns: stall = idle with nothing ready; blocked = a fixed order ignored what was ready; held = a limit or
the order of accumulation held it back; in flight and MiB = most on any stage; above bound = beyond what no
order with as many chunks can beat, injected delays apart. Over the seeds: medians of times and ratios, means
of idle shares, maxima of what is in flight.

exit status: 0 done, 1 failed, 2 refused, 130 interrupted

examples:
  rrfp-sim --family=log-normal --policy=1f1b --policy=bf --policy=planned --seeds=20
  rrfp-sim --workload=runs/quickstart --policy=bf --policy=bfw
  rrfp-sim --workload=W.json --policy=zb-h1 --limit=8 --out=result.json --plot=picture.svg"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status (0 done, 1 failed, 2 refused, 130 interrupted)."""
    return exit_status(COMMAND, lambda: _simulate(arguments))


def _simulate(arguments: Sequence[str]) -> int:
    options = _parser().options(arguments)
    if options is None:
        return DONE
    if (options.workload is None) == (options.family is None):
        raise UsageError("give one of --workload=FILE.json and --family=NAME (--help tells more)")
    policies = list(dict.fromkeys(options.policy or POLICIES))
    outputs = [path for path in (options.out, options.trace, options.plot) if path is not None]
    for file in outputs:  # before the work is done
        output_of("output", file)
    if len({file.resolve() for file in outputs}) < len(outputs):
        raise UsageError("two outputs have the same name: give each a file of its own")
    source = _source(options)
    orders = [Path(policy.removeprefix(RANKED).removeprefix(CSV)) for policy in policies]
    for file in outputs:
        check_not_read("output", file, [*orders, *filter(None, [options.workload])])
    if options.plot is not None:
        stages = options.stages or STAGES
        if options.workload is not None:
            given = given_steps(source, stages=stages, microbatches=options.microbatches, seeds=1, times=1)
            stages = given[0].actual.stages
        check_picture(options.plot, stages * len(policies))
    comparison = simulate(
        source,
        policies,
        stages=STAGES if options.stages is None else options.stages,
        microbatches=options.microbatches,
        seeds=options.seeds,
        limit=options.limit,
        byte_limit=options.byte_limit,
        chunks=options.chunks,
        links=options.links,
        accumulation=options.accumulation,
        spare_gradients=options.spare_gradients,
        jitter=options.jitter,
        evaluations=options.evaluations,
    )
    _write(comparison, options)
    print_whole(str(comparison))
    return DONE


def _source(options: argparse.Namespace) -> Path | str:
    """The file, or the family's name."""
    if options.workload is None:
        if options.family not in FAMILIES:
            raise UsageError(f"--family={options.family}: choose one of {', '.join(FAMILIES)}")
        return str(options.family)
    if options.stages is not None:
        raise UsageError(f"--stages is for --family: the workload of {options.workload} has its own")
    path: Path = options.workload
    return path


def _write(comparison: Comparison, options: argparse.Namespace) -> None:
    if options.out is not None:
        found = comparison.as_json_object()
        only = found if len(found) > 1 else next(iter(found.values()))
        write_json(options.out, only, indent=1)
    if options.trace is not None:
        comparison.write_trace(options.trace)
    if options.plot is not None:
        comparison.timeline().save(options.plot)


def _parser() -> Parser:
    parser = Parser(COMMAND, DESCRIPTION, EPILOG, files_by="--workload")
    step = parser.add_argument_group("the step")
    step.add_argument(
        "--workload",
        type=path_argument,
        metavar="FILE.json|RUN",
        help="seconds of every task and transfer; or what a run left: RUN (its latest steps), RUN/costs.json",
    )
    step.add_argument("--family", metavar="NAME", help=f"or steps drawn at random: {', '.join(FAMILIES)}")
    step.add_argument("--stages", type=int, metavar="N", help="of a family's steps (8)")
    step.add_argument(
        "--microbatches", type=int, metavar="N", help="of a family's steps, or with a costs.json (32)"
    )
    step.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="steps to draw, or the latest of a run (1)"
    )
    step.add_argument(
        "--jitter", default="J0", metavar="J", help=f"injected delays: {', '.join(LEVELS)} (J0)"
    )
    step.add_argument("--links", default="parallel", metavar="KIND", help=f"{', '.join(NETWORKS)} (parallel)")
    _add_schedules(parser)
    outputs = parser.add_argument_group("besides the table")
    outputs.add_argument("--out", type=path_argument, metavar="FILE.json", help="makespan, order and figures")
    outputs.add_argument("--trace", type=path_argument, metavar="FILE.json", help="for ui.perfetto.dev")
    outputs.add_argument(
        "--plot", type=path_argument, metavar="FILE", help="a picture: .svg, .html, .png or .pdf"
    )
    return parser


def _add_schedules(parser: Parser) -> None:
    rules = parser.add_argument_group("the schedules")
    rules.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help=f"again for each: {', '.join(NAMED)}, {RANKED}ORDER, {AUTO}, {PLANNED}, "
        f"{CSV}FILE "
        f"({' and '.join(POLICIES)})",
    )
    rules.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="most microbatches in flight on a stage; 0 for no limit (as in training: twice the stages, or "
        "as many as fit into --byte-limit)",
    )
    rules.add_argument("--byte-limit", type=int, metavar="N", help="most bytes in flight on a stage")
    rules.add_argument("--chunks", type=int, default=1, metavar="N", help="a stage, where defined (1)")
    rules.add_argument("--accumulation", default="index", metavar="HOW", help="index or arrival (index)")
    rules.add_argument(
        "--spare-gradients",
        type=int,
        default=SPARE_GRADIENTS,
        metavar="N",
        help=f"that may be parked ({SPARE_GRADIENTS})",
    )
    rules.add_argument(
        "--evaluations", type=int, default=EVALUATIONS, metavar="N", help=f"of a planner ({EVALUATIONS})"
    )


def run() -> None:
    """Entry point of the `rrfp-sim` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
