"""`rrfp top`: a run in a terminal while it trains."""

from __future__ import annotations

import argparse

from rich.console import Console

from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.report.look import Looker, State
from rrfp_jax.report.watch import shown, watch


def main(options: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    folder = options.run if options.run.name not in ("", "..") else options.run.resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give that of a run, as runs/NAME")
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
