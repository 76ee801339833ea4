"""`rrfp report`: why the steps of a run took as long as they did, and how two runs differ."""

from __future__ import annotations

import argparse

from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.fields import check_not_read, output_of
from rrfp_jax.files import written_whole
from rrfp_jax.json_files import Unreadable
from rrfp_jax.report.explanation import explain
from rrfp_jax.report.run_folder import READ, read_run

TWO = "compared.html"
"""The page of two runs."""


def report(options: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    folder = options.run if options.run.is_dir() else options.run.parent
    file = folder / ("report.html" if options.run2 is None else TWO) if options.out is None else options.out
    output_of("output", file)
    for given in (options.run, options.run2 or options.run):
        check_not_read("--out", file, [given, *(given / name for name in READ)])
    try:
        run = read_run(options.run)
        other = None if options.run2 is None else read_run(options.run2)
    except Unreadable as error:
        raise UsageError(str(error)) from None
    explanation = explain(run.steps)
    if other is None:
        print_whole(str(explanation))
        from rrfp_jax.report.page import page  # for which the text need not wait

        html = page(run, explanation)
    else:
        from rrfp_jax.report.page import page_of_two
        from rrfp_jax.report.two_runs import TwoRuns

        both = TwoRuns((run, other), (explanation, explain(other.steps)))
        print_whole(str(both))
        html = page_of_two(both)
    try:
        with written_whole(file) as part:
            part.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}; set --out") from None
    print_whole(f"\npictures: {file} (open it in a browser; it needs no network)")
    return DONE
