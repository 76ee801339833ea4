"""Runs whose programs are compiled for an absent GPU, and the record of what the compiler said of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY, output_of

RECORD = Path(__file__).parent / "compiled_bytes.json"

CARD = "h100"

COMPILE = [sys.executable, "-m", "rrfp_jax", "compile", f"--card={CARD}"]

SECONDS = 1800.0
"""That one run may take."""


@dataclass(frozen=True)
class Case:
    """A run, and which of its stages are compiled: one of each kind.

    Attributes:
        config: the name of its file.
        stages: to compile, as text; all without it.
        overrides: of its fields.
        processes: of the run; None for one for each device.
    """

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
    """Keep it in the repository."""
    RECORD.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
