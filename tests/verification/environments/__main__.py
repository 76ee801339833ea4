"""Runs in odd environments: how each ends, what it says, and whether anything is lost that docs promise.

    python -m tests.verification.environments [--only=WORDS] [--list] [--json=FILE] [--check]

A line per case: exit status, seconds, the first sentence that tells of its end. A case has failed if it hung,
left a process, printed a traceback of ours, ended with another status or sentence, or lost a line of
`metrics.jsonl` or a checkpoint. What failed cases printed is below the table. Cases that this machine cannot
run are named. The cases are in `cases_*.py`; --only takes words that must all be in a name. Linux only.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Aim, finish, parse
from tests.verification import environments
from tests.verification.environments.living import Case, Outcome, run_case, sentence


def main(argv: Sequence[str]) -> int:
    """Run the cases, print the table, and give the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="only cases whose name has these words")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
    cases = [case for case in all_cases() if all(word in case.name for word in options.only.split())]
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    if not cases:
        sys.exit(f"--only={options.only}: no case has these words in its name; --list names all")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else ignored under nohup
    rows: list[tuple[Case, Outcome]] = []
    print("case                                               status  seconds  sentence")
    with tempfile.TemporaryDirectory() as kept:
        for case in cases:
            with tempfile.TemporaryDirectory() as scratch:
                rows.append((case, run_case(case, Path(scratch), Path(kept))))
            print(_row(*rows[-1]), flush=True)
    for case, outcome in rows:
        if outcome.faults:
            print(f"\n{case.name}: {'; '.join(outcome.faults)}\n{outcome.text}")
    figures = {"cases": [{"name": case.name, **asdict(outcome)} for case, outcome in rows]}
    return finish(options, figures, _aims(rows))


def all_cases() -> list[Case]:
    """Those of all modules `cases_*`, in the order of their names."""
    found: list[Case] = []
    for module in sorted(each.name for each in pkgutil.iter_modules(environments.__path__)):
        if module.startswith("cases_"):
            found += importlib.import_module(f"{environments.__name__}.{module}").CASES
    repeated = [name for name, count in Counter(case.name for case in found).items() if count > 1]
    if repeated:
        raise ValueError(f"several cases are called {repeated[0]!r}")
    return found


def _row(case: Case, outcome: Outcome) -> str:
    if outcome.missing:
        return f"{case.name:50} {'-':>6}  {'-':>7}  not run: needs {outcome.missing}"
    status = "hung" if outcome.status is None else outcome.status
    mark = "  FAULT" if outcome.faults else ""
    return f"{case.name:50} {status:>6}  {outcome.seconds:7.1f}  {sentence(outcome.text)}{mark}"


def _aims(rows: Sequence[tuple[Case, Outcome]]) -> list[Aim]:
    return [
        Aim("cases with a fault", sum(bool(outcome.faults) for _, outcome in rows), 0, "cases"),
        Aim("cases that this machine cannot run", sum(bool(o.missing) for _, o in rows), 0, "cases"),
        Aim("processes left behind", sum(len(outcome.left) for _, outcome in rows), 0, ""),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
