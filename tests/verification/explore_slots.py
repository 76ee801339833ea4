"""All states that one-sided transfers can reach in small cases, and whether each is as it must be.

    python -m tests.verification.explore_slots [--json=FILE] [--check] [--seconds=N]

The machines of both ends (`rrfp_jax/nixl`) are driven through all orders of offers, answers, writes,
copies, ends of programs, rounds, resets and deaths; in every state messages are tried that nobody may send.
`tests/verification/exploration/slots/world.py` says what is checked. Before that, faults are put into the
machines on purpose, which must all be found.
"""

from __future__ import annotations

import sys

from tests.verification.exploration.command import run
from tests.verification.exploration.slots.cases import LARGE, SMALL
from tests.verification.exploration.slots.faults import faults
from tests.verification.exploration.slots.forged import check_forged
from tests.verification.exploration.slots.space import explore

MOST_STATES = 1_000_000
"""Of one case, about 3 GB; a larger one counts as not finished."""


def main() -> int:
    """Look for the faults, explore, print, write."""
    return run(
        __doc__,
        faults(),
        lambda fault: explore(fault.case, fault.makers, check=check_forged),
        (*SMALL, *LARGE),
        lambda case, enough: explore(case, check=check_forged, enough=enough),
        MOST_STATES,
    )


if __name__ == "__main__":
    sys.exit(main())
