"""One training step after the other: plan, run, judge, update."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, partial
from time import perf_counter
from typing import Any, NamedTuple

from rrfp_jax.checkpoint.format import RunState
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.step_rules import Bucket, StepRules, bucket_name
from rrfp_jax.data.contract import Data, Microbatch, buckets_of, check_dtypes, declared_buckets
from rrfp_jax.errors import TrainingError, UsageError, refusing
from rrfp_jax.forecast.costs import layer_work
from rrfp_jax.loss_scale import loss_scale_of
from rrfp_jax.printing import say
from rrfp_jax.report.store import TRACED_STEPS
from rrfp_jax.runtime._jax import settings_here
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.engine.resplit import Ready, compiled_for_split, recut
from rrfp_jax.runtime.engine.settings import Settings, check_order
from rrfp_jax.runtime.programs.library import Phase
from rrfp_jax.runtime.run.alike import check_programs
from rrfp_jax.runtime.run.recorder import RunPhase
from rrfp_jax.runtime.run.signals import interrupts_held
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.runtime.stages.step import LoadedStep, StepPrograms, Sums, not_finite
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.planned import Planned, base_of
from rrfp_jax.trace.costs import CostTable, WorkloadCosts, measured
from rrfp_jax.trace.layers import Work
from rrfp_jax.trace.records import RecordedStep
from rrfp_jax.train.alike import as_text, traced_programs
from rrfp_jax.train.checks import examined, loss_trouble
from rrfp_jax.train.loading import Loader, StepPlan
from rrfp_jax.train.report import Report
from rrfp_jax.train.resume import CheckpointWriter, TrainingState, stored_layers
from rrfp_jax.train.tuning import HintExchange, Rebalancing


class StepOutcome(NamedTuple):
    """A step whose tasks have all run; `planning` is what reports say of how its order was planned."""

    plan: StepPlan
    sums: Sums
    planning: Mapping[str, float]


NOTHING_AHEAD: tuple[StepPlan | None, LoadedStep | None] = (None, None)
"""Of the next step, by its plan: it is not on the devices yet."""

NOT_PLANNED: Mapping[str, float] = {}


def check_whole(engine: Engine) -> None:
    """Refuse to begin anew without a word."""
    if engine.given_up:
        raise TrainingError(
            "layers were lost on their way to other stages: begin again, from a checkpoint if there is one"
        )


MOST_IN_VAIN = 20
"""So many steps may be left out in a row without a loss scale that could still be lowered."""


class Stepper:
    """The steps of a Trainer, whose all processes call every method at the same point.

    Attributes:
        engine, settings: as given.
        saves: that steps go on beside.
        standing: how training stands.
        steps_done: how many, steps that were left out among them; the number of the next one.
        last_plan: hash of the latest step's plan; empty before the first.
        recorded: the latest steps.
        loader: through which all data is read.
    """

    def __init__(
        self, engine: Engine, settings: Settings, schedule: Schedule | Planned, exchange: HintExchange | None
    ) -> None:
        self.engine, self.settings = engine, settings
        myself = weakref.ref(self)  # what devices hold goes with a Trainer, not when garbage is collected

        def present() -> Engine:
            own = myself()
            assert own is not None, "it is asked by its own methods alone"
            return own.engine

        self.saves = CheckpointWriter(present, settings.seed)
        self.schedule, self.exchange = schedule, exchange
        self._rebalancing = Rebalancing(settings.rebalance, engine.layout.widths)
        self.standing = TrainingState(loss_scale=loss_scale_of(settings.loss_scale))
        self.steps_done = 0
        self.last_plan = ""
        self.recorded: deque[RecordedStep] = deque(maxlen=TRACED_STEPS)
        self.loader = Loader(lambda bucket, j: present().reads(bucket, j), engine.world)
        self._known_buckets: Mapping[Phase, dict[Bucket, None]] = {"train": {}, "evaluate": {}}
        self._rules: dict[Phase, StepRules] = {}  # of the latest steps; training first
        self._latest: Sequence[Bucket] = ()  # of the latest step's microbatches
        self._ahead = NOTHING_AHEAD
        self._work = self._work_of(engine.split)

    def start(self, data: Data, plan: Sequence[Microbatch], evaluate: Data | None) -> tuple[int, int]:
        """Compile and allocate."""
        check_whole(self.engine)
        engine, buckets, rules = self.engine, buckets_of(plan), self.rules(len(plan), "train")
        every = list(dict.fromkeys([*buckets, *declared_buckets(data)]))
        if isinstance(self.schedule, Planned) and isinstance(self.schedule.costs, CostTable):
            with refusing("planned orders: "):  # a bucket is lacking, or the number of stages is another
                WorkloadCosts(self.schedule.costs.workload([*map(bucket_name, every)]), rules.placement)
        agreed = self.settings.as_text() | {"rules": str(rules), "schedule": str(self.schedule)}
        agreed |= {"loss_scale": repr(self.standing.loss_scale)} | as_text(engine)
        engine.world.agree("what is to be run", agreed)
        if engine.world.size > 1:
            check_programs(engine.world, traced_programs(engine))
        engine.start(every, rules)
        engine.memory.of_step(rules, buckets)  # so that a budget that is too small is refused now
        if evaluate is not None:
            self._meet("evaluate", 0, self.loader.plan(evaluate, 0).buckets, evaluate)
        # So that the first step waits for nobody's start.
        executables = engine.executables
        mine = executables.compiles, executables.loads
        counts = engine.world.gather("everybody to be ready", mine, START_SECONDS)
        if engine.world.rank == 0:
            executables.remove_unused()
        return sum(made for made, _ in counts), sum(loaded for _, loaded in counts)

    def train(self, data: Data, left: int | None = None) -> Report:
        """One training step.

        Args:
            data: of the step.
            left: how many on the same data come next; None if that is not known.

        Raises:
            TrainingError: see `Trainer.steps`.
        """
        began, step, scale = perf_counter(), self.steps_done, self.standing.loss_scale.value
        compiled = self.engine.executables.compiles
        if self.recorded:  # equal on all processes
            self._tune(step, left)
        if self.saves.latest is not None:
            self.saves.latest.advance()
        ran = self.run("train", data, step, more=bool(left))
        sums = replace(ran.sums, recorded=replace(ran.sums.recorded, work=self._work))
        unit = sums.weight * scale  # the gradient sums over this are the gradient
        norm = sums.norms.gradient / unit
        applied = sums.norms.finite and all(map(math.isfinite, [*sums.totals, sums.weight]))
        if applied:
            self._update(norm, unit, ran)
        else:
            with interrupts_held():
                self.standing = self._skip_or_stop(step, sums)
                self._count(ran)
        self.recorded.append(sums.recorded)
        return Report.of(
            sums,
            schedule="planned" if ran.planning else sums.recorded.rules.name,
            wall_seconds=perf_counter() - began,
            gradient_norm=norm,
            loss_scale=scale,
            ranks=self.engine.layout.groups,
            applied=applied,
            skipped=self.standing.skipped,
            plan=self.last_plan,
            compiled=self.engine.executables.compiles - compiled,
            **ran.planning,
        )

    def run(self, phase: Phase, data: Data, step: int, more: bool = False) -> StepOutcome:
        """All tasks of a step. Gradients stay in the stages' sums."""
        engine = self.engine
        trains = phase == "train"
        engine.world.recorder.phase(RunPhase("step" if trains else "validation", step))
        began = perf_counter()
        plan = self.loader.plan(data, step)  # which waits until the step's data has been loaded ahead
        waited = perf_counter() - began
        engine.world.agree(f"the plan of {phase} step {step}", plan.hash)
        if not self._known_buckets[phase].keys() >= set(plan.buckets):
            self._meet(phase, step, plan.buckets, data)
        rules, planning = self.rules(len(plan.buckets), phase), NOT_PLANNED
        if trains and isinstance(self.schedule, Planned):
            rules, planning = self._plan_ahead(self.schedule, step, rules, plan.buckets)
        known = engine.programs_of(rules, plan.buckets)
        (of, loaded), self._ahead = self._ahead, NOTHING_AHEAD
        if loaded is not None and of is plan and loaded.known.reads == known.reads:
            loaded = replace(loaded, known=known)
        else:
            loaded = engine.load(step, known, partial(self.loader.load, data, step, plan))
        begin = partial(self.loader.begin, data, step + 1, settings_here())
        meanwhile = begin, partial(self._put_ahead, data, step + 1, known)
        sums = engine.run(loaded, self.standing.loss_scale.value, waited, meanwhile if more else ())
        if trains and sums.weight <= 0:
            raise TrainingError(
                f"step {step}: the summed loss weight is {sums.weight}, so there is nothing to divide by; "
                f"is every token masked, or does the loss function leave out Loss(..., weight=...)?"
            )
        return StepOutcome(plan, sums, planning)

    def _put_ahead(self, data: Data, step: int, like: StepPrograms) -> None:
        """Put a step's data on the devices, if it has been loaded and is like the present step's."""
        plan = self.loader.loaded
        if plan is not None and plan.buckets == like.buckets:
            with suppress(Exception):  # what fails is left to that step
                load = partial(self.loader.load, data, step, plan)
                self._ahead = plan, replace(self.engine.load(step, like, load), seconds=0.0)

    def _plan_ahead(
        self, planned: Planned, step: int, rules: StepRules, buckets: Sequence[Bucket]
    ) -> tuple[StepRules, Mapping[str, float]]:
        """The rules of a step with its order; as they are if there are no costs yet for one of its buckets.

        Nothing here depends on the process: records of earlier steps were gathered by all of them. They
        compare what they find.
        """
        began, engine = perf_counter(), self.engine
        names = [bucket_name(bucket) for bucket in buckets]
        table = planned.costs
        if not isinstance(table, CostTable):
            assert table is None, "files have been read"
            table = measured(self.recorded)
            if table is None or not table.buckets.keys() >= set(names):
                return rules, NOT_PLANNED
        engine.prepare(buckets, rules)  # the budgets follow from the programs
        budgets = engine.memory.of_step(replace(rules, schedule=planned.hint), buckets).budgets
        with refusing("planned orders: "):
            found = planned.plan(rules, WorkloadCosts(table.workload(names), rules.placement), budgets)
        order = replace(rules, schedule=found.order)
        engine.world.agree(f"the planned order of step {step}", str(order.schedule))
        planning = {"planning_seconds": perf_counter() - began, "predicted_seconds": found.makespan}
        return self._known("train", order), planning

    def _meet(self, phase: Phase, step: int, buckets: Sequence[Bucket], data: Data) -> None:
        """Take in shapes that were not there before; refuses what the model does not take."""
        known = self._known_buckets[phase]
        if known and not declared_buckets(data):
            check_dtypes(step, buckets, [*known], "earlier steps")
        for bucket in dict.fromkeys(buckets):
            examined(self.engine, step, bucket, buckets, phase == "train")
        known.update(dict.fromkeys(buckets))
        if phase == "evaluate":  # as `start` does for training
            self.engine.prepare(declared_buckets(data) or buckets, self.rules(len(buckets), phase))

    def _work_of(self, split: Sequence[int]) -> Callable[[], Work | None]:
        """Gives what the layers have to do, by the microbatches of the step that is the latest then.

        A report that is kept keeps neither the Trainer nor its arrays: once they are gone, None is given.
        """
        remat, myself = self.settings.remat, weakref.ref(self)

        def work() -> Work | None:
            own = myself()
            return None if own is None else layer_work(own.engine, split, own._latest, remat)

        return cache(work)

    def take(self, schedule: Schedule | Planned | Auto) -> None:
        """Go on with another schedule; under `Auto` with the present one until costs choose another."""
        if not isinstance(schedule, Auto):
            self.schedule, self.exchange = schedule, None
            return
        if not schedule.exchange:
            raise UsageError(
                "schedule=Auto(exchange=False) is chosen when a Trainer is made; between steps give 'auto'"
            )
        if (replicas := self.engine.layout.replicas) > 1:
            raise UsageError(
                f"schedule='auto' between steps with dp={replicas}: only steps of one replica are measured; "
                f"give a hint such as bfw"
            )
        self.exchange = HintExchange(schedule)
        self.schedule = base_of(self.schedule)

    def recut(self, split: Sequence[int], ready: Ready | None = None) -> None:
        """Go on with another split, for which all may be `ready`: layers move, with the optimizer's state.

        From then on it computes, to the bit, what a run does that goes on with this split from a checkpoint.
        """
        self.loader.settle()  # which asks what is read here
        if self.saves.latest is not None:
            self.saves.latest.copied()  # what is being saved, as this donates it
        engine, rules = self.engine, [*self._rules.values()]
        check_whole(engine)
        engine.world.agree("the split", str(split))
        if list(split) == engine.split:
            return
        if not engine.stages:
            new = Engine(engine.spec, split, engine.executables)
            new.library.know(engine.library)
            self._take_engine(new)
            return
        self._move(ready or compiled_for_split(engine, split, rules))
        if self._latest:
            try:
                # Not by an order that was planned for other stages.
                self.engine.memory.of_step(self.rules(len(self._latest), "train"), self._latest)
            except UsageError:  # bytes do not suffice, which only the programs there can tell
                self._move(compiled_for_split(self.engine, engine.split, rules))
                raise

    def _move(self, ready: Ready) -> None:
        with interrupts_held():  # all of it, or none
            self._take_engine(recut(self.engine, ready, [*self._rules.values()]))

    def _take_engine(self, engine: Engine) -> None:
        self.engine, self._work, self._ahead = engine, self._work_of(engine.split), NOTHING_AHEAD
        self.recorded.clear()  # what it tells of stages is of other layers

    def _tune(self, step: int, left: int | None) -> None:
        """Go on with the split and the hint that measured costs choose, if it is time to look."""
        if self.settings.rebalance != "off":
            count = self.steps_done if left is None else left + 1  # as many again, if nobody says
            rules = [*self._rules.values()]
            self._rebalancing.before_step(step, count, self.engine, rules, self.recorded, self.recut)
        if self.exchange is not None and self.recorded and self.exchange.due():
            known = self.rules(len(self._latest), "train")
            self.schedule = self.exchange.chosen(step, known, self._latest, self.recorded, self.engine)

    def rules(self, microbatches: int, phase: Phase) -> StepRules:
        """The rules of a step by the present schedule, or by its base if orders are planned."""
        layout, base = self.engine.layout, base_of(self.schedule)
        share, known = layout.count_of(microbatches), self._rules.get(phase)
        if known is not None and known.schedule is base and known.microbatches == share:
            return known
        if isinstance(self.schedule, Planned) and layout.replicas > 1:
            raise UsageError(
                f"a planned order with dp={layout.replicas}: replicas have other microbatches, "
                f"and one order is planned for all; take a hint such as bfw"
            )
        rules = self.settings.rules(self.engine.placement, share, base, forward_only=phase == "evaluate")
        return self._known(phase, rules)

    def _known(self, phase: Phase, rules: StepRules) -> StepRules:
        """These rules; the latest step's if they are equal, which know already what follows from them."""
        if rules != self._rules.get(phase):
            check_order(rules)
            self._rules[phase] = rules
        return self._rules[phase]

    def state(self, config: Any) -> RunState:
        """What is kept of it with a checkpoint; the position in the data is the number of the next step."""
        return RunState(
            step=self.steps_done,
            data=self.steps_done,
            seed=self.settings.seed,
            standing=asdict(self.standing),
            config=config,
            plan_hash=self.last_plan,
            layers=stored_layers(self.engine),
        )

    def go_on_from(self, run: RunState, standing: TrainingState) -> None:
        """Continue as if the steps up to a checkpoint had been made here."""
        asked, stored = self.standing.loss_scale, standing.loss_scale
        self.standing = replace(standing, loss_scale=asked.resumed(stored))
        if str(asked) != str(stored) and self.engine.world.rank == 0:
            say(f"loss_scale is {asked}, as asked for; it was {stored} when the checkpoint was written")
        self.steps_done, self.last_plan = run.step, run.plan_hash

    def is_data_of_last_step(self, data: Data) -> bool:
        """Whether the step before the next one had this data, as far as it is known."""
        return not self.last_plan or self.loader.plan(data, self.steps_done - 1).hash == self.last_plan

    def _skip_or_stop(self, step: int, sums: Sums) -> TrainingState:
        """How training stands after a step that cannot be applied."""
        after, policy = self.standing.after(finite=False), self.settings.on_nonfinite
        if after.in_vain == 0 or (policy == "skip" and after.in_vain < MOST_IN_VAIN):
            return after
        why = loss_trouble(sums.totals, "; the step is not applied")
        if why is None and not math.isfinite(sums.weight):
            why = f"the summed loss weight is {sums.weight}; the step is not applied. Look at the step's data"
        elif why is None:
            why = (
                f"the gradient of {not_finite(self.engine.stages, self.engine.layout)} is not finite "
                f"although every loss is; the step is not applied. Look for a division by zero or a root at "
                f"zero in the model's backward, lower the learning rate, or for float16 set "
                f"loss_scale='dynamic'"
            )
        many = "" if policy == "stop" else f" It is the {after.in_vain}th step in a row that is left out."
        raise TrainingError(f"step {step}: {why}{many}")

    def _count(self, ran: StepOutcome) -> None:
        self.steps_done += 1
        self._latest, self.last_plan = ran.plan.buckets, ran.plan.hash

    def _update(self, norm: float, unit: float, ran: StepOutcome) -> None:
        """Apply the gradient, whose norm is known; the sums over `unit` are the gradient."""
        clip = self.settings.clip_norm
        shrink = 1.0 if clip is None else min(1.0, clip / max(norm, 1e-30))
        if self.saves.latest is not None:
            self.saves.latest.copied()  # what is being saved, as this donates it
        with interrupts_held():  # all stages, or none
            self.engine.update(shrink / unit)
            self.standing = self.standing.after(finite=True)
            self._count(ran)
