"""Bytes that are predicted of programs, against those of XLA's compiler for GPUs that are not there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.harness import REPOSITORY, Aim, Found, bench, output_of, percent_longer, say, table
from rrfp_jax.commands.compile import chosen_run
from rrfp_jax.commands.config_line import read_config_line
from rrfp_jax.commands.overrides import config_of
from rrfp_jax.commands.verbs import MEMORY_SHARE
from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.devices import ACCELERATORS
from rrfp_jax.runtime.programs.compiler import ENVIRONMENT, PLUGINS, is_there

RECORD = Path(__file__).parent / "compiled_bytes.json"

CARD = "h100"

COMPILE = [sys.executable, "-m", "rrfp_jax", "compile", f"--card={CARD}"]

SECONDS = 1800.0
"""That one run may take."""


@dataclass(frozen=True)
class Case:
    """A run by the name of its config, and which of its stages are compiled, one of each kind; all if "".
    Fields that are overridden; processes of the run, None for one for each device."""

    config: str
    stages: str = ""
    overrides: Sequence[str] = ()
    processes: int | None = None

    @property
    def arguments(self) -> list[str]:
        """Of the command line, that describe the run."""
        file = REPOSITORY / "configs" / f"{self.config}.py"
        return [f"--config={file}", *(f"--config.{override}" for override in self.overrides)]

    @property
    def needs_plugin(self) -> bool:
        """Whether its layers can only be traced where JAX's package for GPUs is: cuDNN's attention."""
        return any(override.endswith("=cudnn") for override in self.overrides)

    def compile(self, figures: Path, programs: Path) -> None:
        """Compile it by the command, which writes its figures into one file and programs into a folder."""
        chosen = [f"--stages={self.stages}"] if self.stages else []
        count = [] if self.processes is None else [f"--processes={self.processes}"]
        output_of(
            [*COMPILE, *self.arguments, *chosen, *count, f"--json={figures}", f"--out={programs}"], SECONDS
        )


SPLIT, FULL, NONE = "schedule=bfw", "remat=full", "remat=none"

CASES: Mapping[str, Case] = {
    "quickstart": Case("quickstart", "0,1,3"),
    "quickstart-split": Case("quickstart", "1,3", [SPLIT]),
    "sharded": Case("sharded"),
    "gpt3": Case("gpt3_large"),
    "gpt3-split": Case("gpt3_large", "1,3", [SPLIT]),
    "gpt3-full": Case("gpt3_large", "1,3", [FULL]),
    "gpt3-dots": Case("gpt3_large", "1", ["remat=dots_saveable"]),
    "gpt3-float32": Case("gpt3_large", "1", ["model.dtype=float32"]),
    "gpt3-xla-split": Case("gpt3_large", "1,3", [SPLIT, "model.attention=xla"]),
    "gpt3-cudnn-split": Case("gpt3_large", "1", [SPLIT, "model.attention=cudnn"]),
    "qwen3": Case("qwen3_4b", "0,1,7"),
    "qwen3-full-split": Case("qwen3_4b", "1,7", [SPLIT]),
    "qwen3-none-split": Case("qwen3_4b", "1,7", [NONE, SPLIT]),
    "qwen3-short": Case("qwen3_4b", "1", [NONE, "sequence_length=512", "batch=8"]),
    "qwen3-cudnn": Case("qwen3_4b", "1,7", ["model.attention=cudnn"]),
    "qwen3-tp2": Case("qwen3_4b", "0,1,7", ["mesh.tp=2"], 8),
    "qwen3-tp4": Case("qwen3_4b", "1,7", ["mesh.tp=4"], 8),
    "qwen3-tp2-none-split": Case("qwen3_4b", "1,7", ["mesh.tp=2", NONE, SPLIT], 8),
    "qwen3-vit": Case("qwen3_4b_vit_bigg", "0,1,4,5,7"),
    "llama3": Case("llama3_70b", "0,1,40"),
    "llama3-none-split": Case("llama3_70b", "1,40", [NONE, SPLIT]),
    "llama3-tp8": Case("llama3_70b", "0,1,40", ["mesh.tp=8"], 41),
}


def figures_of(name: str, folder: Path) -> dict[str, Any]:
    """What the compiler says of a case, from its file in a folder; compiled if there is none yet."""
    file = folder / f"{name}.json"
    if not file.exists():
        CASES[name].compile(file, folder / "programs")
    return recorded(json.loads(file.read_text(encoding="utf-8")))


def recorded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the command's figures: bytes, programs and seconds."""
    return {
        "made_with": f"jax {figures['made_for']['jax_version']}, {figures['made_for']['compiler']}",
        "programs": figures["programs"],
        "seconds": round(figures["seconds"], 1),
        "stages": stages_of({own["stage"]: own["ledger"] for own in figures["stages"]}),
    }


def stages_of(ledgers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """By stage, the bytes of its ledger as plain data."""
    return {str(stage): _of_stage(ledger) for stage, ledger in ledgers.items()}


def _of_stage(ledger: Mapping[str, Any]) -> dict[str, Any]:
    parts = ("weight", "optimizer", "accumulator", "parked_gradient")
    return {
        "fixed": sum(ledger[f"{part}_bytes"] for part in parts),
        "buckets": {
            name: {
                "held": sum(chunk["held_after_forward_bytes"] for chunk in bucket["chunks"]),
                "temporaries": {
                    letter: max(chunk["temporary_bytes"][letter] for chunk in bucket["chunks"])
                    for letter in bucket["chunks"][0]["temporary_bytes"]
                },
            }
            for name, bucket in ledger["buckets"].items()
        },
    }


def read_record() -> dict[str, Any]:
    """What the repository has: by case what `recorded` gives."""
    return json.loads(RECORD.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def write_record(cases: Mapping[str, Any]) -> None:
    RECORD.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")


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
    rows = []
    for name, own in found.items():
        case = CASES[name]
        words = [f"`{case.config}`", *(f"`{override}`" for override in case.overrides)]
        fixed = ", ".join(f"{stage}: {of['fixed'] / GIB:.2f}" for stage, of in own["stages"].items())
        rows.append((name, " ".join(words), own["programs"], f"{own['seconds'] / 60:.1f}", fixed))
    return table(["run", "of config", "programs", "minutes", "GiB that stay, by stage"], rows)


def aims_of(pairs: Sequence[Pair]) -> list[Aim]:
    """The worst of held bytes, and the temporaries furthest below what is needed; the worst are named. None
    where nothing is predicted."""
    if not pairs:
        return []
    held = [abs(pair.off) for pair in pairs if pair.what == "held"]
    judged = [pair for pair in pairs if pair.judged and pair.what != "held"]
    aims = [Aim("held bytes, the worst", max(held), HELD_OFF, "%")]
    if judged:
        largest = {(pair.case, pair.stage): pair for pair in sorted(judged, key=lambda pair: pair.found)}
        worst, decisive = (max(own, key=lambda pair: abs(pair.off)) for own in (judged, [*largest.values()]))
        lowest = min(judged, key=lambda pair: pair.off)
        say(f"\n{len(judged)} programs need {SMALL // MIB} MiB of temporaries or more")
        say(f"worst: {_named(worst)}; of each stage's largest program: {_named(decisive)}")
        say(f"median: {median(pair.off for pair in judged):+.1f} %")
        aims.append(Aim(f"most below what is needed ({_named(lowest)})", max(-lowest.off, 0.0), BELOW, "%"))
    return aims


def _named(pair: Pair) -> str:
    return f"{pair.case}, stage {pair.stage}, {pair.what}, {pair.off:+.1f} %"


@bench(
    "How far are predicted bytes from what XLA's compiler for GPUs says?",
    minutes="1, 25 to compile",
    aims="held bytes 2 % off; no bound of temporaries 30 % below what is needed",
)
def gpu_bytes(cases: tuple[str, ...] = tuple(CASES), figures: str = "", keep: bool = False) -> Found:
    """By run, stage and kind of program: what a microbatch holds and what the largest program has of
    temporaries. Predictions are made anew, which takes a minute. What XLA says is in `compiled_bytes.json`.
    With `--figures=FOLDER` it comes from a folder with the figures of `rrfp compile`, by name of the run;
    what is not there is compiled, which needs XLA's compiler for GPUs and minutes for each. `--keep` keeps
    that in the record, beside the runs that are not among the cases, and `--write` puts the tables into
    results/gpu-programs.md."""
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", ENVIRONMENT["JAX_PLATFORMS"])
    there = any(map(is_there, PLUGINS))
    if not there and keep:
        raise UsageError("--keep: without jax[cuda12] or jax[cuda13] not all runs are compared: install one")
    if not there:
        say("without jax[cuda12] or jax[cuda13] here, runs with cuDNN's attention are left out\n")
    names = [name for name in CASES if name in cases and (there or not CASES[name].needs_plugin)]
    record = read_record()
    found = {name: record[name] for name in names if name in record}
    if figures:
        Path(figures).mkdir(parents=True, exist_ok=True)
        found = {name: figures_of(name, Path(figures)) for name in names}
    if keep:
        known = record | found
        found = {name: known[name] for name in CASES if name in known}
        write_record(found)
    pairs = [pair for name, own in found.items() for pair in pairs_of(name, own)]
    tables = {"gpu-programs.md compiled": runs_table(found), "gpu-programs.md foreseen": pairs_table(pairs)}
    if found.keys() != CASES.keys():  # no part of a table goes into the page
        say("\n\n".join(tables.values()))
        tables = {}
    return Found(
        {"pairs": [vars(pair) | {"off_percent": pair.off} for pair in pairs]}, aims_of(pairs), tables
    )
