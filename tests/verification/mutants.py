"""Bugs of the field and of our own making, put into this code one by one: do the named tests find them?

    python -m tests.verification.mutants [--json=FILE] [--check] [--only=NAME,...] [--everything] [--jobs=N]

The table is `tests/verification/bugs.md`; `tests/verification/mutation` has what makes each mutant. First
all named tests must pass as the code is. Then each mutant is put into a fresh pytest process, and into all
processes that its tests start, and its named tests must all fail. A mutant that is never executed is a fault
of the table. A hang counts as found if a test ends it, but not if the limit of this command does. With
`--everything`, mutants that their tests do not find are tried on all tests until one fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.harness import Aim, finish, parse
from tests.verification.mutation.table import Mutant, mutants
from tests.verification.mutation.trial import Ran, Trial, run, tried

FEWEST = 40
"""Mutants that the table must have."""
BASELINE_SECONDS = 3600.0
EVERYTHING = ("-n", "2", "--dist", "loadfile", "-x", "-m", "not optimized")
EVERYTHING_SECONDS = 7200.0


def chosen(only: str) -> list[Mutant]:
    """The mutants of these names, separated by commas; all for none."""
    names = [name for name in only.split(",") if name]
    known = {mutant.id: mutant for mutant in mutants()}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"--only={','.join(unknown)}: no such mutant; the table has {', '.join(known)}")
    return [known[name] for name in names] if names else [*known.values()]


def without_a_mutant(own: Sequence[Mutant]) -> Ran:
    """All named tests, with the code as it is."""
    tests = list(dict.fromkeys(test for mutant in own for test in mutant.tests))
    return run(tests, {}, BASELINE_SECONDS)


def line(trial: Trial) -> str:
    """A trial as a line of the table."""
    by = ", ".join(_short(name) for name in trial.by[:2]) or "-"
    return f"{trial.mutant.id:38} {trial.verdict:14} {trial.ran.seconds:6.0f}  {by}"


def main(argv: Sequence[str]) -> int:
    """Try the mutants, print the table, and give the exit status."""
    options = _options(argv)
    own = chosen(options.only)
    baseline = without_a_mutant(own)
    wrong = [name for name, failed in baseline.failed.items() if failed]
    if baseline.status != 0:
        print(f"without a mutant: {', '.join(wrong) or baseline.said}", flush=True)
        return 1
    print(f"without a mutant: {len(baseline.failed)} tests pass ({baseline.seconds:.0f} s)\n")
    print(f"{'mutant':38} {'verdict':14} {'s':>6}  found by", flush=True)
    trials = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for trial in pool.map(tried, own):
            trials.append(trial)
            print(line(trial), flush=True)
            if trial.verdict in ("broken", "hung"):
                print(trial.ran.said, flush=True)
    lost = [trial for trial in trials if trial.verdict != "found"]
    if options.everything:
        for trial in lost:
            print(line(tried(trial.mutant, ["tests"], EVERYTHING_SECONDS, *EVERYTHING)), flush=True)
    aims = [
        Aim("mutants that their tests do not find", len(lost), 0, "mutants"),
        Aim("mutants", len(trials), 1 if options.only else FEWEST, "mutants", at_least=True),
    ]
    print(f"\n{len(trials) - len(lost)} of {len(trials)} found")
    return finish(options, {"mutants": list(map(_figures, trials))}, aims)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = parse(__doc__)
    parser.add_argument("--only", default="", metavar="NAME,...", help="only these mutants")
    parser.add_argument(
        "--everything", action="store_true", help="try survivors on all tests, until one fails"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time (default: 1)")
    return parser.parse_args(argv)


def _short(name: str) -> str:
    """A test's name without the cases of its parameters."""
    return name.removeprefix("tests/").partition("[")[0]


def _figures(trial: Trial) -> dict[str, Any]:
    mutant, ran = trial.mutant, trial.ran
    told = {"id": mutant.id, "source": mutant.source, "target": mutant.target}
    return told | {
        "verdict": trial.verdict,
        "by": {name: ran.failed[name][:300] for name in trial.by},
        "seconds": round(ran.seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
