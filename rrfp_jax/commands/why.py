"""`rrfp why`: why a living run does not move."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.errors import DONE, FAILED, UsageError
from rrfp_jax.files import read_whole, staged
from rrfp_jax.launcher.hang import judge, render_report
from rrfp_jax.launcher.snapshot import Look
from rrfp_jax.runtime.run.recorder import host_name, latest_recorded, recorded, recorder_in

POLL_SECONDS = 0.05
LONGEST_DIAGNOSIS = 2**20
"""Bytes of a diagnosis of which the first line is shown."""


def main(options: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    run: Path = options.run
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
    # Ranks that the launcher has started and that have no flight recorder yet.
    started = (path.stem.removeprefix("rank-") for path in folder.glob("rank-*.log"))
    numbers = sorted(int(number) for number in started if number.isdecimal())
    report = judge(seen, absent=[rank for rank in numbers if not recorder_in(folder, rank).exists()])
    print_whole(render_report(report))
    return DONE if report.moves else FAILED


def _living(run: Path) -> tuple[Path, Sequence[int]]:
    """The folder in which a run lives, its own or one that will be (`launcher/folders.py`); and its ranks."""
    folder, found = latest_recorded(run)
    here = host_name().decode("utf-8", "ignore")  # as recordings have it
    if hosts := sorted({recording.host for recording in found.values()} - {here}):
        raise UsageError(f"{folder}: the run is on {', '.join(hosts)}; run this command there")
    if any(recording.lives for recording in found.values()):
        return folder, sorted(found)
    begins = [place for place in staged(run) if not recorded(place)]
    if found and not begins:
        said, file = "", folder / "diagnosis.txt"
        with suppress(OSError):
            text = read_whole(file, LONGEST_DIAGNOSIS).decode("utf-8", "replace")
            said = f"; it ended so: {text.partition(chr(10))[0]} (see {file})"
        raise UsageError(f"{run}: no rank of this run lives any more{said}")
    if begins or any(run.glob("flight-*")):
        raise UsageError(f"{run}: no rank has begun to join the run yet; ask again in a moment")
    if not run.is_dir():
        raise UsageError(f"{run}: there is no such folder; give the run's, such as runs/quickstart")
    raise UsageError(f"{run}: has no flight recorders, which only rrfp launch keeps, or no rank has begun")
