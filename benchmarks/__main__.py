"""Run one: `python -m benchmarks NAME [--json=FILE] [--check] [--write] [FLAGS]`; or list all without a name.

`--json` writes the figures, `--check` exits with 1 when an aim is missed, and names it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.harness import index, load, rank, run


def main(arguments: Sequence[str]) -> int:
    """Run a benchmark, or list all; the exit status."""
    name = next(iter(arguments), "--help")
    if name == "--rank":
        rank(*arguments[1:])
        return 0
    names = index()
    if name in names:
        return run(name, arguments[1:])
    if name not in ("-h", "--help"):
        print(f"benchmarks: no {name!r} among {', '.join(sorted(names))}", file=sys.stderr)
        return 2
    print(__doc__)
    for one in sorted(names):
        own = load(one)
        print(f"{one:16} {own.question} ({own.minutes} min; aims: {own.aims})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
