"""Ledgers and budgets of a run's stages, in bytes; all processes know the same.

Ledgers say what every stage needs of its device, known from the compiled programs before anything runs. From
them and a setting follow the budgets of a step: which microbatches fit into the stages' devices.

What a microbatch holds is decided in `programs/stage_programs.py` and kept in `step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from rrfp_jax.core.footprint import MOST_EARLY, Chunks, early_bytes, least_room, order_peaks, step_budgets
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.step_rules import Bucket, Budget, StepRules, bucket_name, default_max_in_flight
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.mesh.topology import Layout, taking_turns
from rrfp_jax.runtime.model.pipeline import IDS
from rrfp_jax.runtime.programs.library import Library, specs_of
from rrfp_jax.runtime.programs.stage_programs import StagePrograms
from rrfp_jax.runtime.sizes import in_words, memory_limit, nbytes
from rrfp_jax.runtime.stages.optimizer import Optimizer
from rrfp_jax.runtime.stages.stage import Stage


@dataclass(frozen=True, kw_only=True)
class BucketLedger:
    """What one shape bucket needs on a stage."""

    data_bytes: int  # fields of a microbatch that are read here; on the device for the whole step
    prepared_bytes: int  # what is computed from parameters once a step
    chunks: Chunks  # what each microbatch takes on each chunk

    @property
    def held_bytes(self) -> int:
        """Between forward and backward, per microbatch."""
        return sum(chunk.held_bytes for chunk in self.chunks)

    @property
    def transient_bytes(self) -> int:
        """Transient bytes of the program that needs most while it runs."""
        return max(chunk.most_transient_bytes for chunk in self.chunks)

    @classmethod
    def of(cls, bucket: Bucket, programs: Sequence[StagePrograms]) -> BucketLedger:
        """From the programs of each chunk."""
        inputs = [*specs_of(bucket).values(), IDS]
        data = nbytes([inputs[i] for i in frozenset().union(*(own.inputs for own in programs))])
        prepared = sum(own.prepared_bytes for own in programs)
        return cls(data_bytes=data, prepared_bytes=prepared, chunks=[own.footprint for own in programs])

    @classmethod
    def of_programs(cls, programs: Mapping[Bucket, Sequence[StagePrograms]]) -> dict[str, BucketLedger]:
        """Ledgers of all buckets by name, from the programs of each chunk."""
        return {bucket_name(bucket): cls.of(bucket, own) for bucket, own in programs.items()}


@dataclass(frozen=True, kw_only=True)
class FixedBytes:
    """What a stage needs whatever the microbatches are."""

    weight_bytes: int
    optimizer_bytes: int
    accumulator_bytes: int
    parked_gradient_bytes: int  # gradients that wait for their turn to be added
    slot_bytes: int  # registered for messages from other processes (`rrfp_jax/nixl`)

    @property
    def fixed_bytes(self) -> int:
        lasting = self.weight_bytes + self.optimizer_bytes + self.accumulator_bytes
        return lasting + self.slot_bytes + self.parked_gradient_bytes


@dataclass(frozen=True, kw_only=True)
class StageLedger(FixedBytes):
    """What a stage needs of its device."""

    device: str
    rank: int  # of the process that the device belongs to
    layers: Sequence[tuple[int, int]]  # first and one after the last, of each chunk
    parameters: int  # their number
    device_limit_bytes: int | None  # what the device can hold; None if it does not say
    compile_seconds: float
    buckets: Mapping[str, BucketLedger]  # by shapes, of those compiled for training

    @property
    def largest(self) -> BucketLedger:
        """The bucket of which a microbatch holds most."""
        return max(self.buckets.values(), key=lambda bucket: bucket.held_bytes)

    def plain(self) -> dict[str, Any]:
        """The ledger as plain data, for JSON and messages."""
        return asdict(self)

    @classmethod
    def of(cls, chunks: Sequence[range], sum_bytes: Sequence[int], unadded: int, **known: Any) -> StageLedger:
        """From layers and sums of each chunk, and how many gradients may wait, each as wide as its sum."""
        layers = [(own.start, own.stop) for own in chunks]
        parked = unadded * max(sum_bytes)
        return cls(layers=layers, accumulator_bytes=sum(sum_bytes), parked_gradient_bytes=parked, **known)


Setting: TypeAlias = int | Literal["auto"] | None
"""Bytes of each device for microbatches in flight; "auto": what it has left; None: not limited."""

MARGIN = 0.05
"""Share of a device's memory that "auto" leaves alone: for compiled programs, and what nobody can foresee."""

REMEDY = "or take smaller microbatches, more stages, or remat='full'"


class Share(NamedTuple):
    """A stage's share of its device."""

    total: int | None  # bytes for microbatches, with what programs need while they run; None for no limit
    transient: int  # what they need, once per device
    stages: int  # how many share the device

    @property
    def room(self) -> int | None:
        """Bytes for microbatches alone."""
        return None if self.total is None else self.total - self.transient


class StepMemory(NamedTuple):
    """What the stages of a step may hold: by stage, bytes in all, and what the schedulers go by.

    Of each stage so many tasks may be early (core/footprint.py); None for any number.
    """

    totals: Sequence[int | None]
    budgets: Sequence[Budget | None]
    early: int | None


def memory_of_step(
    setting: Setting,
    ledgers: Sequence[StageLedger],
    rules: StepRules,
    buckets: Sequence[str],
    foresees: bool = True,
    replica: int = 0,
) -> StepMemory:
    """The budgets of a step that trains; UsageError if not even one microbatch fits, or not the order.

    `ledgers` and `buckets` are of all replicas, which may share devices; the budgets are of one. Tasks are
    early if the run `foresees` inputs, and budgets have room for it: under a hint, if they then admit as many
    whole microbatches as there are without limits in bytes.
    """
    stages = rules.placement.stages
    places, dp = [(ledger.rank, ledger.device) for ledger in ledgers], len(ledgers) // stages
    on_device: dict[tuple[int, str], list[tuple[StageLedger, Sequence[str]]]] = {}
    for number, (place, ledger) in enumerate(zip(places, ledgers, strict=True)):
        on_device.setdefault(place, []).append((ledger, buckets[number // stages :: dp]))
    mine, buckets = slice(replica * stages, (replica + 1) * stages), buckets[replica::dp]
    ledgers, places = ledgers[mine], places[mine]
    shares = [_share(setting, on_device[place]) for place in places]
    distinct = list(dict.fromkeys(buckets))
    numbers = [distinct.index(bucket) for bucket in buckets]
    rooms = [share.room for share in shares]
    footprints = [[ledger.buckets[bucket].chunks for bucket in distinct] for ledger in ledgers]
    totals = [share.total for share in shares]
    if rooms == [None] * len(rooms):
        return StepMemory(totals, [None] * len(rooms), None)
    # In a process of one device no input can be foreseen.
    foresees = foresees and len({*places}) > len({rank for rank, _ in places})
    pairs = zip(rooms, footprints, strict=True)
    rest = [None if room is None else room - early_bytes(own) for room, own in pairs]
    if not isinstance(order := rules.schedule, FixedOrder):
        _check(setting, shares, [least_room(own) for own in footprints])
        given = footprints, numbers, rules.limit, rules.charges_by_chunk
        usual = rules.limit or default_max_in_flight(stages)
        if foresees:
            with suppress(ValueError):  # not even one microbatch fits beside early tasks
                budgets = step_budgets(rest, *given)
                if all(budget is None or budget.admits(usual) for budget in budgets):
                    return StepMemory(totals, budgets, MOST_EARLY)
        return StepMemory(totals, step_budgets(rooms, *given), 0)
    peaks = order_peaks([own.order for own in rules.stages], footprints, numbers)
    _check(setting, shares, peaks, order.title)
    fits = all(room is None or peak <= room for peak, room in zip(peaks, rest, strict=True))
    return StepMemory(totals, [None] * len(totals), MOST_EARLY if foresees and fits else 0)


def _share(setting: Setting, own: Sequence[tuple[StageLedger, Sequence[str]]]) -> Share:
    """What each of the stages on one device gets of its bytes; buckets are of its microbatches."""
    transient = max(ledger.buckets[name].transient_bytes for ledger, names in own for name in {*names})
    total: int | None = None
    if isinstance(setting, int):
        total = setting
    elif setting == "auto" and (limit := own[0][0].device_limit_bytes) is not None:
        total = int(limit * (1 - MARGIN))
        for ledger, names in own:
            total -= ledger.fixed_bytes
            total -= sum(ledger.buckets[name].prepared_bytes for name in {*names})
            total -= sum(ledger.buckets[name].data_bytes for name in names)
    if total is not None:
        total = transient + (total - transient) // len(own)
    return Share(total, transient, len(own))


def _check(setting: Setting, shares: Sequence[Share], needed: Sequence[int], order: str = "") -> None:
    """Refuse budgets too small for one microbatch at a time, or for a fixed order, naming the worst stage."""
    pairs = enumerate(zip(shares, needed, strict=True))
    lacking = {s: need - own.room for s, (own, need) in pairs if own.room is not None and own.room < need}
    if not lacking:
        return
    # The budgets of devices with which each of their stages has so much.
    least = {stage: shares[stage].transient + needed[stage] * shares[stage].stages for stage in lacking}
    weight = lacking if order else least
    worst = max(weight, key=weight.__getitem__)
    total, transient, _ = shares[worst]
    assert total is not None
    most, has, named = in_words(needed[worst] + transient), in_words(total), f"activation_budget={setting}"
    advice = f"take another device, {REMEDY.removeprefix('or take ')}"
    if isinstance(setting, int):
        advice = f"give at least activation_budget={max(least.values())}, {REMEDY}"
    if order:
        raise UsageError(
            f"{named}: {order} holds up to {most} on stage {worst}, which has {has}: {advice}, a schedule "
            f"that holds less, or a hint such as bf, which keeps within what there is"
        )
    raise UsageError(
        f"{named}: stage {worst} has {has} for microbatches, and needs {most} for one at a time "
        f"({in_words(transient)} of them while a program runs): {advice}"
    )


UNITS: Mapping[str, int] = {
    **{"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30},
}


def parse_setting(given: object) -> Setting:
    """A budget as users give it: "auto", None, bytes, or text such as "2GiB", "512 MiB", "1.5GB"."""
    if given is None or (isinstance(given, str) and given == "auto"):
        return given  # type: ignore[return-value]
    found: float = -1
    if isinstance(given, Integral) and not isinstance(given, bool):
        found = int(given)
    elif isinstance(given, str):
        number = given.rstrip("kKMGiB ")
        with suppress(ValueError):
            found = float(number) * UNITS.get(given[len(number) :].strip(), 0)
    if not 1 <= found < 2**63:
        raise UsageError(
            f"activation_budget={given!r}: give 'auto', None, a number of bytes, or text such as '2GiB' "
            f"(units: {', '.join(filter(None, UNITS))})"
        )
    return int(found)


SlotBytes: TypeAlias = Callable[[], Mapping[int, int]]
"""What transports keep for messages by now, by stage replica."""


class Memory:
    """The ledgers of all stages, and the budgets of steps by them. Processes ask for either together."""

    def __init__(self, setting: Setting, layout: Layout, library: Library, foresees: bool = True) -> None:
        self._setting, self._layout, self._library = setting, layout, library
        self._foresees = foresees
        self._stages: Sequence[Stage] = ()
        self._optimizer_bytes: Mapping[int, int] = {}
        self._unadded_gradients = 0
        self._slot_bytes: SlotBytes = dict
        self._ledgers: Sequence[StageLedger] = ()
        self._programs: Any = None  # `StepRules.programs` of the ledgers
        self._known: set[Any] = set()  # what the ledgers have programs for

    @cached_property
    def limited(self) -> bool:
        """Whether what is in flight is limited in bytes."""
        if self._setting != "auto":
            return self._setting is not None
        meshes = self._layout.stage_meshes.values()
        return any(memory_limit(stage_mesh.device) is not None for stage_mesh in meshes)

    def start(
        self, stages: Sequence[Stage], optimizers: Sequence[Optimizer], rules: StepRules, slots: SlotBytes
    ) -> None:
        """Take note of this process's stages and optimizers, once they have their parameters and state."""
        self._stages, self._slot_bytes = stages, slots
        self._optimizer_bytes = {of.index: nbytes(own.state) for own in optimizers for of in own.stages}
        self._unadded_gradients = rules.unadded_gradients

    def forget(self) -> None:
        """Let go of the stages: what they have goes elsewhere."""
        self._stages = ()

    def ledgers(self) -> list[StageLedger]:
        """What every stage replica needs, by the programs that are there for training."""
        layout, slot_bytes, turns = self._layout, self._slot_bytes(), taking_turns(self._layout.devices)
        own = [
            StageLedger.of(
                stage.chunks,
                stage.gradient_bytes,
                self._unadded_gradients,
                device=str(turns[stage.index]),
                rank=layout.world.rank,
                parameters=sum(leaf.size for leaves in stage.leaves for leaf in leaves),
                weight_bytes=nbytes(stage.leaves),
                optimizer_bytes=self._optimizer_bytes.get(stage.index, 0),
                slot_bytes=slot_bytes.get(stage.index, 0),
                device_limit_bytes=memory_limit(stage.stage_mesh.device),
                compile_seconds=self._library.compile_seconds[stage.index],
                buckets=BucketLedger.of_programs(self._library.of_stage(stage.index)),
            ).plain()
            for stage in self._stages
            if stage.index in layout.reported
        ]
        rows = [iter(row) for row in layout.world.gather("the ledgers of all stages", own)]
        return [msgspec.convert(next(rows[first]), StageLedger) for first, *_ in layout.groups]

    def of_step(self, rules: StepRules, buckets: Sequence[Bucket]) -> StepMemory:
        """What the stage replicas may hold in a step whose programs are there; see `memory_of_step`."""
        self._unadded_gradients = max(self._unadded_gradients, rules.unadded_gradients)
        if rules.forward_only or not self.limited:
            nothing = [None] * len(self._layout.groups)
            return StepMemory(nothing, nothing, None)
        if rules.programs != self._programs:
            self._programs, self._known = rules.programs, set()
        needed = frozenset(buckets), self._unadded_gradients
        if needed not in self._known:
            self._ledgers = self.ledgers()
            self._known.add(needed)
        replicas = range(self._layout.replicas)
        given = self._setting, self._ledgers, rules, [bucket_name(bucket) for bucket in buckets]
        parts = [memory_of_step(*given, self._foresees, d) for d in replicas]
        if self._foresees and any(part.early == 0 for part in parts):  # all replicas, or none
            parts = [memory_of_step(*given, False, d) for d in replicas]
        totals = [total for part in parts for total in part.totals]
        return StepMemory(totals, [budget for part in parts for budget in part.budgets], parts[0].early)
