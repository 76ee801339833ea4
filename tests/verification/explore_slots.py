"""All states that one-sided transfers can reach in small cases, and whether each is as it must be.

    python -m tests.verification.explore_slots [--json=FILE] [--check] [--seconds=N]

The machines of both ends (`rrfp_jax/nixl`) are driven through all orders of offers, answers, writes,
copies, ends of programs, rounds, resets and deaths; in every state messages are tried that nobody may send.
`tests/verification/exploration/slots/world.py` says what is checked. Before that, faults are put into the
machines on purpose, which must all be found.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any

from benchmarks.harness import Aim, finish, parse
from tests.verification.exploration.slots.cases import LARGE, SMALL
from tests.verification.exploration.slots.faults import Fault, faults
from tests.verification.exploration.slots.forged import check_forged
from tests.verification.exploration.slots.space import Violation, explore
from tests.verification.exploration.slots.world import Case

MOST_STATES = 1_000_000
"""Of one case, about 3 GB; a larger one counts as not finished."""


def detected(fault: Fault) -> bool:
    """Whether the exploration sees a fault, and sees it as what it is."""
    try:
        explore(fault.case, fault.makers, check=check_forged)
    except Violation as violation:
        return re.search(fault.said, str(violation)) is not None
    return False


def examine(case: Case, until: float) -> dict[str, Any]:
    """What came of a case, up to a moment of `time.monotonic`."""
    try:
        reach = explore(
            case,
            check=check_forged,
            enough=lambda states: states >= MOST_STATES or time.monotonic() > until,
        )
    except Violation as violation:
        return {"case": str(case), "violation": str(violation), "states": 0, "moves": 0, "whole": False}
    return {"case": str(case), "violation": None} | vars(reach)


def main() -> int:
    """Look for the faults, explore, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="to spend (default: 300)")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    missed = [fault.name for fault in faults() if not detected(fault)]
    print(f"faults put in on purpose: {len(faults()) - len(missed)} of {len(faults())} found", flush=True)
    results = []
    for case in (*SMALL, *LARGE):
        if time.monotonic() > until:
            break
        results.append(examine(case, until))
        extent = "all" if results[-1]["whole"] else "a part"
        print(results[-1]["violation"] or f"{results[-1]['states']:9,d} states, {extent}: {case}", flush=True)
    whole, states = (sum(result[name] for result in results) for name in ("whole", "states"))
    print(f"{whole} of {len(SMALL) + len(LARGE)} cases explored whole, {states:,d} states")
    wrong = sum(result["violation"] is not None for result in results)
    aims = [Aim("violations", wrong, 0, "cases"), Aim("faults not found", len(missed), 0, "faults")]
    return finish(options, {"seconds": options.seconds, "cases": results}, aims)


if __name__ == "__main__":
    sys.exit(main())
