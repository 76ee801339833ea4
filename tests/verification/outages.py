"""A link between two nodes is dead for a while, shorter than the limit on silence: the run must go on.

    python -m tests.verification.outages [--rounds=10] [--seconds=1,5,10,14,20] [--cases=socket-kernel,...]
        [--json=FILE] [--check]

Two ranks on two isolated nodes (tests/nodes) train; RRFP_SILENCE_SECONDS is 25, as usual. Again and again one
node loses all its packets, both ways, for some seconds. Told: whether training goes on, and how long after
the link was back the next step ended. Cases: by sockets and by NIXL, each with TCP's pauses bounded where the
kernel can ("kernel", TCP_RTO_MAX_MS, Linux 6.15), and doubled as before ("doubling"). All cases run at once,
each on nodes of its own. For root on Linux.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import Aim, finish, parse
from tests.nodes.nodes import Nodes

ROOT = Path(__file__).parents[2]
CASES = ("socket-kernel", "socket-doubling", "nixl-kernel", "nixl-doubling")
START_SECONDS = 240.0
"""For the first step, on a busy machine."""
AFTER_SECONDS = 90.0
"""From the end of an outage to the next step, at most; TCP may double its pause once more."""
LIMIT_SECONDS = 25.0
HEALED = "n1"


@dataclass(frozen=True)
class Outage:
    """One outage: seconds from its end to that of the next step, or how the run ended."""

    case: str
    seconds: float
    after: float | None
    ended: str = ""


class Pair:
    """Two ranks that train on two nodes."""

    def __init__(self, case: str, folder: Path) -> None:
        self.nodes = Nodes(2, shared=[ROOT, Path(sys.prefix), Path(sys.base_prefix), folder])
        self.steps, self.outputs = folder / "steps", [folder / f"rank-{rank}" for rank in (0, 1)]
        (folder / "token").write_text(os.urandom(32).hex())
        (folder / "token").chmod(0o600)
        self.ranks = []
        for rank, node in enumerate(self.nodes.names):
            environment = {
                "RRFP_COORDINATOR": f"{self.nodes.addresses['n0']}:9876",
                "RRFP_PROCESSES": "2",
                "RRFP_RANK": f"{rank}",
                "RRFP_TOKEN_FILE": f"{folder}/token",
                "JAX_PLATFORMS": "cpu",
            }
            command = [sys.executable, "-m", "tests.support.outage_rank", *case.split("-"), self.steps]
            with open(self.outputs[rank], "w") as output:
                options = {"env": {**os.environ, **environment}, "stdout": output}
                options |= {"stderr": subprocess.STDOUT, "folder": ROOT}
                self.ranks.append(self.nodes.start(node, *command, **options))

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.nodes.close()

    def next_step(self, after: float, seconds: float) -> float | None:
        """When the first step after that time ended; None if a rank has ended, or none has in so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and all(rank.poll() is None for rank in self.ranks):
            with contextlib.suppress(OSError):
                later = [at for line in self.steps.read_text().split() if (at := float(line)) > after]
                if later:
                    return later[0]
            time.sleep(0.05)
        return None

    def says(self) -> str:
        """What the ranks said last."""
        return " | ".join(output.read_text()[-600:].strip() for output in self.outputs)


def suffer(case: str, lengths: Sequence[float]) -> list[Outage]:
    """A pair goes through outages one after another; a new pair follows one that has ended."""
    found: list[Outage] = []
    while len(found) < len(lengths):
        with tempfile.TemporaryDirectory(prefix="outages-") as folder, Pair(case, Path(folder)) as pair:
            if pair.next_step(0.0, START_SECONDS) is None:
                raise RuntimeError(f"{case} does not start: {pair.says()}")
            for seconds in lengths[len(found) :]:
                begun = time.time()
                pair.nodes.mute(HEALED)
                time.sleep(max(begun + seconds - time.time(), 0.0))
                pair.nodes.heal(HEALED)
                back = time.time()
                at = pair.next_step(back, AFTER_SECONDS)
                found.append(Outage(case, seconds, at and at - back, "" if at else pair.says()))
                print(found[-1], flush=True)
                # Two steps more, so that all is quiet again.
                if at is None or pair.next_step(time.time() + 1.0, AFTER_SECONDS) is None:
                    break
    return found


def table(found: Sequence[Outage]) -> str:
    """A row for each case and length."""
    lines = ["| case | outage (s) | went on | next step after (s): median | most |", "|---|---|---|---|---|"]
    for case, seconds in dict.fromkeys((one.case, one.seconds) for one in found):
        own = [one for one in found if (one.case, one.seconds) == (case, seconds)]
        after = [one.after for one in own if one.after is not None] or [float("nan")]
        went = f"{sum(one.after is not None for one in own)} of {len(own)}"
        lines.append(f"| {case} | {seconds:g} | {went} | {median(after):.1f} | {max(after):.1f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Go through all cases at once."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", default="1,5,10,14,20")
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args(argv)
    lengths = [float(text) for text in options.seconds.split(",")] * options.rounds
    with ThreadPoolExecutor(len(CASES)) as pool:
        parts = pool.map(lambda case: suffer(case, lengths), options.cases.split(","))
        found = [one for part in parts for one in part]
    print(table(sorted(found, key=lambda one: (one.case, one.seconds))))
    aims = [Aim("runs ended by outages", sum(one.after is None for one in found), 0, "")]
    return finish(options, [asdict(one) for one in found], aims)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
