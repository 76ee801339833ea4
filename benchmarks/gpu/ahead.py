"""Part 7: programs that were compiled without this card: does it take them, and are they as good as its own?

found    programs of the quickstart that are loaded from DIR/compiled, and those compiled here, with the
         reason; seconds until the run is ready
steps    seconds of a step with the loaded programs, and with those compiled and tuned here; the losses
bytes    by stage, shape and kind of program: what `rrfp compile` said, what the loaded programs say, and the
         tuned ones; the most that the device held, beside what was predicted

DIR/compiled is made on another machine, with this card's name (results/gpu.md). `--quick` makes it itself,
for this machine's CPU in place of an absent card.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.findings import Findings, Unavailable, write_json
from benchmarks.harness import Aim
from configs import quickstart
from rrfp_jax.commands.compile import chosen_run
from rrfp_jax.forecast.devices import CPU
from rrfp_jax.runs.config import RunConfig
from rrfp_jax.runtime.programs.executables import KEY_FILE, Executables
from rrfp_jax.runtime.stages.memory import StageLedger
from rrfp_jax.train.compile_ahead import MadeFor, compile_ahead, why_compiled
from rrfp_jax.train.report import Report
from rrfp_jax.train.trainer import Trainer

FOLDER, FIGURES, KEY = "compiled", "figures.json", "programs.key"

COMMAND = (
    f"{KEY_FILE}=DIR/{FOLDER}/{KEY} rrfp compile --config=configs/quickstart.py --card=NAME --processes=1 "
    f"--config.directory=DIR/{FOLDER} --json=DIR/{FOLDER}/{FIGURES}"
)

STEPS, WARM_UP = 20, 5

ROOM = 2**40
"""Bytes of a CPU that is not to limit anything."""


def config_in(folder: Path, quick: bool) -> RunConfig:
    """The quickstart on one device, with its programs in a folder."""
    config = quickstart.get_config()
    config = replace(config, directory=str(folder), mesh=replace(config.mesh, share_devices=True))
    if quick:
        model = replace(config.model, d_model=32, d_ff=32)
        config = replace(config, model=model, sequence_length=16, microbatches=4, batch=8)
    return config


def make_here(folder: Path) -> None:
    """What `rrfp compile` leaves in a folder, for this machine's CPU."""
    config, device = config_in(folder, quick=True), jax.local_devices()[0]
    run, _ = chosen_run(config, CPU, ROOM, 1)
    programs = config.settings.executables
    found = compile_ahead(run, [[device]], range(config.mesh.pp), None, Executables(programs, here=False))
    stages = [{"stage": own.number, "ledger": own.ledger.plain()} for own in found.stages]
    write_json(folder / FIGURES, {"programs": found.programs, "stages": stages})


def started(config: RunConfig) -> tuple[Trainer, Sequence[StageLedger], dict[str, Any]]:
    """A trainer that is ready, what its stages need, and what that took."""
    began = perf_counter()
    trainer = config.trainer()
    table = trainer.start(config.made("validation_data"))
    compiled, loaded = trainer._programs
    found: dict[str, Any] = {"compiled": compiled, "loaded": loaded, "seconds": perf_counter() - began}
    folder = config.settings.executables
    if compiled and folder is not None:
        here = MadeFor.of(jax.local_devices()[0], 1)
        found["why_compiled"] = why_compiled(Path(folder), config.name, here)
    return trainer, table, found


def bytes_of(ledgers: Mapping[int, StageLedger]) -> dict[str, int]:
    """By stage, shape and kind of program: temporaries; and what is held."""
    found = {}
    for stage, ledger in ledgers.items():
        for name, bucket in ledger.buckets.items():
            found[f"stage {stage}, {name}, held"] = bucket.held_bytes
            for chunk in bucket.chunks:
                for letter, size in chunk.temporary_bytes.items():
                    found[f"stage {stage}, {name}, {letter}"] = size
    return found


def differing(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, list[int | None]]:
    """Those that are not the same in both."""
    return {name: [size, other.get(name)] for name, size in one.items() if other.get(name) != size}


def steps_of(trainer: Trainer, count: int) -> list[Report]:
    """So many steps."""
    return list(trainer.steps(count))


def measure(found: Findings) -> None:
    """See the module's text."""
    folder = found.folder / FOLDER
    if found.quick:
        folder.mkdir(parents=True, exist_ok=True)
    if (folder / KEY).exists() or found.quick:
        os.environ.setdefault(KEY_FILE, str(folder / KEY))
    jax.config.update("jax_compilation_cache_dir", None)  # programs from it would count as compiled
    config, steps = config_in(folder, found.quick), 3 if found.quick else STEPS
    loaded: Any = None
    with found.section("found") as figures:
        if found.quick:
            make_here(folder)
        if not (folder / FIGURES).exists():
            raise Unavailable(f"there is no {folder / FIGURES}; make it on any machine with: {COMMAND}")
        trainer, table, taken = loaded = started(config)
        figures.update(taken)
        found.aim(Aim("programs compiled although they were compiled ahead", taken["compiled"], 0, ""))
        found.headline = f"{taken['loaded']} of {taken['loaded'] + taken['compiled']} programs found"
    if loaded is None:
        return
    with found.section("steps") as figures, tempfile.TemporaryDirectory() as scratch:
        reports = steps_of(trainer, WARM_UP + steps)
        own = replace(config, directory=scratch)
        tuned, tuned_table, taken = started(own)
        beside = steps_of(tuned, WARM_UP + steps)
        seconds = [float(np.median([r.step_seconds for r in of[WARM_UP:]])) for of in (reports, beside)]
        figures.update(
            compiling_here_seconds=taken["seconds"],
            step_seconds={"compiled ahead": seconds[0], "tuned here": seconds[1]},
            ahead_over_tuned=round(seconds[0] / seconds[1], 3),
            losses={"compiled ahead": reports[-1].loss, "tuned here": beside[-1].loss},
        )
        found.headline += f"; a step {figures['ahead_over_tuned']:.2f} times as long as tuned"
    with found.section("bytes") as figures:
        recorded = json.loads((folder / FIGURES).read_text(encoding="utf-8"))["stages"]
        said = bytes_of({of["stage"]: StageLedger.of_plain(of["ledger"]) for of in recorded})
        here, after = (bytes_of(dict(enumerate(own))) for own in (table, tuned_table))
        figures.update(
            programs=len(said),
            loaded_differ_from_said=differing(said, here),
            tuned_differ_from_said=differing(said, after),
            most_on_the_device=(jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            fixed_and_largest=sum(own.fixed_bytes for own in table)
            + max(own.largest.transient_bytes for own in table),
        )
        count = len(figures["loaded_differ_from_said"])
        found.aim(Aim("bytes of loaded programs that are others than said", count, 0, ""))
