"""Bytes that are predicted of programs, against those of XLA's compiler for GPUs.

    python -m benchmarks.gpu.foreseen_bytes [--cases=NAME,...] [--json=FILE] [--check]
    python -m benchmarks.gpu.foreseen_bytes --figures=FOLDER [--cases=NAME,...] [--write]

By run, stage and kind of program: what a microbatch holds and what the largest program has of temporaries.
Predictions are made anew, which takes a minute. What XLA says is in `compiled_bytes.json`. With `--figures`
it comes from a folder with the figures of `rrfp compile`, by name of the run; what is not there is compiled,
which needs XLA's compiler for GPUs and minutes for each. `--write` keeps that in the record, beside the
runs that are not among the cases, and puts the tables of all into results/gpu-programs.md.
"""

from __future__ import annotations

import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.compiled_cases import CARD, CASES, Case, figures_of, read_record, stages_of, write_record
from benchmarks.harness import RESULTS, Aim, finish, parse, percent_longer, put_figures, table
from rrfp_jax.commands.command_line import exit_status
from rrfp_jax.commands.compile import chosen_run
from rrfp_jax.commands.config_line import read_config_line
from rrfp_jax.commands.overrides import config_of
from rrfp_jax.commands.verbs import MEMORY_SHARE
from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.devices import ACCELERATORS
from rrfp_jax.runtime.programs.compiler import ENVIRONMENT, PLUGINS, is_there

PAGE = RESULTS / "gpu-programs.md"

MIB, GIB = 2**20, 2**30

SMALL = 16 * MIB
"""Temporaries below are shown and not judged: they decide of no run whether it fits."""

HELD_OFF, BELOW = 2.0, 30.0
"""Per cent that held bytes may be off, and that the bound of temporaries may be below what is needed."""


@dataclass(frozen=True)
class Pair:
    """Bytes of one thing on one stage; `what` is "held" or a kind of program."""

    case: str
    stage: str
    bucket: str
    what: str
    predicted: int
    found: int

    @property
    def off(self) -> float:
        """Per cent by which the prediction is larger."""
        return percent_longer(self.predicted, self.found) if self.found else 0.0

    @property
    def judged(self) -> bool:
        """Whether it counts."""
        return self.what == "held" or self.found >= SMALL

    def __str__(self) -> str:
        off = f" ({self.off:+.0f} %)" if self.judged and abs(self.off) >= 0.5 else ""
        return f"{self.predicted / MIB:,.1f} / {self.found / MIB:,.1f}{off}"


def predicted(case: Case) -> dict[str, Any]:
    """What `stages_of` gives, by prediction."""
    config = config_of(read_config_line(case.arguments))
    card = ACCELERATORS[CARD]
    memory = int((card.memory or 0) * MEMORY_SHARE)
    _, ledgers = chosen_run(config, card, memory, case.processes or config.mesh.devices)
    return stages_of({number: ledger.plain() for number, ledger in ledgers.items()})


def pairs_of(name: str, found: Mapping[str, Any]) -> Iterator[Pair]:
    """All of a case; none of several devices per stage, of which nothing is predicted."""
    known = predicted(CASES[name])
    for stage, own in found["stages"].items() if known else ():
        for bucket, there in own["buckets"].items():
            here = known[stage]["buckets"][bucket]
            yield Pair(name, stage, bucket, "held", here["held"], there["held"])
            for letter, size in there["temporaries"].items():
                yield Pair(name, stage, bucket, letter, here["temporaries"][letter], size)


def pairs_table(pairs: Sequence[Pair]) -> str:
    """A row for each run and stage, of the bucket with the largest found temporaries."""
    kinds, rows = ("held", *"FBIW"), []
    largest: dict[tuple[str, str], dict[str, Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: pair.found):
        largest.setdefault((pair.case, pair.stage), {})[pair.what] = pair
    for case, stage in dict.fromkeys((pair.case, pair.stage) for pair in pairs):
        own = largest[case, stage]
        rows.append((case, stage, *(own.get(what, "") for what in kinds)))
    return table(["run", "stage", *kinds], rows)


def runs_table(found: Mapping[str, Any]) -> str:
    """Minutes and gigabytes of each run."""
    rows = []
    for name, own in found.items():
        case = CASES[name]
        words = [f"`{case.config}`", *(f"`{override}`" for override in case.overrides)]
        fixed = ", ".join(f"{stage}: {of['fixed'] / GIB:.2f}" for stage, of in own["stages"].items())
        rows.append((name, " ".join(words), own["programs"], f"{own['seconds'] / 60:.1f}", fixed))
    return table(["run", "of config", "programs", "minutes", "GiB that stay, by stage"], rows)


def aims_of(pairs: Sequence[Pair]) -> list[Aim]:
    """The worst of held bytes, and the temporaries furthest below what is needed; the worst are named."""
    held = [abs(pair.off) for pair in pairs if pair.what == "held"]
    judged = [pair for pair in pairs if pair.judged and pair.what != "held"]
    aims = [Aim("held bytes, the worst", max(held), HELD_OFF, "%")]
    if judged:
        largest = {(pair.case, pair.stage): pair for pair in sorted(judged, key=lambda pair: pair.found)}
        worst, decisive = (max(own, key=lambda pair: abs(pair.off)) for own in (judged, [*largest.values()]))
        lowest = min(judged, key=lambda pair: pair.off)
        print(f"\n{len(judged)} programs need {SMALL // MIB} MiB of temporaries or more")
        print(f"worst: {_named(worst)}; of each stage's largest program: {_named(decisive)}")
        print(f"median: {statistics.median(pair.off for pair in judged):+.1f} %")
        aims.append(Aim(f"most below what is needed ({_named(lowest)})", max(-lowest.off, 0.0), BELOW, "%"))
    return aims


def _named(pair: Pair) -> str:
    return f"{pair.case}, stage {pair.stage}, {pair.what}, {pair.off:+.1f} %"


def compare(options: Namespace) -> int:
    """Compare and print; the exit status.

    Raises:
        UsageError: an unknown run.
    """
    names = list(CASES) if options.cases is None else options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise UsageError(f"--cases={options.cases}: {unknown[0]!r} is none of {', '.join(CASES)}")
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", ENVIRONMENT["JAX_PLATFORMS"])
    there = any(map(is_there, PLUGINS))
    if not there and options.write:
        raise UsageError("--write: without jax[cuda12] or jax[cuda13] not all runs are compared: install one")
    if not there:
        print("without jax[cuda12] or jax[cuda13] here, runs with cuDNN's attention are left out\n")
    names = [name for name in CASES if name in names and (there or not CASES[name].needs_plugin)]
    if options.figures is not None:
        options.figures.mkdir(parents=True, exist_ok=True)
        found = {name: figures_of(name, options.figures) for name in names}
    else:
        record = read_record()
        found = {name: record[name] for name in names if name in record}
    if options.write:
        known = read_record() | found
        found = {name: known[name] for name in CASES if name in known}
    pairs = [pair for name, own in found.items() for pair in pairs_of(name, own)]
    print(runs_table(found), pairs_table(pairs), sep="\n\n")
    if options.write:
        write_record(found)
        put_figures(PAGE, "compiled", f"\n{runs_table(found)}\n\n")
        put_figures(PAGE, "foreseen", f"\n{pairs_table(pairs)}\n\n")
    figures = {"pairs": [vars(pair) | {"off_percent": pair.off} for pair in pairs]}
    return finish(options, figures, aims_of(pairs))


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    parser = parse(__doc__)
    parser.add_argument("--cases", metavar="NAME,...", help="which runs (all)")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="of rrfp compile")
    parser.add_argument("--write", action="store_true", help="keep them")
    return exit_status("foreseen_bytes", lambda: compare(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
