"""`rrfp doctor`: would a run work where this is started, and what is to be done if not?"""

from __future__ import annotations

import argparse
import dataclasses

from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.commands.preflight.checks import examine
from rrfp_jax.commands.preflight.meeting import meet
from rrfp_jax.commands.preflight.surroundings import look
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, FAILED
from rrfp_jax.json_files import write_json


def main(options: argparse.Namespace) -> int:
    """Run the command; its exit status."""
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
            print_whole(f"rank {rank}: {finding}" if several else str(finding))
    if options.json is not None:
        file = options.json if rank == 0 else options.json.with_name(f"{options.json.name}.{rank}")
        write_json(file, [finding._asdict() for finding in findings], indent=1)
    return FAILED if any(finding.level == "FAIL" for finding in findings) else DONE
