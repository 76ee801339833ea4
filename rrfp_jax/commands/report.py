"""`rrfp-report`: why the steps of a run took as long as they did, and how two runs differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rrfp_jax.commands.command_line import Parser, exit_status, path_argument, print_whole
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.fields import check_not_read, output_of
from rrfp_jax.files import written_whole

COMMAND = "rrfp-report"

TWO = "compared.html"
"""The page of two runs."""

DESCRIPTION = """\
Says why the latest steps of a run took as long as they did: the cause that matters most, where all of the
time went, and what changes would save. The scheduling core runs the steps again for that, at their costs.
Of two runs it says the same side by side, and what differs in their configs."""

EPILOG = """\
A run keeps its latest 20 steps in RUN/steps.msgpack. The replay of the steps as they were says how far the
simulator is off; above 5 % it predicts nothing.

exit status: 0 done, 2 refused, 130 interrupted

examples:
  rrfp-report runs/quickstart
  rrfp-report runs/quickstart runs/other
  rrfp-report runs/quickstart/steps.msgpack --out=why.html"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status (0 done, 2 refused, 130 interrupted)."""
    return exit_status(COMMAND, lambda: _report(arguments))


def _report(arguments: Sequence[str]) -> int:
    options = _parser().options(arguments)
    if options is None:
        return DONE
    from rrfp_jax.json_files import Unreadable
    from rrfp_jax.report.explanation import explain  # after --help, which is to be quick
    from rrfp_jax.report.run_folder import READ, read_run

    folder = options.run if options.run.is_dir() else options.run.parent
    file = folder / ("report.html" if options.other is None else TWO) if options.out is None else options.out
    output_of("output", file)
    for given in (options.run, options.other or options.run):
        check_not_read("--out", file, [given, *(given / name for name in READ)])
    try:
        run = read_run(options.run)
        other = None if options.other is None else read_run(options.other)
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


def _parser() -> Parser:
    parser = Parser(COMMAND, DESCRIPTION, EPILOG)
    parser.add_argument("run", type=path_argument, metavar="RUN", help="its folder, or its steps.msgpack")
    parser.add_argument(
        "other", type=path_argument, nargs="?", metavar="RUN2", help="another one, to be compared with it"
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        metavar="FILE.html",
        help=f"where the page goes (RUN/report.html; of two, RUN/{TWO})",
    )
    return parser


def run() -> None:
    """Entry point of the `rrfp-report` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
