"""All states that the scheduling core can reach in small steps, and whether each is as it must be.

    python -m tests.verification.explore [--json=FILE] [--check] [--seconds=N]

Cases go from small to large until the time is over: every placement, hint, fixed order (also as a ranking),
limit, accumulation and agreement of groups, up to 3 stages, 3 microbatches, 2 chunks and 2 ranks. For each,
all interleavings of arrivals, messages and room; `tests/verification/exploration/space.py` has the checks.
Before that, faults are put into the core on purpose, which must all be found.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from benchmarks.harness import Aim, finish, parse
from tests.verification.exploration.cases import Size, cases, sizes
from tests.verification.exploration.faults import Fault, faults
from tests.verification.exploration.machines import Case
from tests.verification.exploration.space import Reach, Violation, explore

MOST_STATES = 4_000_000
"""Of one case, about 1 GB; a larger one counts as not finished."""


@dataclass(frozen=True)
class Result:
    """What came of the cases of one size: `finished` were explored to their last state."""

    size: Size
    cases: int
    finished: int
    states: int
    moves: int
    largest: int
    violations: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.finished:5d} of {self.cases:5d} cases, {self.states:10,d} states, largest "
            f"{self.largest:9,d}: {self.size}"
        )


def result(size: Size, found: Sequence[Reach | str | None]) -> Result:
    """Sum up what `examine` gave for the cases of a size."""
    seen = [reach for reach in found if isinstance(reach, Reach)]
    return Result(
        size=size,
        cases=len(found),
        finished=sum(reach.whole for reach in seen),
        states=sum(reach.states for reach in seen),
        moves=sum(reach.moves for reach in seen),
        largest=max((reach.states for reach in seen if reach.whole), default=0),
        violations=tuple(text for text in found if isinstance(text, str)),
    )


def examine(until: float, case: Case) -> Reach | str | None:
    """How far a case was explored by a moment of `time.monotonic`, or what is wrong; None if not begun."""
    if time.monotonic() > until:
        return None
    try:
        return explore(case, enough=lambda states: states >= MOST_STATES or time.monotonic() > until)
    except Violation as violation:
        return f"{case}: {violation}"


def detected(fault: Fault) -> bool:
    """Whether the exploration sees a fault, and sees it as what it is."""
    try:
        explore(fault.case, fault.make)
    except Violation as violation:
        return fault.said in str(violation)
    return False


def figures_of(results: Sequence[Result]) -> dict[str, Any]:
    """Sums over all sizes, and each size's own figures."""
    summed = ("cases", "finished", "states", "moves")
    totals: dict[str, Any] = {name: sum(getattr(each, name) for each in results) for name in summed}
    totals["largest"] = max(each.largest for each in results)
    return totals | {"sizes": [asdict(each) | {"size": str(each.size)} for each in results]}


def main() -> int:
    """Look for the faults, explore, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="to spend (default: 300)")
    options = parser.parse_args()
    missed = [fault.name for fault in faults() if not detected(fault)]
    print(f"faults put in on purpose: {len(faults()) - len(missed)} of {len(faults())} found", flush=True)
    every = {size: cases(size) for size in sizes()}
    until, results = time.monotonic() + options.seconds, []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        reached = pool.map(partial(examine, until), chain.from_iterable(every.values()), chunksize=4)
        for size, own in every.items():
            results.append(result(size, list(islice(reached, len(own)))))
            if results[-1].states:
                print(results[-1], *results[-1].violations, sep="\n", flush=True)
    figures = figures_of(results)
    print(
        f"{figures['finished']} of {figures['cases']} cases explored whole, {figures['states']:,d} states, "
        f"{figures['moves']:,d} transitions, the largest case {figures['largest']:,d} states"
    )
    wrong = sum(len(each.violations) for each in results)
    aims = [Aim("violations", wrong, 0, "cases"), Aim("faults not found", len(missed), 0, "faults")]
    return finish(options, {"seconds": options.seconds} | figures, aims)


if __name__ == "__main__":
    sys.exit(main())
