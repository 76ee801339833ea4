"""`rrfp-doctor`: would a run work where this is started, and what is to be done if not?"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from rrfp_jax.commands.command_line import Parser, exit_status, path_argument
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, FAILED, UsageError
from rrfp_jax.fields import output_of
from rrfp_jax.json_files import write_json

COMMAND = "rrfp-doctor"

LIMIT_SECONDS = 60.0
"""Within which all tasks must have come, unless --limit says otherwise."""

DESCRIPTION = """\
Checks, before a run is started, the place where it would be: start it as you would start the run, alone, by
srun, or with RRFP_COORDINATOR, RRFP_PROCESSES and RRFP_RANK. Several tasks call each other. Rank 0 prints
every check, the others what is wrong with them."""

EPILOG = """\
exit status: 0 nothing fails, 1 something does, 2 refused, 130 interrupted

examples:
  rrfp-doctor
  srun --ntasks=8 --nodes=2 --gpus-per-task=1 rrfp-doctor --tp=2"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    return exit_status(COMMAND, lambda: _examine(arguments))


def _examine(arguments: Sequence[str]) -> int:
    options = _parser().options(arguments)
    if options is None:
        return DONE
    if options.tp < 1:
        raise UsageError(f"--tp={options.tp}: give the ranks of a tensor-parallel group, 1 for none")
    if not 0 < options.limit < float("inf"):
        raise UsageError(f"--limit={options.limit}: give a number of seconds above 0")
    if options.json is not None:
        output_of("--json", options.json)
    from rrfp_jax.commands.preflight.checks import examine  # these import JAX
    from rrfp_jax.commands.preflight.meeting import meet
    from rrfp_jax.commands.preflight.surroundings import look

    found = look(ENVIRONMENT, folder=str(options.directory), tp=options.tp)
    place = found.place
    several = place is not None and place.processes > 1
    if place is not None and several and place.folder is None and not found.address_error:
        meeting = meet(place, found.host, found.address, options.directory, options.limit)
        found = dataclasses.replace(found, meeting=meeting)
    findings = examine(found)
    rank = 0 if place is None else place.rank
    for finding in findings:
        if rank == 0 or finding.level != "ok":
            print(f"rank {rank}: {finding}" if several else finding, flush=True)
    if options.json is not None:
        file = options.json if rank == 0 else options.json.with_name(f"{options.json.name}.{rank}")
        write_json(file, [dataclasses.asdict(finding) for finding in findings], indent=1)
    return FAILED if any(finding.level == "FAIL" for finding in findings) else DONE


def _parser() -> Parser:
    parser = Parser(COMMAND, DESCRIPTION, EPILOG)
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks in a tensor-parallel group (1)")
    parser.add_argument(
        "--directory", type=path_argument, default="runs", metavar="DIR", help="where runs are kept (runs)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_SECONDS,
        metavar="SECONDS",
        help=f"for all tasks to call ({LIMIT_SECONDS:g})",
    )
    parser.add_argument(
        "--json",
        type=path_argument,
        metavar="FILE.json",
        help="the findings of rank 0; of rank 2: FILE.json.2",
    )
    return parser


def run() -> None:
    """Entry point of the `rrfp-doctor` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
