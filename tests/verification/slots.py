"""Memory with NIXL: do slots take what the ledger says, and does a long training leave nothing behind?

    python -m tests.verification.slots [--json=FILE] [--check] [--steps=2000]

Two processes. NIXL's libraries take what they take, which is printed. Then slots are made 1 GiB, and rank 1
holds messages of as much: the growth of each process is compared with what ledger and messages say. Then they
train by NIXL; growth counts from a tenth on.
"""

from __future__ import annotations

import sys

from benchmarks.harness import Aim, finish, on_ranks, parse
from tests.verification.slots_rank import memory_of_ranks

RUN_SECONDS = 1200.0
MOST_OFF = 5.0
MOST_GROWN = 16 * 2**20
"""Of a soak: what allocators keep."""


def off(grown: int, said: int) -> float:
    """Percent by which memory grew more or less than was said."""
    return 100 * abs(grown - said) / said


def main() -> int:
    """Measure, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="of the training (default: 2000)")
    options = parser.parse_args()
    found = on_ranks(2, memory_of_ranks, options.steps, seconds=RUN_SECONDS)
    aims = []
    for rank, own in enumerate(found["in_flight"]):
        print(f"rank {rank}: NIXL's libraries and an agent take {own['library'] / 2**20:.0f} MiB")
        slots, flying = off(own["grown_by_slots"], own["slots"]), off(own["grown"], own["in_flight"])
        aims.append(Aim(f"rank {rank}: slots of {own['slots'] >> 20} MiB, off by", slots, MOST_OFF, "%"))
        aims.append(
            Aim(f"rank {rank}: {own['in_flight'] >> 20} MiB in flight, off by", flying, MOST_OFF, "%")
        )
    for rank, own in enumerate(found["soak"]):
        name = f"rank {rank}: growth in {own['steps']} steps"
        aims.append(Aim(name, own["grown"] / 2**20, MOST_GROWN / 2**20, "MiB"))
        aims.append(Aim(f"rank {rank}: arrays left", own["arrays"], 5, "arrays"))  # tokens of copies
    return finish(options, found, aims)


if __name__ == "__main__":
    sys.exit(main())
