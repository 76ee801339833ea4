"""What XLA's compiler says of a run for GPUs that are not there, beside what was predicted."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.tasks import KINDS
from rrfp_jax.data.contract import as_data
from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.devices import LINKS, Accelerator
from rrfp_jax.forecast.estimate import Estimate
from rrfp_jax.forecast.forecast import Devices
from rrfp_jax.report.progress_line import shown_progress
from rrfp_jax.runs.compiled_ahead import MadeFor
from rrfp_jax.runs.config import RunConfig
from rrfp_jax.runtime.programs.compiler import absent_gpus
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.runtime.stages.memory import BucketLedger, StageLedger
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import base_of
from rrfp_jax.train.ahead import AheadOfTime, CompiledRun, CompiledStage, compile_ahead
from rrfp_jax.train.auto_schedule import predict
from rrfp_jax.train.auto_split import AUTO, estimate_of
from rrfp_jax.train.named import read_schedule

GIB, MIB = 2**30, 2**20


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

    def write_texts(self, folder: Path) -> None:
        """Every program's HLO as a file of its own.

        Raises:
            UsageError: they cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for own in self.run.stages:
                for name, text in own.texts().items():
                    (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--hlo={folder}: cannot be written: {error.strerror}") from None

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
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("stage", "layers", "bucket", "fixed GiB", "held MiB", "temporaries MiB", "update MiB"):
            table.add_column(column, justify="right")
        for own in self.run.stages:
            for number, name in enumerate(own.ledger.buckets):
                table.add_row(*self._row(own, number, name))
        text = io.StringIO()
        Console(file=text, width=160).print(table)
        names = dict.fromkeys(name for own in self.run.stages for name in own.ledger.buckets)
        text.write("".join(f"bucket {i}: {name}\n" for i, name in enumerate(names)))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())

    def _row(self, own: CompiledStage, number: int, bucket: str) -> list[str]:
        ledger, known = own.ledger, self.predicted.get(own.number)
        before = None if known is None else known.buckets[bucket]
        found = ledger.buckets[bucket]
        return [
            str(own.number),
            " ".join(f"{first}-{end - 1}" for first, end in ledger.layers),
            str(number),
            _pair(None if known is None else known.fixed_bytes, ledger.fixed_bytes, GIB),
            _pair(None if before is None else before.held_bytes, found.held_bytes, MIB),
            " ".join(
                f"{letter} {_pair(_temporary(before, letter), size, MIB)}"
                for letter in (row.letter for row in KINDS)
                if (size := _temporary(found, letter)) is not None
            ),
            f"{own.lasting_temporary_bytes['update'] / MIB:,.1f}",
        ]


def compile_run(
    config: RunConfig,
    card: Accelerator,
    target: str,
    memory: int,
    processes: int | None,
    stages: Sequence[int] | None,
    folder: Path | None,
) -> RunCompiled:
    """Compile a run's programs for a card, and store them.

    Args:
        config: of the run.
        card: every stage's device.
        target: what XLA must know of it.
        memory: bytes that JAX will take of each.
        processes: that the run will have; None for one per device.
        stages: to compile; None for all.
        folder: for the programs; None for the run's own.

    Raises:
        UsageError: a run that could not work, or no compiler for GPUs.
    """
    count = config.processes if processes is None else processes
    if count < 1:
        raise UsageError(f"--processes={count}: give a whole number above 0")
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
    import jax

    jax.config.update("jax_compilation_cache_dir", None)  # programs from it could not be stored
    of_rank = absent_gpus(target, count, config.mesh.devices_of_process(count))
    run, predicted = chosen_run(config, card, memory, count)
    store = Executables(kept, here=False)
    found = compile_ahead(run, of_rank, chosen, memory, store, shown_progress())
    made_for = MadeFor.of(of_rank[0][0], count)
    made_for.write(kept, config.name)
    return RunCompiled(
        headline=(
            f"{config.name} for {of_rank[0][0].device_kind}: {config.mesh.devices} devices of {count} "
            f"processes, schedule {config.schedule}, remat {config.remat}, "
            f"{found.rules.microbatches} microbatches a step; {memory / GIB:.1f} GiB a device"
        ),
        run=found,
        predicted=predicted,
        folder=kept,
        made_for=made_for,
    )


def chosen_run(
    config: RunConfig, card: Accelerator, memory: int, processes: int
) -> tuple[AheadOfTime, dict[int, StageLedger]]:
    """What the run consists of, with schedule and split chosen; and what is predicted of its stages."""
    pipe, optimizer = config.made("pipeline"), config.made("optimizer")
    data, validation = as_data(config.made("train_data")), config.made("validation_data")
    settings, mesh = config.settings, config.mesh
    schedule, split = read_schedule(config.schedule), config.layers_per_virtual_stage
    budget = settings.budget
    devices = Devices(
        accelerator=card,
        link=LINKS[card.link],
        memory=memory,
        setting=budget,
        transport=None if processes == 1 else settings.transport,
    )
    alone = max(mesh.widths) == 1 and not mesh.shard_optimizer
    order: Schedule
    estimate: Estimate | None = None
    if isinstance(schedule, Auto):
        found = predict(schedule, pipe, optimizer, data, settings, mesh, split, devices)
        order, split, estimate = found.hint, found.split, found.estimate
    else:
        order = base_of(schedule)
        if alone:
            estimate = estimate_of(pipe, optimizer, data, settings, mesh, order, devices)
    if split == AUTO:
        if estimate is None:
            raise UsageError("split='auto' with several devices per stage, or replicas: give split=LAYERS")
        split = estimate.suggested().split
    run = AheadOfTime(
        pipe=pipe,
        optimizer=optimizer,
        data=data,
        evaluate=None if validation is None else as_data(validation),
        mesh=mesh,
        schedule=order,
        split=split,
        settings=settings,
    )
    return run, dict(enumerate(estimate.ledgers(split) if alone and estimate is not None else []))


def _temporary(of: BucketLedger | None, letter: str) -> int | None:
    """Of the largest program of this kind; None if there is none, or nothing is known."""
    chunks = [] if of is None else of.chunks
    sizes = [chunk.temporary_bytes[letter] for chunk in chunks if letter in chunk.temporary_bytes]
    return max(sizes, default=None)


def _pair(predicted: int | None, found: int | None, unit: int) -> str:
    """Both in a unit."""
    told = [predicted, found] if predicted is not None else [found]
    return " / ".join("-" if size is None else f"{size / unit:,.2f}" for size in told)
