"""All states that the membership of a small run can reach, and whether each is as it must be.

    python -m tests.verification.explore_membership [--json=FILE] [--check] [--seconds=N]

The machines of two and three ranks (`rrfp_jax/runtime/run/membership.py`) are driven in virtual time through
all orders of messages, ticks, failures, deaths, freezes, cut links and goodbyes. What is checked stands in
`tests/verification/exploration/membership/world.py`. Before that, faults are put into the machine on purpose,
which must all be found.
"""

from __future__ import annotations

import sys

from tests.verification.exploration.command import run
from tests.verification.exploration.membership.cases import LARGE, SMALL
from tests.verification.exploration.membership.faults import faults
from tests.verification.exploration.membership.space import explore

MOST_STATES = 400_000
"""Of one case, about 2 GB; a larger one counts as not finished."""


def main() -> int:
    """Look for the faults, explore, print, write."""
    return run(
        __doc__,
        faults(),
        lambda fault: explore(fault.case, fault.machine),
        (*SMALL, *LARGE),
        lambda case, enough: explore(case, enough=enough),
        MOST_STATES,
    )


if __name__ == "__main__":
    sys.exit(main())
