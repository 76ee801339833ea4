"""`rrfp-why`: why a living run does not move."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rrfp_jax.commands.command_line import Parser, exit_status, interruptible, path_argument, print_whole
from rrfp_jax.errors import DONE, FAILED, UsageError
from rrfp_jax.files import read_whole, staged

COMMAND = "rrfp-why"

DESCRIPTION = """\
Looks at all ranks of a living run and says which of them it waits for, and for what: the first message or
decision that one rank has sent and another has not got, a rank that is in the user's code or loads data, one
that is stopped. Below that: what every rank is at, and the Python stacks of all its threads.

The run goes on undisturbed. It must have been started by rrfp-launch, on this machine, by this user. SIGUSR1
to rrfp-launch has the same printed there. A run that stalls prints it by itself before it ends."""

EPILOG = """\
exit status: 0 the run moves, 1 it does not, 2 refused, 130 interrupted

examples:
  rrfp-why runs/quickstart
  watch -n 10 'rrfp-why runs/quickstart | head -5'"""

POLL_SECONDS = 0.05
LONGEST_DIAGNOSIS = 2**20
"""Bytes of a diagnosis of which the first line is shown."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status (0 the run moves, 1 it does not, 2 refused, 130 interrupted)."""
    return exit_status(COMMAND, interruptible(COMMAND, lambda: _why(arguments)))


def _why(arguments: Sequence[str]) -> int:
    options = _parser().options(arguments)
    if options is None:
        return DONE
    run: Path = options.run
    from rrfp_jax.launcher.hang import judge, render_report  # after --help, which is to be quick
    from rrfp_jax.launcher.snapshot import Look, absent_ranks

    folder, ranks = _living(run)
    try:
        look = Look(folder, ranks)
        while not look.done():
            time.sleep(POLL_SECONDS)
        seen = look.snapshots()
    except PermissionError:
        raise UsageError(f"{run}: the run is another user's; ask as that user") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{run}: its ranks cannot be looked at: {error}") from None
    report = judge(seen, absent=absent_ranks(folder))
    print_whole(render_report(report))
    return DONE if report.moves else FAILED


def _living(run: Path) -> tuple[Path, Sequence[int]]:
    """The folder in which a run lives, and its ranks: its own, or one that will be (`launcher/folders.py`).

    There may be several: killed launchers leave theirs, and a new one begins beside what a run has left.
    """
    from rrfp_jax.launcher.snapshot import living_ranks

    folders = [*([run] if any(run.glob("flight-*")) else []), *staged(run)]
    found = [living_ranks(folder) for folder in folders]
    for folder, ranks in zip(folders, found, strict=True):
        if ranks:
            return folder, ranks
    if None in found:
        raise UsageError(f"{run}: no rank has begun to join the run yet; ask again in a moment")
    if found:
        raise UsageError(f"{run}: no rank of this run lives{_its_end(folders[0])}")
    if not run.is_dir():
        raise UsageError(f"{run}: there is no such folder; give the run's, such as runs/quickstart")
    raise UsageError(f"{run}: has no flight recorders, which only rrfp-launch keeps, or no rank has begun")


def _its_end(folder: Path) -> str:
    """What is known of how a run ended."""
    try:
        text = read_whole(folder / "diagnosis.txt", LONGEST_DIAGNOSIS).decode("utf-8", "replace")
    except OSError:
        return " any more"
    return f" any more; it ended so: {text.partition(chr(10))[0]} (see {folder / 'diagnosis.txt'})"


def _parser() -> Parser:
    parser = Parser(COMMAND, DESCRIPTION, EPILOG)
    parser.add_argument(
        "run", type=path_argument, metavar="RUN", help="the run's folder, such as runs/quickstart"
    )
    return parser


def run() -> None:
    """Entry point of the `rrfp-why` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
