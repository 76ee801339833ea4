"""What a step of a run would take on given devices: the simulator on predicted costs, for any split.

`forecast` is what `rrfp plan`, `rrfp compile`, `schedule="auto"` and `split="auto"` go by. Nothing is
measured or compiled. Bytes of temporaries are an upper bound (`cost_analysis.py`); exact ones are the
compiler's, which `rrfp compile` asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from math import inf
from operator import itemgetter
from typing import Any

import optax

from rrfp_jax.core.footprint import order_peaks
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.step_rules import Bucket, Budget, StepRules, bucket_name
from rrfp_jax.core.tasks import BACKWARD, INPUT, WEIGHT, Placement
from rrfp_jax.data.contract import Data, buckets_of, declared_buckets, plan_step
from rrfp_jax.errors import UsageError, refusing
from rrfp_jax.forecast.costs import LayerState, LayerTimes, ModelCosts
from rrfp_jax.forecast.devices import Accelerator, Link
from rrfp_jax.forecast.partition import LayerLoad, TooLarge, partition
from rrfp_jax.runtime.engine.engine import Engine, EngineSpec
from rrfp_jax.runtime.engine.settings import Settings, check_order
from rrfp_jax.runtime.mesh.topology import Layout, Mesh
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.model.roles import layers_of_chunks
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.runtime.sizes import in_words
from rrfp_jax.runtime.stages.memory import MARGIN, Setting, StageLedger, memory_of_step
from rrfp_jax.runtime.transport.choice import TransportName, reserved_bytes
from rrfp_jax.sim.choice import Auto, Candidate, Choice, choose
from rrfp_jax.sim.planned import Planned, base_of
from rrfp_jax.trace.records import StepTrace, peak_of_order

AUTO = "auto"

REMEDY = "take more stages, smaller microbatches, remat='full' or a larger device"


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What stages run on.

    Attributes:
        accelerator, link: every stage's device, and what is between neighbours.
        memory: bytes that each device gives; None if that is not known.
        setting: bytes of them for microbatches in flight; see `activation_budget` of a `Trainer`.
        shared: all stages are on one device and take turns; the link is not used then.
        transport: what carries messages between the processes of the stages; None if one process has all.
    """

    accelerator: Accelerator
    link: Link
    memory: int | None
    setting: Setting
    shared: bool = False
    transport: TransportName | None = None

    @property
    def limited(self) -> bool:
        """Whether what is in flight is limited in bytes."""
        return self.setting is not None and (self.setting != "auto" or self.memory is not None)

    def at_once(self, stages: int) -> int:
        """How many of so many stages can compute at the same time."""
        return 1 if self.shared else self.accelerator.together or stages


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """One stage of a step.

    Attributes:
        ledger: what it needs.
        flops: of forward and backward of a microbatch, by bucket that there may be.
        flops_of_step: of all microbatches.
        compute_seconds: of the step.
        update_seconds: of its norms and optimizer.
        lasting_bytes: the most that it holds between programs.
        transient_bytes: what its largest program needs besides, while it runs.
    """

    ledger: StageLedger
    flops: Sequence[float]
    flops_of_step: float
    compute_seconds: float
    update_seconds: float
    lasting_bytes: int
    transient_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that it takes of its device."""
        return self.lasting_bytes + self.transient_bytes


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step.

    Attributes:
        split: layers per virtual stage, in the model's order.
        devices: the stages of each.
        makespan: from the first task to the end of the last (s).
        does_not_fit: why the devices' memory is too small; None if it is not.
    """

    split: Sequence[int]
    stages: Sequence[StageForecast]
    devices: Sequence[range]
    makespan: float
    does_not_fit: str | None

    @property
    def update_seconds(self) -> float:
        """Of the slowest device's norms and optimizers."""
        return max(sum(self.stages[s].update_seconds for s in own) for own in self.devices)

    @property
    def step_seconds(self) -> float:
        """All of it."""
        return self.makespan + self.update_seconds

    @property
    def bubble(self) -> float:
        """Share of the makespan in which a device does not compute; mean over the devices."""
        return 1 - sum(stage.compute_seconds for stage in self.stages) / len(self.devices) / self.makespan

    @property
    def peak_bytes(self) -> int:
        """The most that a device holds."""
        return max(device_bytes([self.stages[s] for s in own]) for own in self.devices)


def device_bytes(stages: Sequence[StageForecast]) -> int:
    """The most that a device with these stages holds; one program runs at a time."""
    return sum(stage.lasting_bytes for stage in stages) + max(stage.transient_bytes for stage in stages)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step of a model on devices, before anybody has said which layers are where.

    Attributes:
        model: what its layers cost, for every bucket that the data may have.
        buckets: of each microbatch.
        rules: of the step.
        devices: of the stages.
    """

    model: ModelCosts
    buckets: Sequence[Bucket]
    rules: StepRules
    devices: Devices

    def suggested(self) -> Forecast:
        """The faster, in the simulator, of the split by cost and the even one; one that fits, if any does.

        By cost: the slowest virtual stage is as fast as it can be. Yet where memory decides how many
        microbatches are in flight, an even split may do better. `TooLarge` if no split by cost fits;
        `UsageError` if there are too few layers.
        """
        self._chunks(None)
        found = [self.forecast(split) for split in (self._split_by_cost(), None)]
        return min(found, key=lambda one: (one.does_not_fit is not None, one.step_seconds))

    def _split_by_cost(self) -> list[int]:
        budget = None
        if self.devices.memory is not None and not self.devices.shared:  # else splits only move bytes about
            budget = int(self.devices.memory * (1 - MARGIN)) // self.rules.placement.chunks
        loads = [self._load(i) for i in range(len(self.model.states))]
        enough, least = self._in_flight()
        try:
            return partition(loads, enough, budget)
        except TooLarge:
            return partition(loads, least, budget)

    def _load(self, layer: int) -> LayerLoad:
        state = self.model.states[layer]
        footprints = [layers[layer].footprint for layers in self.model.layers.values()]
        return LayerLoad(
            seconds=self._times.of_step(layer, self.buckets),
            fixed_bytes=self._fixed_bytes(state),
            held_bytes=max(footprint.held_bytes for footprint in footprints),
            transient_bytes=max(footprint.most_transient_bytes for footprint in footprints),
        )

    def forecast(self, split: Sequence[int] | None) -> Forecast:
        """What happens with a split; None for an even one.

        Raises:
            UsageError: it is no split of the model into this many virtual stages, or the step cannot be
                simulated.
        """
        ledgers, refusal = self.ledgers(split), None
        budgets: Sequence[Budget | None] = [None] * len(ledgers)
        try:
            budgets = self._budgets(ledgers)
        except UsageError as error:
            refusal = str(error)
        own = self._step(split, budgets)
        with refusing():
            trace = own.simulated()
        chunks = self._chunks(split)
        stages = list(self._stages(trace, chunks, ledgers))
        together = len(stages) if self.devices.shared else 1
        devices = [range(s, s + together) for s in range(0, len(stages), together)]
        place = self.rules.placement.place
        return Forecast(
            split=[len(chunks[s][c]) for s, c in map(place, range(self.rules.placement.last + 1))],
            stages=stages,
            devices=devices,
            makespan=own.seconds(trace),
            does_not_fit=refusal or self._does_not_fit(stages, devices),
        )

    def ledgers(self, split: Sequence[int] | None) -> list[StageLedger]:
        """What each stage needs with a split; None for an even one."""
        return [self._ledger(stage, own) for stage, own in enumerate(self._chunks(split))]

    def _chunks(self, split: Sequence[int] | None) -> list[list[range]]:
        return layers_of_chunks(len(self.model.states), self.rules.placement, split)

    def candidate(self, split: Sequence[int] | None) -> Candidate:
        """The step with a split and its hint, to be compared with other hints; None for an even split."""
        return self._step(split, self._budgets(self.ledgers(split)))

    def _budgets(self, ledgers: Sequence[StageLedger]) -> Sequence[Budget | None]:
        names = [bucket_name(bucket) for bucket in self.buckets]
        return memory_of_step(self.devices.setting, ledgers, self.rules, names).budgets

    def _step(self, split: Sequence[int] | None, budgets: Sequence[Budget | None]) -> Candidate:
        chunks = self._chunks(split)
        link = Link(bytes_per_second=inf, latency=0.0) if self.devices.shared else self.devices.link
        costs = self._times.costs(self.rules, self.buckets, chunks, link)
        at_once = self.devices.at_once(len(chunks))
        return Candidate(rules=self.rules, costs=costs, budgets=budgets, links="serial", at_once=at_once)

    def _stages(
        self, trace: StepTrace, chunks: Sequence[Sequence[range]], ledgers: Sequence[StageLedger]
    ) -> Iterator[StageForecast]:
        """What each stage takes and, at most, holds in the simulated order, whatever the delays."""
        met = list(dict.fromkeys(self.buckets))
        names = [bucket_name(bucket) for bucket in met]
        orders = [trace.order(stage) for stage in range(trace.stages)]
        footprints = [[ledger.buckets[name].chunks for name in names] for ledger in ledgers]
        in_flight = order_peaks(orders, footprints, [met.index(bucket) for bucket in self.buckets])
        for stage, (own, ledger, flying) in enumerate(zip(chunks, ledgers, in_flight, strict=True)):
            known = [ledger.buckets[name] for name in names]
            data = sum(ledger.buckets[bucket_name(bucket)].data_bytes for bucket in self.buckets)
            prepared = sum(bucket.prepared_bytes for bucket in known)
            yield StageForecast(
                ledger=ledger,
                flops=[self._times.flops(bucket, own) for bucket in self.distinct],
                flops_of_step=sum(self._times.flops(bucket, own) for bucket in self.buckets),
                compute_seconds=trace.busy(stage),
                update_seconds=sum(self._times.updates[i] for layers in own for i in layers),
                lasting_bytes=ledger.fixed_bytes + data + prepared + flying,
                transient_bytes=max(bucket.transient_bytes for bucket in known),
            )

    def _does_not_fit(self, stages: Sequence[StageForecast], devices: Sequence[range]) -> str | None:
        """Which device would have to hold more than it gives."""
        peaks = [device_bytes([stages[s] for s in own]) for own in devices]
        most, own = max(zip(peaks, devices, strict=True), key=itemgetter(0))
        if self.devices.memory is None or most <= self.devices.memory:
            return None
        who = f"stage {own[0]} holds" if len(own) == 1 else f"its {len(own)} stages hold"
        return f"{who} up to {in_words(most)}, and the device gives {in_words(self.devices.memory)}"

    @cached_property
    def distinct(self) -> list[Bucket]:
        """The buckets that there may be, in order."""
        return sorted(self.model.layers)

    @cached_property
    def _times(self) -> LayerTimes:
        return LayerTimes(self.model, self.devices.accelerator)

    def _fixed_bytes(self, state: LayerState) -> int:
        """Of a layer. Its stage's chunks park in the same places: a layer needs its chunk's share of them."""
        parked = self.rules.unadded_gradients * state.sum_bytes // self.rules.placement.chunks
        return state.weight_bytes + state.optimizer_bytes + state.sum_bytes + parked

    def _in_flight(self) -> tuple[list[int], list[int]]:
        """How many microbatches each virtual stage should hold so that none waits, and how many it must.

        To the last virtual stage and back, and one. A fixed order says itself what it holds.
        """
        placement, schedule, count = self.rules.placement, self.rules.schedule, self.rules.microbatches
        virtual_stages = range(placement.last + 1)
        if not isinstance(schedule, FixedOrder):
            return [min(count, len(virtual_stages) - v) for v in virtual_stages], [1] * len(virtual_stages)
        orders = [schedule.order(stage, placement, count) for stage in range(placement.stages)]
        peaks = [peak_of_order(order, placement.chunks) for order in orders]
        held = [peaks[placement.place(v)[0]] for v in virtual_stages]
        return held, held

    def _ledger(self, stage: int, chunks: Sequence[range]) -> StageLedger:
        kinds = self.rules.backward_kinds(stage)
        states = [self.model.states[i] for layers in chunks for i in layers]
        buckets = {bucket_name(b): self.model.bucket_ledger(b, chunks, kinds) for b in self.distinct}
        known = [own for bucket in buckets.values() for own in bucket.chunks]
        largest = max(max(own.activation_in_bytes, own.gradient_in_bytes) for own in known)
        transport = self.devices.transport
        return StageLedger.of(
            chunks,
            [sum(self.model.states[i].sum_bytes for i in layers) for layers in chunks],
            self.rules.unadded_gradients,
            device=self.devices.accelerator.name,
            rank=0 if self.devices.shared else stage,  # whose device it is
            parameters=sum(state.parameters for state in states),
            weight_bytes=sum(state.weight_bytes for state in states),
            optimizer_bytes=sum(state.optimizer_bytes for state in states),
            slot_bytes=0 if transport is None else reserved_bytes(transport, largest),
            device_limit_bytes=self.devices.memory,
            compile_seconds=0.0,
            buckets=buckets,
        )


@dataclass(frozen=True)
class RunSpec:
    """What a run consists of; see `Trainer`, whose arguments these are. `evaluate` is its validation data."""

    pipe: Pipeline
    optimizer: optax.GradientTransformation | None
    data: Any  # a `Data`; of a Trainer perhaps None
    mesh: Mesh
    schedule: Schedule | Planned | Auto
    split: Sequence[int] | str | None
    settings: Settings
    evaluate: Data | None = None

    @property
    def order(self) -> Schedule:
        """The schedule, or its base if orders are planned; one that has been chosen."""
        assert not isinstance(self.schedule, Auto), "it has been chosen"
        return base_of(self.schedule)

    def engine(self, layout: Layout, init: InitFunction | None, stored: Executables | None = None) -> Engine:
        """What the run's steps run on, its split having been chosen; nothing is compiled yet."""
        spec = EngineSpec(
            pipe=self.pipe,
            layout=layout,
            placement=self.mesh.placement(self.order),
            optimizer=self.optimizer,
            init=init,
            settings=self.settings,
        )
        assert not isinstance(self.split, str), "it has been chosen"
        return Engine(spec, self.split, stored)


@dataclass(frozen=True)
class Prediction:
    """A run's first step on some devices; its schedule is a `choice` if there were several."""

    estimate: Estimate
    wanted: Sequence[int] | str | None
    choice: Choice | None = None

    @cached_property
    def split(self) -> Sequence[int] | None:
        """Layers per virtual stage; None for an even split. UsageError: one is to be found, and none fits."""
        if not isinstance(self.wanted, str):
            return self.wanted
        try:
            return list(self.estimate.suggested().split)
        except TooLarge as error:
            raise UsageError(f"split='auto': {error}; {REMEDY}") from None


def forecast(run: RunSpec, devices: Devices) -> Prediction:
    """The first step of one replica of a run; if its schedule is "auto", with the hint that is fastest.

    Nothing is measured: costs follow from the shapes of the first step, which is planned, not loaded.

    Args:
        run: its split is looked for with each placement that a hint has, if that is "auto".
        devices: of the stages. One that is several devices counts as one that is so many times as fast.

    Raises:
        UsageError: a model or a schedule that does not work, or no hint can run; with each one's reason.
    """
    if run.split == AUTO and (max(run.mesh.widths) > 1 or run.mesh.dp > 1):
        raise UsageError(
            f"split='auto' with tp={run.mesh.tp}, dp={run.mesh.dp}: costs are predicted for one device per "
            f"stage; give the number of layers of each stage"
        )
    settings = run.settings if devices.limited else run.settings.limited(run.mesh.pp)
    buckets = buckets_of(plan_step(run.data, 0))[:: run.mesh.dp]  # of one replica

    every_bucket = [*buckets, *declared_buckets(run.data)]
    costs_of = cache(partial(ModelCosts.of, run.pipe, every_bucket, run.optimizer, settings))
    every_kind = frozenset({BACKWARD, INPUT, WEIGHT})

    def estimate(schedule: Schedule) -> Estimate:
        rules = settings.rules(run.mesh.placement(schedule), len(buckets), schedule)
        check_order(rules)
        joined, kinds = rules.programs
        own = every_kind if isinstance(run.schedule, Auto) else frozenset(chain(*chain(*kinds)))
        return Estimate(model=costs_of(own, joined), buckets=buckets, rules=rules, devices=devices)

    if not isinstance(run.schedule, Auto):
        return Prediction(estimate(run.order), run.split)
    costs_of(every_kind, True)  # outside of `try`: it refuses a model that no hint can train
    splits: dict[Placement, Sequence[int] | None] = {}
    found: dict[str, Estimate] = {}
    candidates: dict[str, Candidate | str] = {}
    for name, hint in run.schedule.hints.items():
        try:
            one = estimate(hint)
            placement = one.rules.placement
            if placement not in splits:
                splits[placement] = one.suggested().split if isinstance(run.split, str) else run.split
            candidates[name], found[name] = one.candidate(splits[placement]), one
        except (UsageError, TooLarge, ValueError) as error:
            candidates[name] = str(error)
    with refusing("schedule='auto': "):
        choice = choose(candidates)
    chosen = found[choice.name]
    return Prediction(chosen, splits[chosen.rules.placement], choice)
