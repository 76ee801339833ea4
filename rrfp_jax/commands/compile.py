"""`rrfp compile --config=configs/gpt3_large.py --card=h100`: a run's programs compiled without its GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.commands.plan import GIB, MIB
from rrfp_jax.commands.verbs import COMPILE
from rrfp_jax.core.tasks import KINDS
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, FAILED, UsageError
from rrfp_jax.forecast.devices import ACCELERATORS, LINKS, Accelerator, target_text
from rrfp_jax.json_files import write_json, write_output
from rrfp_jax.printing import warn
from rrfp_jax.report.explanation import as_text

if TYPE_CHECKING:
    from rrfp_jax.forecast.forecast import RunSpec
    from rrfp_jax.runs.config import RunConfig
    from rrfp_jax.runtime.stages.memory import BucketLedger, StageLedger
    from rrfp_jax.train.compile_ahead import CompiledRun, CompiledStage, MadeFor

REMEDY = "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false has cuBLAS do all products, here and in the run"

MOST_SAID = 400
"""Characters of a reason."""


def main(options: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    stages = None if options.stages is None else _numbers(options.stages)
    from rrfp_jax.runtime.programs import compiler  # these import JAX

    ENVIRONMENT.update(compiler.ENVIRONMENT)
    compiler.require_gpu_compiler()
    from jax.errors import JaxRuntimeError

    from rrfp_jax.commands.overrides import config_of

    config = config_of(options.line)
    card = ACCELERATORS[options.card]
    memory = int((card.memory or 0) * options.memory_share)
    try:
        found = compile_run(config, card, memory, options.processes, stages, options.out)
    except JaxRuntimeError as error:
        reason = str(error).partition("\n")[0][:MOST_SAID]  # of what may go on for pages
        warn(f"{COMPILE.command}: XLA gives up: {reason}; {REMEDY}")
        return FAILED
    if options.json is not None:
        write_json(options.json, found.as_json_object(), indent=1)
    if options.hlo is not None:
        for own in found.run.stages:
            for name, text in own.texts().items():
                write_output(options.hlo / f"{name}.txt", text.encode())
    print_whole(str(found))
    return DONE if found.run.refusal is None else FAILED


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--stages={text}: give numbers of stages, such as 0,1,7") from None


@dataclass(frozen=True, kw_only=True)
class RunCompiled:
    """A run's programs for a card. Printed it is a table.

    Attributes:
        headline: what has been compiled, in words.
        run: what compiling has told.
        predicted: by stage, the ledger that was predicted; empty where nothing can be.
        folder: where the programs are.
        made_for: compiler and card.
    """

    headline: str
    run: CompiledRun
    predicted: Mapping[int, StageLedger]
    folder: Path
    made_for: MadeFor

    def as_json_object(self) -> dict[str, Any]:
        """All figures; seconds and bytes."""
        return {
            "run": self.headline,
            "made_for": asdict(self.made_for),
            "programs": self.run.programs,
            "seconds": self.run.seconds,
            "refusal": self.run.refusal,
            "stages": [
                {
                    "stage": own.number,
                    "ledger": own.ledger.plain(),
                    "lasting_temporary_bytes": own.lasting_temporary_bytes,
                    "predicted": self.predicted[own.number].plain() if own.number in self.predicted else None,
                }
                for own in self.run.stages
            ],
        }

    def __str__(self) -> str:
        seconds = f"{self.run.programs} programs compiled in {self.run.seconds:.1f} s, kept in {self.folder}"
        fits = "" if self.run.refusal is None else f"DOES NOT FIT: {self.run.refusal}"
        return "\n\n".join(filter(None, [self.headline, self._table(), seconds, fits]))

    def _table(self) -> str:
        head = ["stage", "layers", "bucket", "fixed GiB", "held MiB", "temporaries MiB", "update MiB"]
        stages = self.run.stages
        rows = [self._row(own, i, name) for own in stages for i, name in enumerate(own.ledger.buckets)]
        names = dict.fromkeys(name for own in stages for name in own.ledger.buckets)
        _, _, table = as_text(160, [head, *rows]).partition("\n")  # the first line is blank
        return "\n".join([table, *(f"bucket {i}: {name}" for i, name in enumerate(names))])

    def _row(self, own: CompiledStage, number: int, bucket: str) -> list[str]:
        ledgers = [*filter(None, [self.predicted.get(own.number)]), own.ledger]
        buckets = [ledger.buckets[bucket] for ledger in ledgers]
        temporaries = {row.letter: [_temporary(one, row.letter) for one in buckets] for row in KINDS}
        return [
            str(own.number),
            " ".join(f"{first}-{end - 1}" for first, end in own.ledger.layers),
            str(number),
            _both([ledger.fixed_bytes for ledger in ledgers], GIB),
            _both([one.held_bytes for one in buckets], MIB),
            " ".join(f"{k} {_both(sizes, MIB)}" for k, sizes in temporaries.items() if sizes[-1] is not None),
            f"{own.lasting_temporary_bytes['update'] / MIB:,.1f}",
        ]


def compile_run(
    config: RunConfig,
    card: Accelerator,
    memory: int,
    processes: int | None,
    stages: Sequence[int] | None,
    folder: Path | None,
) -> RunCompiled:
    """Compile a run's programs for a card, and store them."""
    import jax

    from rrfp_jax.report.progress_line import shown_progress
    from rrfp_jax.runtime.programs.compiler import absent_gpus
    from rrfp_jax.runtime.programs.executables import Executables
    from rrfp_jax.train.compile_ahead import MadeFor, compile_ahead

    count = config.mesh.devices if processes is None else processes
    chosen = range(config.mesh.pp) if stages is None else stages
    if strange := [number for number in chosen if not 0 <= number < config.mesh.pp]:
        raise UsageError(
            f"--stages: there is no stage {strange[0]} of mesh.pp={config.mesh.pp}: give numbers from 0 to "
            f"{config.mesh.pp - 1}"
        )
    config.mesh.groups(count)  # refuses what cannot be shared out, before the compiler is loaded
    found_at = folder or config.settings.executables
    if found_at is None:
        raise UsageError(
            "executables=none: the run keeps no programs; give --out=FOLDER, or leave it at auto"
        )
    kept = Path(found_at)
    jax.config.update("jax_compilation_cache_dir", None)  # programs from it could not be stored
    of_rank = absent_gpus(target_text(card), count, config.mesh.devices_of_process(count))
    run, predicted = chosen_run(config, card, memory, count)
    store = Executables(kept, here=False)
    found = compile_ahead(run, of_rank, chosen, memory, store, shown_progress())
    made_for = MadeFor.of(of_rank[0][0], count)
    made_for.write(kept, config.name)
    headline = (
        f"{config.name} for {of_rank[0][0].device_kind}: {config.mesh.devices} devices of {count} "
        f"processes, schedule {config.schedule}, remat {config.remat}, "
        f"{found.rules.microbatches} microbatches a step; {memory / GIB:.1f} GiB a device"
    )
    return RunCompiled(headline=headline, run=found, predicted=predicted, folder=kept, made_for=made_for)


def chosen_run(
    config: RunConfig, card: Accelerator, memory: int, processes: int
) -> tuple[RunSpec, dict[int, StageLedger]]:
    """What the run consists of, with schedule and split chosen; and what is predicted of its stages."""
    from rrfp_jax.data.contract import as_data
    from rrfp_jax.forecast.forecast import AUTO, Devices, forecast
    from rrfp_jax.sim.choice import Auto

    run, mesh = config.spec(), config.mesh
    link, transport = LINKS[card.link], None if processes == 1 else run.settings.transport
    devices = Devices(
        accelerator=card, link=link, memory=memory, setting=run.settings.budget, transport=transport
    )
    validation = config.made("validation_data")
    run = replace(run, evaluate=None if validation is None else as_data(validation))
    alone = max(mesh.widths) == 1 and not mesh.shard_optimizer
    if not alone and run.split != AUTO and not isinstance(run.schedule, Auto):
        return replace(run, schedule=run.order), {}  # of several devices per stage nothing is predicted
    found = forecast(run, devices)
    ledgers = found.estimate.ledgers(found.split) if alone else []
    return replace(run, schedule=found.estimate.rules.schedule, split=found.split), dict(enumerate(ledgers))


def _temporary(of: BucketLedger, letter: str) -> int | None:
    """Of the largest program of this kind; None if there is none."""
    sizes = [chunk.temporary_bytes[letter] for chunk in of.chunks if letter in chunk.temporary_bytes]
    return max(sizes, default=None)


def _both(sizes: Sequence[int | None], unit: int) -> str:
    """What was predicted, if it was, and what was found, in a unit."""
    return " / ".join(f"{size / unit:,.2f}" for size in sizes if size is not None)
