"""`rrfp report`: why the steps of a run took as long as they did, and how two runs differ."""

from __future__ import annotations

import argparse

from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.fields import check_not_read, output_of
from rrfp_jax.json_files import Unreadable, write_output
from rrfp_jax.report.explanation import explain
from rrfp_jax.report.run_folder import READ, TwoRuns, absent, read_run
from rrfp_jax.report.timeline import MISSING, can_draw


def main(options: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    folder = options.run if options.run.is_dir() else options.run.parent
    file = folder / "report.html" if options.out is None else options.out
    if not options.run.exists():
        raise UsageError(absent(options.run))
    if options.run2 is None:
        if options.out is None and can_draw():
            try:
                output_of("--out", file)
            except UsageError as error:
                raise UsageError(f"{error} with --out=FILE.html") from None
        check_not_read("--out", file, [options.run, *(options.run / name for name in READ)])
        if file.suffix.lower() not in (".html", ".htm"):
            raise UsageError(f"{file}: the name of a page ends with .html or .htm")
    elif options.out is not None:
        raise UsageError("--out is for the page of one run: two are compared in words and tables")
    try:
        run = read_run(options.run)
        other = None if options.run2 is None else read_run(options.run2)
    except Unreadable as error:
        raise UsageError(str(error)) from None
    explanation = explain(run.steps)
    if other is not None:
        print_whole(str(TwoRuns((run, other), (explanation, explain(other.steps)))))
        return DONE
    print_whole(f"{run.head}{explanation}")
    if not can_draw():
        if options.out is not None:
            raise UsageError(f"{file}: {MISSING}")
        print_whole(f"\nno page: {MISSING}")
        return DONE
    from rrfp_jax.report.page import page  # for which the text need not wait

    write_output(file, page(run, explanation).encode())
    print_whole(f"\npictures: {file} (open it in a browser; it needs no network)")
    return DONE
