"""What the commands that explore machines share: look for seeded faults, explore cases, print, write."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.harness import Aim, finish, parse
from tests.verification.exploration.slots.space import Violation

Enough = Callable[[int], bool]
"""Whether so many states are enough."""


def _detected(fault: Any, explore_fault: Callable[[Any], Any]) -> bool:
    """Whether the exploration of a fault's case sees the fault, and sees it as what it is."""
    try:
        explore_fault(fault)
    except Violation as violation:
        return re.search(fault.said, str(violation)) is not None
    return False


def run(
    description: str | None,
    faults: Sequence[Any],
    explore_fault: Callable[[Any], Any],
    cases: Iterable[Any],
    explore: Callable[[Any, Enough], Any],
    most_states: int,
) -> int:
    """Look for the faults, explore the cases in the time that is given, print, write; the exit status."""
    parser = parse(description)
    parser.add_argument("--seconds", type=float, default=300.0, help="to spend (default: 300)")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds

    def enough(states: int) -> bool:
        return states >= most_states or time.monotonic() > until

    missed = [fault.name for fault in faults if not _detected(fault, explore_fault)]
    print(f"faults put in on purpose: {len(faults) - len(missed)} of {len(faults)} found", flush=True)
    results: list[dict[str, Any]] = []
    for case in (cases := tuple(cases)):
        if time.monotonic() > until:
            break
        result: dict[str, Any] = {
            "case": str(case),
            "violation": None,
            "states": 0,
            "moves": 0,
            "whole": False,
        }
        try:
            result |= vars(explore(case, enough))
        except Violation as violation:
            result["violation"] = str(violation)
        results.append(result)
        extent = "all" if result["whole"] else "a part"
        print(result["violation"] or f"{result['states']:9,d} states, {extent}: {case}", flush=True)
    whole, states = (sum(result[name] for result in results) for name in ("whole", "states"))
    print(f"{whole} of {len(cases)} cases explored whole, {states:,d} states")
    wrong = sum(result["violation"] is not None for result in results)
    aims = [Aim("violations", wrong, 0, "cases"), Aim("faults not found", len(missed), 0, "faults")]
    return finish(options, {"seconds": options.seconds, "cases": results}, aims)
