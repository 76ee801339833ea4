"""What a Trainer finds out itself: hint and split before its first step, and others between steps.

Before the first step predicted costs count (`schedule="auto"`, `split="auto"`; `forecast`), between steps
measured ones (`schedule="auto"`, `rebalance=`). Rank 0 decides and tells all. Another hint is taken at once.
For another split every process compiles beside its steps; once all have, layers move, before the same step
everywhere.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TypeAlias

from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.step_rules import Bucket, StepRules, bucket_name
from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.devices import CPU, LINKS, accelerator_of_kind
from rrfp_jax.forecast.forecast import Devices, RunSpec, forecast
from rrfp_jax.printing import say
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.engine.resplit import Ready
from rrfp_jax.runtime.engine.settings import Rebalance, Settings
from rrfp_jax.runtime.mesh.topology import Layout, Mesh
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.sizes import memory_limit
from rrfp_jax.sim.choice import Auto, Candidate, choose
from rrfp_jax.sim.splits import FIRST, MOST, Balance, Move, RebalanceDecision
from rrfp_jax.trace.costs import WorkloadCosts, measured
from rrfp_jax.trace.records import RecordedStep
from rrfp_jax.train.beside import Compiling


def predicted(run: RunSpec, layout: Layout) -> RunSpec:
    """The run with the schedule and split that predicted costs choose, where they are "auto".

    Costs follow from the shapes of the first step and the data sheet of rank 0's first device, or a CPU's
    rates where that is not known. Rank 0 chooses, tells the others, and says so in one line.
    """
    auto = run.schedule if isinstance(run.schedule, Auto) else None
    if auto is None and not isinstance(run.split, str):
        return run
    what = "split='auto'" if auto is None else "schedule='auto'"
    if run.data is None:
        raise UsageError(f"{what} goes by the shapes of a first step: give Trainer(..., data=...)")
    devices = devices_of(layout, run.settings, what)
    if auto is not None:
        devices = _of_stages(devices, run.mesh, layout)

    def find() -> tuple[str | None, Sequence[int] | None]:
        began = perf_counter()
        found = forecast(run, devices)
        if found.choice is not None:
            say(f"schedule auto: {found.choice}; predicted in {perf_counter() - began:.1f} s")
        return None if found.choice is None else found.choice.name, found.split

    name, split = layout.world.decide(f"the choice of {what}", find, START_SECONDS)
    return replace(run, schedule=run.schedule if auto is None else auto.hints[name], split=split)


def devices_of(layout: Layout, settings: Settings, what: str) -> Devices:
    """The devices of all processes by rank 0's first one, for predicting costs; they ask together."""
    devices = [stage_mesh.device for stage_mesh in layout.stage_meshes.values()]
    sharing = max(Counter(devices).values())
    limits = [limit // sharing for device in devices if (limit := memory_limit(device)) is not None]
    found = layout.world.gather(f"the devices, for {what}", [devices[0].device_kind, limits])
    accelerator = accelerator_of_kind(found[0][0]) or CPU
    return Devices(
        accelerator=accelerator,
        link=LINKS[accelerator.link],
        memory=min((limit for _, own in found for limit in own), default=None),
        setting=settings.budget,
        transport=None if layout.world.size == 1 else settings.transport,
    )


def _of_stages(devices: Devices, mesh: Mesh, layout: Layout) -> Devices:
    """With a stage of several devices as one, and only as many stages at once as can compute."""
    width, cores = min(mesh.widths), len(os.sched_getaffinity(0))
    sharing = max(Counter(stage_mesh.device for stage_mesh in layout.stage_meshes.values()).values())
    together = max(1, mesh.pp // sharing)
    if devices.accelerator.name == "cpu":
        together = min(together, cores)
    return replace(
        devices,
        accelerator=replace(devices.accelerator.at(width), together=together),
        memory=None if devices.memory is None else width * devices.memory,
        setting=width * devices.setting if isinstance(devices.setting, int) else devices.setting,
    )


Steps: TypeAlias = Sequence[RecordedStep]


class HintExchange:
    """When measured costs are looked at for another hint on the same placement, and what they say.

    They are after 1, 2, 4, 8, ... steps, so choosing takes ever less of a run. Only hints that split and
    join the same backwards are compared: they run the programs that have been measured, and no other has to
    be compiled.
    """

    def __init__(self, auto: Auto) -> None:
        self._auto = auto
        self._steps = 0

    def due(self) -> bool:
        """Whether it is time; asked before every step that trains but the first."""
        self._steps += 1
        return self._steps & (self._steps - 1) == 0

    def chosen(
        self, step: int, rules: StepRules, buckets: Sequence[Bucket], earlier: Steps, engine: Engine
    ) -> Schedule:
        """The schedule from a step on, as rank 0 finds it; all processes ask together."""
        present = rules.name
        engine.prepare(buckets, rules)  # the budgets follow from the programs
        began = perf_counter()
        candidates = self._candidates(rules, buckets, earlier, engine)

        def find() -> str:
            able = [name for name, own in candidates.items() if isinstance(own, Candidate)]
            if self._steps == 1 and able == [present] and len(candidates) > 1:
                say(f"schedule auto: {present} stays: no other has its placement, its programs, and room")
            choice = choose(candidates, present)
            if choice.name != present:
                seconds = perf_counter() - began
                say(f"schedule auto: from step {step} on {choice}; measured, chosen in {seconds:.1f} s")
            return choice.name

        name = engine.world.decide(f"the schedule from step {step} on", find)
        return rules.schedule if name == present else self._auto.hints[name]

    def _candidates(
        self, rules: StepRules, buckets: Sequence[Bucket], earlier: Steps, engine: Engine
    ) -> dict[str, Candidate | str]:
        """The present hint and those that could take its place; of the others why not.

        Every process finds them, since for budgets all may have to be asked what their programs need.
        """
        table = measured(earlier)
        assert table is not None, "a step has run"
        costs = WorkloadCosts(table.workload([bucket_name(bucket) for bucket in buckets]), rules.placement)
        found: dict[str, Candidate | str] = {}
        for name, hint in ({rules.name: rules.schedule} | self._auto.hints).items():
            own = replace(rules, schedule=hint)
            try:
                if own.programs != rules.programs:
                    found[name] = "it splits or joins other backwards"
                    continue
                budgets = engine.memory.of_step(own, buckets).budgets
            except (ValueError, UsageError) as error:
                found[name] = str(error)
            else:
                found[name] = Candidate(rules=own, costs=costs, budgets=budgets)
        return found


Recut: TypeAlias = Callable[[Sequence[int], Ready | None], None]
"""Goes on with a split, for which all may be ready; see `Stepper.recut`."""


class Rebalancing:
    """When layers move, and what is said of it.

    All processes have one, and ask it before every step unless the mode is "off".

    Args:
        widths: of how many devices stages are.

    Attributes:
        watched_seconds: what watching has taken in this process so far, but for the moves themselves (s).
    """

    def __init__(self, mode: Rebalance, widths: Sequence[int]) -> None:
        if mode != "off" and len(set(widths)) > 1:
            raise UsageError(
                f"rebalance={mode!r} with stages of {', '.join(map(str, widths))} devices: between steps "
                f"layers move between stages with equally many; leave it off, or give equal ones"
            )
        self._mode = mode
        self._balance: Balance | None = None  # of rank 0
        self._split: list[int] = []
        self._steps, self._due = 0, FIRST  # with this split; when it is looked at
        self._compiling: Compiling | None = None
        self._began, self._beside = 0.0, 0  # when that began, and the steps beside it
        self._slowed = 0.0  # by how much these took longer (s), on rank 0
        self._move: Move | None = None  # what is being compiled for, on rank 0
        self._said: set[object] = set()
        self.watched_seconds = 0.0

    def before_step(
        self, step: int, left: int, engine: Engine, rules: Sequence[StepRules], earlier: Steps, recut: Recut
    ) -> None:
        """Look at what was measured, if it is time, and move layers, if all processes are ready for that."""
        began = perf_counter()
        if self._split != engine.split:  # it is the first time, or somebody has set another one
            self._begin(engine)
        self._steps += 1
        if self._compiling is not None:
            self._beside += 1
            self._slowed += earlier[-1].trace.makespan - self._move.seconds if self._move else 0.0
            mine = self._compiling.found
            own = [isinstance(mine, Ready), mine if isinstance(mine, str) else ""]
            told = engine.world.gather("whether all have compiled for another split", own)
            if refusals := [refusal for _, refusal in told if refusal]:  # all stay as they are
                self._stay(refusals[0])
            elif isinstance(mine, Ready) and all(ready for ready, _ in told):
                self._go(step, mine, recut)
                return
        elif self._steps >= self._due and len(earlier) >= FIRST:  # fewer after a move that was taken back
            split = self._look(step, left, engine, earlier)
            if split is not None:
                self._compiling, self._began = Compiling(engine, split, rules), began
                self._beside, self._slowed = 0, 0.0
        self.watched_seconds += perf_counter() - began

    def _begin(self, engine: Engine) -> None:
        self._split, self._steps, self._due = engine.split, 0, FIRST
        self._drop()
        self._move = None
        if self._balance is None and engine.world.rank == 0:
            self._balance = Balance(max(engine.library.compile_seconds.values()))

    def _look(self, step: int, left: int, engine: Engine, earlier: Steps) -> list[int] | None:
        """The split to compile for, as rank 0 finds and says it; all processes ask together."""

        def find() -> tuple[int, list[int] | None]:
            assert self._balance is not None, "this is rank 0"
            try:
                look = self._balance.look(list(earlier), left)
            except Exception as error:  # training goes on without
                _print(f"steps could not be looked at, so layers stay: {type(error).__name__}: {error}")
                look = RebalanceDecision(MOST)
            else:
                self._say(step, look)
            self._move = look.move if self._mode == "auto" else None
            return look.again, None if self._move is None else list(self._move.split)

        again, split = engine.world.decide(f"the split from step {step} on", find)
        self._due = self._steps + again
        return None if split is None else list(split)

    def _stay(self, refusal: str) -> None:
        """Do without the split that was compiled for."""
        self._drop()
        if self._balance is not None and self._move is not None:
            self._balance.failed(self._move)
            _print(f"layers stay where they are: {_text(self._move.split)} was rejected: {refusal}")

    def _drop(self) -> None:
        """Have nothing more compiled for another split."""
        if self._compiling is not None:
            self._compiling.drop()
        self._compiling = None

    def _go(self, step: int, ready: Ready, recut: Recut) -> None:
        began, move = perf_counter(), self._move
        try:
            recut(ready.engine.split, ready)
        except UsageError as error:  # bytes do not suffice
            self._stay(str(error))
            return
        took = perf_counter() - began
        self._begin(ready.engine)
        if self._balance is not None and move is not None:
            slowed = max(self._slowed, 0.0)
            self._balance.moved(move, took + slowed, began - self._began)
            _print(
                f"from step {step} on {_text(move.split)}: layers have moved in {took:.3g} s; compiling cost "
                f"{slowed:.3g} s in {self._beside} steps: in all {(took + slowed) / move.seconds:.1f} steps"
            )

    def _say(self, step: int, look: RebalanceDecision) -> None:
        """Print what a look says, and what it has not said yet."""
        if (verdict := look.verdict) is not None:
            less = f"{verdict.gain:.1%} less" if verdict.gain >= 0 else f"{-verdict.gain:.1%} more"
            found = (
                f"a step takes {verdict.seconds:.4g} s with {_text(verdict.move.split)}, {less} than before "
                f"the move; {verdict.move.gain:.1%} less was expected"
            )
            _print(found if verdict.kept else f"{found}. From now on twice as much is asked of a move")
        if (off := look.distrusted) is not None and "distrusted" not in self._said:
            self._said.add("distrusted")
            _print(f"the simulator is {off:.0%} off on steps that ran, so nothing is predicted yet")
        if look.move is not None and (self._mode == "auto" or look.move.split not in self._said):
            self._said.add(look.move.split)
            _print(_of_move(look.move, self._mode, step))


def _of_move(move: Move, mode: Rebalance, step: int) -> str:
    if move.back:
        return f"layers go back to {_text(move.split)}, where a step took {move.expected:.4g} s"
    found = (
        f"a step takes {move.seconds:.4g} s, and {move.expected:.4g} s, {move.gain:.1%} less, with "
        f"{_text(move.split)} instead of {_text(move.before)}"
    )
    sizes = ",".join(map(str, move.split))
    if mode == "auto":
        return f"{found}; programs for that are compiled in the background from step {step} on"
    return (
        f"{found}: set trainer.split = {list(move.split)}, resume from a checkpoint with "
        f"--config.split={sizes}, or have rebalance='auto' do it"
    )


def _text(split: Sequence[int]) -> str:
    return f"split={','.join(map(str, split))}"


def _print(text: str) -> None:
    say(f"rebalance: {text}")
