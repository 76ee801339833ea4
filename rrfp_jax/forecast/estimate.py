"""What a step would take on given devices, for any split of the model: the simulator on predicted costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from rrfp_jax.core.footprint import order_peaks
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.step_rules import Bucket, StepRules, bucket_name
from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.costs import LayerState, LayerTimes, ModelCosts
from rrfp_jax.forecast.forecast import Devices, Forecast, StageForecast, device_bytes
from rrfp_jax.forecast.partition import LayerLoad, TooLarge, partition
from rrfp_jax.runtime.model.roles import layers_of_chunks
from rrfp_jax.runtime.sizes import in_words
from rrfp_jax.runtime.stages.memory import (
    MARGIN,
    BucketLedger,
    StageLedger,
    StepMemory,
    memory_of_step,
)
from rrfp_jax.runtime.transport.choice import reserved_bytes
from rrfp_jax.sim.choice import Candidate
from rrfp_jax.sim.engine import Links, simulate
from rrfp_jax.trace.records import StepTrace, peak_of_order

TRANSFERS: Links = "serial"
"""How they share what is between neighbours."""


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
        microbatches are in flight, an even split may do better.

        Raises:
            TooLarge: no split keeps within the devices' memory; with the one that comes nearest.
        """
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
            held_bytes=max(footprint.held_after_forward_bytes for footprint in footprints),
            transient_bytes=max(footprint.most_transient_bytes for footprint in footprints),
        )

    def forecast(self, split: Sequence[int] | None) -> Forecast:
        """What happens with a split; None for an even one.

        Raises:
            UsageError: it is no split of the model into this many virtual stages, or the step cannot be
                simulated.
        """
        chunks = self._chunks(split)
        ledgers = self.ledgers(split)
        names = [bucket_name(bucket) for bucket in self.buckets]
        try:
            memory, refusal = memory_of_step(self.devices.setting, ledgers, self.rules, names), None
        except UsageError as error:
            memory, refusal = StepMemory((), [None] * len(ledgers)), str(error)
        costs = self._times.costs(self.rules, self.buckets, chunks, self.devices.between)
        try:
            trace = simulate(self.rules, costs, links=TRANSFERS, budgets=memory.budgets)
        except ValueError as error:
            raise UsageError(str(error)) from None
        stages = self._stages(trace, chunks, ledgers)
        devices = self.devices.stages_of_each(len(stages))
        compute = sum(stage.compute_seconds for stage in stages)
        place = self.rules.placement.place
        return Forecast(
            split=[len(chunks[s][c]) for s, c in map(place, range(self.rules.placement.last + 1))],
            stages=stages,
            devices=devices,
            makespan=max(trace.makespan, compute / self.devices.at_once(len(stages))),
            does_not_fit=refusal or self._does_not_fit(stages, devices),
        )

    def ledgers(self, split: Sequence[int] | None) -> list[StageLedger]:
        """What each stage needs with a split; None for an even one.

        Raises:
            UsageError: it is no split of the model into this many virtual stages.
        """
        return [self._ledger(stage, own) for stage, own in enumerate(self._chunks(split))]

    def _chunks(self, split: Sequence[int] | None) -> list[list[range]]:
        return layers_of_chunks(len(self.model.states), self.rules.placement, split)

    def candidate(self, split: Sequence[int] | None) -> Candidate:
        """The step with a split and its hint, to be compared with other hints; None for an even split.

        Raises:
            UsageError: it is no split of the model into this many virtual stages, or not even one microbatch
                at a time is within the devices' memory.
        """
        chunks, ledgers = self._chunks(split), self.ledgers(split)
        names = [bucket_name(bucket) for bucket in self.buckets]
        return Candidate(
            rules=self.rules,
            costs=self._times.costs(self.rules, self.buckets, chunks, self.devices.between),
            budgets=memory_of_step(self.devices.setting, ledgers, self.rules, names).budgets,
            links=TRANSFERS,
            at_once=self.devices.at_once(len(chunks)),
        )

    def _stages(
        self, trace: StepTrace, chunks: Sequence[Sequence[range]], ledgers: Sequence[StageLedger]
    ) -> list[StageForecast]:
        """What each stage takes and, at most, holds in the simulated order, whatever the delays."""
        met = list(dict.fromkeys(self.buckets))
        names = [bucket_name(bucket) for bucket in met]
        orders = [trace.order(stage) for stage in range(trace.stages)]
        footprints = [[ledger.buckets[name].chunks for name in names] for ledger in ledgers]
        in_flight = order_peaks(orders, footprints, [met.index(bucket) for bucket in self.buckets])
        found = []
        for stage, (own, ledger, flying) in enumerate(zip(chunks, ledgers, in_flight, strict=True)):
            known = [ledger.buckets[name] for name in names]
            data = sum(ledger.buckets[bucket_name(bucket)].data_bytes for bucket in self.buckets)
            prepared = sum(bucket.prepared_bytes for bucket in known)
            found.append(
                StageForecast(
                    ledger=ledger,
                    flops=[self._times.flops(bucket, own) for bucket in self.distinct],
                    flops_of_step=sum(self._times.flops(bucket, own) for bucket in self.buckets),
                    compute_seconds=trace.busy(stage),
                    update_seconds=sum(self._times.updates[i] for layers in own for i in layers),
                    lasting_bytes=ledger.fixed_bytes + data + prepared + flying,
                    transient_bytes=max(bucket.transient_bytes for bucket in known),
                )
            )
        return found

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
        return StageLedger.of(
            chunks,
            [sum(self.model.states[i].sum_bytes for i in layers) for layers in chunks],
            self.rules.unadded_gradients,
            device=self.devices.accelerator.name,
            rank=0 if self.devices.shared else stage,  # whose device it is
            parameters=sum(state.parameters for state in states),
            weight_bytes=sum(state.weight_bytes for state in states),
            optimizer_bytes=sum(state.optimizer_bytes for state in states),
            slot_bytes=self._slot_bytes(buckets.values()),
            device_limit_bytes=self.devices.memory,
            compile_seconds=0.0,
            buckets=buckets,
        )

    def _slot_bytes(self, buckets: Iterable[BucketLedger]) -> int:
        largest = max(chunk.largest_arrival for bucket in buckets for chunk in bucket.chunks)
        transport = self.devices.transport
        return 0 if transport is None else reserved_bytes(transport, largest)
