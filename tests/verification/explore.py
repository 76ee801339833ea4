"""All states that small machines can reach, and whether each is as it must be.

    python -m tests.verification.explore [steps|slots|membership] [--json=FILE] [--check] [--seconds=N]

steps: the scheduling core. Cases go from small to large until the time is over: every placement, hint, fixed
order (also as a ranking), limit, accumulation and agreement of groups, up to 3 stages, 3 microbatches, 2
chunks and 2 ranks; for each, all interleavings of arrivals, messages and room.
slots: both ends of one-sided transfers (`rrfp_jax/nixl`), through all orders of offers, answers, writes,
copies, ends of programs, rounds, resets and deaths; in every state messages are tried that nobody may send.
membership: two and three ranks (`rrfp_jax/runtime/run/membership.py`) in virtual time, through all orders of
messages, ticks, failures, deaths, freezes, cut links and goodbyes.

`tests/verification/exploration` says what is checked. Before that, faults are put into the machines on
purpose, which must all be found.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from benchmarks.harness import Aim, finish, parse
from tests.verification.exploration import faults as step_faults
from tests.verification.exploration import space as steps
from tests.verification.exploration.cases import Size, cases, sizes
from tests.verification.exploration.membership import faults as member_faults
from tests.verification.exploration.membership import world as members
from tests.verification.exploration.slots import faults as slot_faults
from tests.verification.exploration.slots import space as slots
from tests.verification.exploration.visits import Enough, Reach, Violation


@dataclass(frozen=True)
class Result:
    """What came of the cases of one size: `finished` were explored to their last state."""

    size: Size | str
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


def result(size: Size | str, found: Sequence[Reach | str | None]) -> Result:
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


@dataclass(frozen=True)
class Kind:
    """Machines to explore: `most` states of a case count as not finished, and take 1 to 3 GB."""

    faults: Callable[[], Sequence[Any]]
    explore_fault: Callable[[Any], Reach]
    explore: Callable[[Any, Enough], Reach]
    most: int
    name: str
    cases: Sequence[Any] = ()

    def results(self, until: float) -> Iterator[Result]:
        """Of each case; none for those that are not begun by then."""
        for case in self.cases:
            yield result(str(case), [examine(self.name, until, case)])


class Steps(Kind):
    """The scheduling core: by size, and on all cores."""

    def results(self, until: float) -> Iterator[Result]:
        """Of each size."""
        every = {size: cases(size) for size in sizes()}
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            examined = partial(examine, self.name, until)
            reached = pool.map(examined, chain.from_iterable(every.values()), chunksize=4)
            for size, own in every.items():
                yield result(size, list(islice(reached, len(own))))


KINDS = {
    "steps": Steps(
        step_faults.faults,
        lambda fault: steps.explore(fault.case, fault.make),
        lambda case, enough: steps.explore(case, enough=enough),
        4_000_000,
        "steps",
    ),
    "slots": Kind(
        slot_faults.faults,
        lambda fault: slots.explore(fault.case, fault.makers, check=slots.check_forged),
        lambda case, enough: slots.explore(case, check=slots.check_forged, enough=enough),
        1_000_000,
        "slots",
        (*slots.SMALL, *slots.LARGE),
    ),
    "membership": Kind(
        member_faults.faults,
        lambda fault: members.explore(fault.case, fault.machine),
        lambda case, enough: members.explore(case, enough=enough),
        400_000,
        "membership",
        (*members.SMALL, *members.LARGE),
    ),
}


def examine(name: str, until: float, case: Any) -> Reach | str | None:
    """How far a case was explored by a moment of `time.monotonic`, or what is wrong; None if not begun."""
    if time.monotonic() > until:
        return None
    kind = KINDS[name]
    try:
        return kind.explore(case, lambda states: states >= kind.most or time.monotonic() > until)
    except Violation as violation:
        return f"{case}: {violation}"


def detected(kind: Kind, fault: Any) -> bool:
    """Whether the exploration sees a fault, and sees it as what it is."""
    try:
        kind.explore_fault(fault)
    except Violation as violation:
        return re.search(fault.said, str(violation)) is not None
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
    parser.add_argument("of", nargs="?", choices=list(KINDS), default="steps", help="(default: steps)")
    parser.add_argument("--seconds", type=float, default=300.0, help="to spend (default: 300)")
    options = parser.parse_args()
    kind = KINDS[options.of]
    faults = kind.faults()
    missed = [fault.name for fault in faults if not detected(kind, fault)]
    print(f"faults put in on purpose: {len(faults) - len(missed)} of {len(faults)} found", flush=True)
    results = []
    for each in kind.results(time.monotonic() + options.seconds):
        results.append(each)
        if each.states or each.violations:
            print(each, *each.violations, sep="\n", flush=True)
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
