"""`python -m launch.local --config=configs/quickstart.py [--config.x=y ...]`: a run in several processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.train.commandline import exit_status
from rrfp_jax.train.crew import Patience
from rrfp_jax.train.folders import RunFolder
from rrfp_jax.train.overrides import configured
from rrfp_jax.train.spawn import spawn

COMMAND = "launch.local"

USAGE = """\
usage: python -m launch.local --config=FILE.py [--config.FIELD=VALUE ...] [-n N]

Trains the run that FILE.py's get_config() describes in as many processes on this machine as its mesh asks
for, or N, and keeps its files in runs/<name>/. With --config=FILE.py --help, lists the fields of that run
with their values. Exit status: 0 done, 1 failed, 2 refused, 130 interrupted."""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status."""
    return exit_status(COMMAND, lambda: _launch(argv))


def _launch(argv: Sequence[str]) -> int:
    leave_accelerators_alone()  # the config is read here too: the devices are the ranks'
    asked, rest = _taken(argv)
    config = configured(rest, USAGE)
    if config is None:
        return DONE
    most = config.processes
    count = most if asked is None else asked
    if not 1 <= count <= most or most % count:
        raise UsageError(
            f"-n {count}: its {most} stages are shared out evenly, so give a number that divides {most}"
        )
    patience = Patience.of(os.environ)
    folder = RunFolder(Path(config.directory), config.name)
    command = [sys.executable, "-m", "rrfp_jax.train.main", *rest]
    return spawn(command, count, folder, command=COMMAND, patience=patience)


def leave_accelerators_alone() -> None:
    """Whatever this process computes, it computes on the CPU; the ranks it starts are not concerned."""
    jax.config.update("jax_platforms", "cpu")


def _taken(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The value of -n, if it is given, and the other arguments."""
    rest = list(argv)
    if "-n" not in rest:
        return None, rest
    at = rest.index("-n")
    value = "".join(rest[at + 1 : at + 2])
    if not value.isdecimal():
        raise UsageError(f"-n {value}: give a number of processes")
    return int(value), rest[:at] + rest[at + 2 :]


def run() -> None:
    """Entry point of `python -m launch.local`."""
    sys.exit(main(sys.argv[1:]))
