"""`rrfp-top`: a run in a terminal while it trains."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rrfp_jax.commands.command_line import Parser, exit_status, path_argument, print_whole
from rrfp_jax.errors import DONE, UsageError

COMMAND = "rrfp-top"

DESCRIPTION = """\
Shows a run in a terminal while it trains: step and loss, the slowest rank, every stage as a bar of what it
does with a step (computing, and why it is idle), its memory, and how long messages take."""

EPILOG = """\
It reads the files in the run's folder, so it works over ssh, and wherever that folder can be read. It waits
for a run that has not begun. It ends when the run has ended, or by Ctrl-C. If not all stages fit the
terminal, those that are busy longest are shown.

exit status: 0 done, 2 refused

examples:
  rrfp-top runs/quickstart
  rrfp-top runs/quickstart --every=5
  rrfp-top runs/quickstart --once > frame.txt"""

LEAST_SECONDS, MOST_SECONDS = 0.1, 3600.0


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status (0 done, 2 refused)."""
    return exit_status(COMMAND, lambda: _top(arguments))


def _top(arguments: Sequence[str]) -> int:
    options = _parser().options(arguments)
    if options is None:
        return DONE
    if not LEAST_SECONDS <= options.every <= MOST_SECONDS:
        raise UsageError(f"--every={options.every}: give seconds, from {LEAST_SECONDS} to {MOST_SECONDS:.0f}")
    folder = options.run if options.run.name not in ("", "..") else options.run.resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give that of a run, as runs/NAME")
    from rich.console import Console  # after --help, which is to be quick

    from rrfp_jax.report.frame import shown, watch
    from rrfp_jax.report.look import Looker, State

    console = Console(highlight=False)
    if not options.once:
        if not console.is_terminal or console.is_dumb_terminal:
            raise UsageError("standard output is no terminal to draw on: --once prints one frame")
        watch(folder, options.every, console)
        return DONE
    seen = Looker(folder).look()
    if seen.state is State.ABSENT:
        raise UsageError(f"{options.run}: no run has begun there: give the folder of one, as runs/NAME")
    with console.capture() as captured:
        console.print(shown(seen, console, endless=True), soft_wrap=True)
    print_whole(captured.get().rstrip("\n"))
    return DONE


def _parser() -> Parser:
    parser = Parser(COMMAND, DESCRIPTION, EPILOG)
    parser.add_argument(
        "run", type=path_argument, metavar="RUN", help="the run's folder; it need not be there yet"
    )
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")
    parser.add_argument("--once", action="store_true", help="print one frame, and end")
    return parser


def run() -> None:
    """Entry point of the `rrfp-top` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
