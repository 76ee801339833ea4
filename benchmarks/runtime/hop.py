"""A message between two processes, by sockets and by NIXL in turns: how long, at what rate, at what cost.

    python -m benchmarks.runtime.hop [--json=FILE] [--check] [--rounds=200]

Half of the time there and back, median of all rounds; of messages above 1 MiB there are fewer. The rate is
that of four messages offered at once. A process that waits for a message is measured for two seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Aim, finish, found_by_ranks, parse

RUN_SECONDS = 600.0
MOST_OF_A_CORE = 3.0


def main() -> int:
    """Measure, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="there and back, of each size (default: 200)")
    options = parser.parse_args()
    module, on_the_cpu = "benchmarks.runtime.hop_rank", {"JAX_PLATFORMS": "cpu"}
    found = found_by_ranks(2, module, options.rounds, seconds=RUN_SECONDS, env=on_the_cpu)
    print("message   transport       hop   shortest        rate")
    for name, own in found["sizes"].items():
        for transport, row in own.items():
            print(
                f"{name:8}  {transport:9}  {row['hop_us']:8.0f} us {row['shortest_us']:7.0f} us "
                f"{row['GB_per_s']:7.2f} GB/s"
            )
    for name, ways in found["several"].items():
        told = ", ".join(f"{way} {us:.0f} us" for way, us in ways.items())
        print(f"{name} in several arrays and a short answer, by NIXL: {told}")
    for transport, share in found["waiting"].items():
        print(f"waiting   {transport:9}  {100 * share:8.2f} % of a core")
    return finish(options, found, aims_of(found))


def aims_of(found: Mapping[str, Any]) -> list[Aim]:
    """What NIXL must reach beside sockets."""
    sizes = found["sizes"]
    late = sizes["64 KiB"]["nixl"]["hop_us"] / sizes["64 KiB"]["socket"]["hop_us"]
    aims = [Aim("hop of 64 KiB by NIXL, of that by sockets", late, 1.0, "times")]
    for name in ("1 MiB", "16 MiB", "64 MiB"):
        rate = sizes[name]["nixl"]["GB_per_s"] / sizes[name]["socket"]["GB_per_s"]
        aims.append(Aim(f"rate of {name} by NIXL, of that by sockets", rate, 1.0, "times", at_least=True))
    share = 100 * found["waiting"]["nixl"]
    return [*aims, Aim("a process that waits, by NIXL", share, MOST_OF_A_CORE, "% of a core")]


if __name__ == "__main__":
    sys.exit(main())
