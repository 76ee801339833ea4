"""All programs of a run, compiled and stored without its devices: nothing is allocated or run.

What is compiled is what `Engine.start` and `Stepper.start` would compile, by the same code, for devices that
may be absent. So a start finds each program by the same key; beside the programs it is written what they were
made for, so that a run that finds none of them can say why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax

from rrfp_jax.core.step_rules import StepRules, bucket_name
from rrfp_jax.core.tasks import Kind
from rrfp_jax.data.contract import Microbatch, buckets_of, declared_buckets, plan_step
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.forecast import RunSpec
from rrfp_jax.json_files import Unreadable, read_json, write_json
from rrfp_jax.progress import Progress, silent
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.engine.settings import check_order
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.programs.compiler import compile_pool, compiled_for, each_once
from rrfp_jax.runtime.programs.executables import COMPILER_VARIABLES, Executables, compiler_of, flags_for
from rrfp_jax.runtime.programs.gradients import leaves_of, wide
from rrfp_jax.runtime.programs.stage_programs import StagePrograms
from rrfp_jax.runtime.sizes import in_words, nbytes, temporary_bytes
from rrfp_jax.runtime.stages.memory import BucketLedger, StageLedger, memory_of_step
from rrfp_jax.runtime.stages.staging import LastingPrograms
from rrfp_jax.runtime.transport.choice import compile_ahead as compile_transport
from rrfp_jax.train.checks import rows_program


@dataclass(frozen=True)
class CompiledStage:
    """What compiling has told of a stage: its ledger, as a run says it at its start, and its programs.

    Attributes:
        lasting: those that do not depend on microbatches: "accumulate" (of each chunk), "norms", "update".
        tasks: by bucket and kind of task ("F", "B", "I", "W"), those of all kinds of segments.
    """

    number: int
    ledger: StageLedger
    lasting: Mapping[str, Sequence[Any]]
    tasks: Mapping[str, Mapping[str, Sequence[Any]]]

    @property
    def lasting_temporary_bytes(self) -> dict[str, int]:
        """What the lasting programs need while they run, besides arguments and results."""
        return {name: max(map(temporary_bytes, own), default=0) for name, own in self.lasting.items()}

    def texts(self) -> dict[str, str]:
        """The programs in HLO after all optimizations, by a name that a file can have."""
        named = {f"{name}-{i}": one for name, own in self.lasting.items() for i, one in enumerate(own)}
        for b, of_bucket in enumerate(self.tasks.values()):
            for letter, own in of_bucket.items():
                named |= {f"{letter}-bucket-{b}-segment-{n}": one for n, one in enumerate(own)}
        return {f"stage-{self.number}-{name}": one.as_text() for name, one in named.items()}


class CompiledRun(NamedTuple):
    """What compiling has told.

    `refusal` says why the run does not fit, None if it does; `seconds` is the time of all `programs`.
    """

    stages: Sequence[CompiledStage]
    rules: StepRules
    refusal: str | None
    programs: int
    seconds: float


def compile_ahead(
    run: RunSpec,
    of_rank: Sequence[Sequence[jax.Device]],
    stages: Collection[int],
    memory: int | None,
    executables: Executables,
    progress: Progress = silent,
) -> CompiledRun:
    """Compile and store every program that stages of a run need, on devices that need not be there.

    Args:
        run: its schedule and split chosen.
        of_rank: the devices of each process.
        stages: to compile, by number.
        memory: bytes of a device that JAX takes; None for no limit.
        executables: where programs are stored.
        progress: is told how far it is.

    Raises:
        UsageError: a run that could not work.
    """
    began, plan = perf_counter(), plan_step(run.data, 0)
    engine = run.engine(run.mesh.lay_out_on(of_rank, stages), None, executables)
    layout, library, staging = engine.layout, engine.library, engine.staging
    settings, budget = run.settings, run.settings.budget  # as a Trainer has them with so much memory
    if budget is None or (budget == "auto" and memory is None):
        settings = settings.limited(run.mesh.pp)
    rules = settings.rules(run.mesh.placement(run.order), layout.count_of(len(plan)), run.order)
    check_order(rules)
    library.progress = progress
    buckets = list(dict.fromkeys([*buckets_of(plan), *declared_buckets(run.data)]))
    for bucket in buckets:
        library.examine(bucket)
    with compile_pool() as pool:
        compiled = staging.compile(pool)
        staging.compile_start(pool)
        lasting = compiled()
    library.prepare(buckets, rules)
    _compile_rest(run, engine, plan)
    slots = _slot_bytes(engine) if len(of_rank) > 1 else {}
    found = [
        _stage(number, engine, lasting, rules, memory, slots.get(number, 0))
        for number in layout.stage_meshes
        if number < layout.stages
    ]
    refusal = None
    if len(found) == layout.stages:
        buckets = buckets_of(plan)[:: layout.replicas]  # of the first
        refusal = _refusal(run, found, rules, [*map(bucket_name, buckets)])
    return CompiledRun(
        stages=found,
        rules=rules,
        refusal=refusal,
        programs=executables.compiles,
        seconds=perf_counter() - began,
    )


def _compile_rest(run: RunSpec, engine: Engine, plan: Sequence[Microbatch]) -> None:
    """The check of the loss, and forwards of evaluations."""
    first = next(iter(engine.layout.stage_meshes.values())).devices[0]
    compiler = engine.staging.compiler(StageMesh((first,)))
    rows_program(engine, run.data, plan, compiler)
    if run.evaluate is not None:
        plan = plan_step(run.evaluate, 0)
        count = engine.layout.count_of(len(plan))
        rules = run.settings.rules(engine.placement, count, run.order, forward_only=True)
        engine.library.prepare(declared_buckets(run.evaluate) or buckets_of(plan), rules)


def _slot_bytes(engine: Engine) -> dict[int, int]:
    """Of each stage, for messages from other processes; what copies these out of them is compiled, too.

    But for tied values: these are compiled at the start.
    """
    compiler = partial(compiled_for, engine.executables)
    transport, arrivals = engine.spec.settings.transport, engine.library.arrivals
    trained, evaluated = arrivals("train"), arrivals("evaluate")
    return compile_transport(transport, engine.layout.devices, compiler, trained, evaluated)


def _stage(
    number: int, engine: Engine, lasting: LastingPrograms, rules: StepRules, memory: int | None, slots: int
) -> CompiledStage:
    """What is known of a stage now."""
    layout, library, chunks = engine.layout, engine.library, engine.chunks[number]
    stage_mesh, sums = layout.stage_meshes[number], lasting.sums[number]
    parts = leaves_of(*engine.staging.parts(number, stage_mesh))
    leaves = [own for own, _ in parts]
    gradients = [[wide(own[i]) for i in of.trained] for own, of in parts]
    optimizer = lasting.optimizers.get(number)
    programs = library.of_stage(number)
    ledger = StageLedger.of(
        chunks,
        [nbytes(own) for own in gradients],
        rules.unadded_gradients,
        device=stage_mesh.devices[0].device_kind,
        rank=layout.groups[number][0],
        parameters=sum(leaf.size for own in leaves for leaf in own),
        weight_bytes=nbytes(leaves),
        optimizer_bytes=0 if optimizer is None else nbytes(optimizer.state),
        slot_bytes=slots,
        device_limit_bytes=memory,
        compile_seconds=library.compile_seconds[number],
        buckets=BucketLedger.of_programs(programs),
    )
    of_steps = {
        "accumulate": each_once(program for own in sums.accumulate for program in own.programs),
        "norms": sums.norms.programs,
        "update": [] if optimizer is None else optimizer.updates,
    }
    tasks = {
        bucket_name(bucket): {kind.letter: _programs(own, kind) for kind in Kind}
        for bucket, own in programs.items()
    }
    return CompiledStage(number, ledger, of_steps, tasks)


def _programs(chunks: Sequence[StagePrograms], kind: Kind) -> list[Any]:
    """Those of a kind of task, each once."""
    found = [segment.lowered.get(kind) for chunk in chunks for segment in chunk.segments]
    return each_once(one for one in found if one is not None)


def _refusal(run: RunSpec, found: list[CompiledStage], rules: StepRules, names: list[str]) -> str | None:
    """What a run would say to such ledgers; or which stage cannot update."""
    try:
        memory_of_step(run.settings.budget, [own.ledger for own in found], rules, names)
    except UsageError as error:
        return str(error)
    for own in found:
        needed = own.ledger.fixed_bytes + own.lasting_temporary_bytes["update"]
        limit = own.ledger.device_limit_bytes
        if limit is not None and needed > limit:
            return (
                f"stage {own.number} needs {in_words(needed)} for its optimizer's update, and has "
                f"{in_words(limit)}: take more stages, or spread tensors over devices (mesh.tp)"
            )
    return None


NAME = "ahead-{}.json"
"""Of the file beside the programs, by the run's name."""


@dataclass(frozen=True)
class MadeFor:
    """What tells compilers and devices apart.

    Attributes:
        device: JAX's name of the card.
        compiler: its package and version.
        jax_version: of JAX.
        processes: of the run.
        flags: for the compiler.
    """

    device: str
    compiler: str
    jax_version: str
    processes: int
    flags: str

    @classmethod
    def of(cls, device: jax.Device, processes: int, environment: Mapping[str, str] = ENVIRONMENT) -> MadeFor:
        """Of programs that are compiled in this process for such a device."""
        flags = (flags_for(device.platform, environment.get(name)) for name in COMPILER_VARIABLES)
        return cls(
            device=device.device_kind,
            compiler=compiler_of(device),
            jax_version=jax.__version__,
            processes=processes,
            flags=" ".join(filter(None, flags)),
        )

    def write(self, folder: Path, run: str) -> None:
        """Beside the programs of a run."""
        write_json(folder / NAME.format(run), asdict(self))


def why_compiled(folder: Path, run: str, here: MadeFor) -> str | None:
    """Why programs that were compiled ahead for a run are not those that it needs; None if none were."""
    file = folder / NAME.format(run)
    if not file.is_file():
        return None
    try:
        made = asdict(read_json(file, MadeFor))
    except Unreadable as error:
        return str(error)
    there = asdict(here)
    other = [f"{name} {made[name]!r}, here {own!r}" for name, own in there.items() if made[name] != own]
    reason = "; ".join(other) or "the config, or this user's key (docs/security.md), is another"
    return f"rrfp compile has made programs for this run in {folder}, but not all that it needs: {reason}"
