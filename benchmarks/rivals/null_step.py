"""A whole training step with next to nothing to compute: this runtime beside PyTorch's pipelining, in turns.

    python -m benchmarks.rivals.null_step [--json=FILE] [--check] [--rounds=5]

2 processes, 8 microbatches of 4 x 64 numbers, 4 layers; forwards, backwards and SGD: what is left is what a
runtime costs. Ours goes by sockets and by NIXL, PyTorch's by gloo, in three of its schedules. Everybody runs
once a round, 200 steps after a warm-up. Figures are medians over the rounds: of a round's median step, and of
the CPU time that both processes use for a step. Aims compare what ran in the same round.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.harness import Aim, finish, found_by_ranks, parse
from benchmarks.rivals.environment import require_torch, torch_finds
from benchmarks.rivals.tiny import RANKS

OURS = {"ours, sockets": "socket", "ours, nixl": "nixl"}
THEIRS = {"torch 1f1b": "1f1b", "torch zb-v": "zb-v", "torch dualpipe-v": "dualpipe-v"}
RUN_SECONDS = 300.0


def measure(schedule: str) -> dict[str, dict[str, float]]:
    """One round."""
    module, on_the_cpu = "benchmarks.rivals.null_step_rank", {"JAX_PLATFORMS": "cpu"}
    found = {
        name: found_by_ranks(RANKS, module, schedule, transport, seconds=RUN_SECONDS, env=on_the_cpu)
        for name, transport in OURS.items()
    }
    theirs = torch_finds("torch_null_step", list(THEIRS.values()))
    return found | {name: theirs[own] for name, own in THEIRS.items()}


def ratio(rounds: Sequence[Mapping[str, Mapping[str, float]]], ours: str, theirs: Sequence[str]) -> float:
    """Our step over the shortest of theirs in the same round, median."""
    return median(one[ours]["step"] / min(one[name]["step"] for name in theirs) for one in rounds)


def aims_of(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> list[Aim]:
    """First ahead of PyTorch's 1F1B, then of whichever of its schedules is fastest."""
    rivals = {"torch's 1F1B": ["torch 1f1b"], "torch's fastest": list(THEIRS)}
    return [
        Aim(f"null step, {name}, of {rival}", ratio(rounds, name, theirs), 1.0, "times")
        for rival, theirs in rivals.items()
        for name in OURS
    ]


def main() -> int:
    """Measure, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="in turns (5)")
    parser.add_argument("--schedule", default="bf", metavar="NAME", help="of ours (bf)")
    options = parser.parse_args()
    require_torch()
    rounds = []
    for number in range(options.rounds):
        rounds.append(found := measure(options.schedule))
        said = (f"{name} {1e3 * one['step']:.2f} ms" for name, one in found.items())
        print(f"round {number}: {', '.join(said)}", flush=True)
    figures = {
        name: {what: median(one[name][what] for one in rounds) for what in ("step", "cpu")}
        for name in rounds[0]
    }
    print("                        step      CPU of a step")
    for name, own in figures.items():
        print(f"{name:18} {1e3 * own['step']:7.2f} ms   {1e3 * own['cpu']:7.2f} ms")
    return finish(options, {"medians": figures, "rounds": rounds}, aims_of(rounds))


if __name__ == "__main__":
    sys.exit(main())
