"""Checks the runtime on this machine's GPU and measures it; see results/gpu.md for what each part answers.

    python -m benchmarks.gpu_check --out=DIR [--quick] [--parts=1,2,...]

Writes DIR/results.json, with what earlier calls found about other parts, DIR/costs.json (part 6) and
DIR/log.txt. Takes less than 9 minutes; `--quick` runs tiny sizes, also without a GPU, whose figures mean
nothing. Exit status: 0 done, 1 a part failed or ran out of time, 2 refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.findings import PASSED
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.supervise import Results, run
from rrfp_jax.commands.command_line import exit_status
from rrfp_jax.errors import DONE, FAILED, UsageError

COMMAND = "gpu_check"


def chosen(text: str) -> list[Part]:
    """The parts that `--parts` names.

    Raises:
        UsageError: an unknown number.
    """
    known = {str(part.number): part for part in PARTS}
    numbers = [number.strip() for number in text.split(",")]
    if unknown := [number for number in numbers if number not in known]:
        raise UsageError(f"--parts={text}: there is no part {unknown[0]!r}; choose from {','.join(known)}")
    return [part for number, part in known.items() if number in numbers]


def table(results: Results) -> str:
    """A line per part that has been run."""
    rows = []
    for number, found in results.parts.items():
        size = "quick" if found["quick"] else "full"
        verdict = found["verdict"] if found["verdict"] != PASSED else f"{PASSED}  {found['headline']}"
        rows.append(f"{number}  {found['title']:15} {size:5} {found['seconds']:6.1f} s  {verdict}")
    return "\n".join(rows)


def check(arguments: Sequence[str]) -> int:
    """Run, print the table, and give the exit status.

    Raises:
        UsageError: nonsense was asked for.
    """
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(COMMAND, description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results are kept")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for trying it out")
    every = ",".join(str(part.number) for part in PARTS)
    parser.add_argument(
        "--parts", default=every, metavar="1,2,...", help="which parts; all of them if left out"
    )
    options = parser.parse_args(arguments)
    parts = chosen(options.parts)
    results = run(parts, options.out, quick=options.quick)
    print(table(results))
    verdicts = [results.parts[str(part.number)]["verdict"] for part in parts]
    return FAILED if any(verdict.startswith(("failed", "ran out")) for verdict in verdicts) else DONE


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    return exit_status(COMMAND, lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
