"""Which microbatches fit into the stages' devices: from ledgers and a setting to the budgets of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, TypeAlias

from rrfp_jax.core.memory.footprint import Chunks, least_room, order_peaks, step_budgets
from rrfp_jax.core.orders import FixedOrder, planned_order
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.memory.ledger import StageLedger
from rrfp_jax.runtime.sizes import in_words

Setting: TypeAlias = int | Literal["auto"] | None
"""Bytes of each device for microbatches in flight; "auto": what it has left; None: not limited."""

MARGIN = 0.05
"""Share of a device's memory that "auto" leaves alone: for compiled programs, and what nobody can foresee."""

REMEDY = "or take smaller microbatches, more stages, or remat='full'"


@dataclass(frozen=True)
class Share:
    """A stage's share of its device.

    Attributes:
        total: bytes for microbatches, with what programs need while they run; None for no limit.
        transient: what they need, once per device.
        others: how many more stages the device has.
    """

    total: int | None
    transient: int
    others: int

    @property
    def room(self) -> int | None:
        """Bytes for microbatches alone."""
        return None if self.total is None else self.total - self.transient


@dataclass(frozen=True)
class StepMemory:
    """What the stages of a step may hold: by stage, bytes in all, and what the schedulers go by."""

    totals: Sequence[int | None]
    budgets: Sequence[Budget | None]


def memory_of_step(
    setting: Setting, ledgers: Sequence[StageLedger], rules: StepRules, buckets: Sequence[str]
) -> StepMemory:
    """The budgets of a step that trains.

    Args:
        setting: see `Setting`.
        ledgers: of all stages.
        rules: of the step.
        buckets: the name of each microbatch's (`bucket_name`).

    Raises:
        UsageError: not even one microbatch fits, or not what a fixed order holds; says what would.
    """
    distinct = list(dict.fromkeys(buckets))
    numbers = [distinct.index(bucket) for bucket in buckets]
    shares = _shares(setting, ledgers, buckets)
    footprints = [[ledger.buckets[bucket].chunks for bucket in distinct] for ledger in ledgers]
    totals = [share.total for share in shares]
    if isinstance(rules.schedule, FixedOrder):
        _check_order(setting, rules, shares, footprints, numbers)
        return StepMemory(totals, [None] * len(totals))
    _check_least(setting, shares, footprints)
    rooms = [share.room for share in shares]
    budgets = step_budgets(rooms, footprints, numbers, rules.limit, rules.charges_by_chunk)
    return StepMemory(totals, budgets)


def _shares(setting: Setting, ledgers: Sequence[StageLedger], buckets: Sequence[str]) -> list[Share]:
    on_device: dict[tuple[int, str], list[StageLedger]] = {}
    for ledger in ledgers:
        on_device.setdefault((ledger.rank, ledger.device), []).append(ledger)
    known = {device: _share(setting, own, buckets) for device, own in on_device.items()}
    return [known[ledger.rank, ledger.device] for ledger in ledgers]


def _share(setting: Setting, own: Sequence[StageLedger], buckets: Sequence[str]) -> Share:
    """Of each of the stages on one device."""
    distinct = set(buckets)
    transient = max(ledger.buckets[bucket].transient_bytes for ledger in own for bucket in distinct)
    total: int | None = None
    if isinstance(setting, int):
        total = setting
    elif setting == "auto" and (limit := own[0].device_limit_bytes) is not None:
        total = int(limit * (1 - MARGIN))
        for ledger in own:
            total -= ledger.fixed_bytes
            total -= sum(ledger.buckets[bucket].prepared_bytes for bucket in distinct)
            total -= sum(ledger.buckets[bucket].data_bytes for bucket in buckets)
    if total is not None:
        total = transient + (total - transient) // len(own)
    return Share(total, transient, len(own) - 1)


def _check_least(setting: Setting, shares: Sequence[Share], footprints: Sequence[Sequence[Chunks]]) -> None:
    """Refuse budgets that are too small for one microbatch at a time, naming the stage that needs most."""
    needed = [least_room(own) for own in footprints]
    short = [s for s, share in enumerate(shares) if share.room is not None and share.room < needed[s]]
    if short:
        least = {s: _of_device(shares[s], needed[s]) for s in short}
        worst = max(short, key=least.__getitem__)
        total, transient = shares[worst].total, shares[worst].transient
        assert total is not None
        raise UsageError(
            f"{_named(setting)}: stage {worst} has {in_words(total)} for microbatches, and needs "
            f"{in_words(needed[worst] + transient)} for one at a time ({in_words(transient)} of them while a "
            f"program runs): {_advice(setting, max(least.values()))}"
        )


def _check_order(
    setting: Setting,
    rules: StepRules,
    shares: Sequence[Share],
    footprints: Sequence[Sequence[Chunks]],
    buckets: Sequence[int],
) -> None:
    """Refuse a fixed order that may hold more than there is, naming the stage that lacks most."""
    assert isinstance(rules.schedule, FixedOrder)
    if all(share.room is None for share in shares):
        return
    stages = range(len(shares))
    orders = [planned_order(rules.schedule, s, rules.placement, rules.microbatches, False) for s in stages]
    peaks = order_peaks(orders, footprints, buckets)
    lacking = {
        s: peak - room for s, peak in enumerate(peaks) if (room := shares[s].room) is not None and room < peak
    }
    if lacking:
        worst = max(lacking, key=lacking.__getitem__)
        total, transient = shares[worst].total, shares[worst].transient
        assert total is not None
        least = max(_of_device(shares[s], peaks[s]) for s in lacking)
        raise UsageError(
            f"{_named(setting)}: {rules.schedule.title} holds up to {in_words(peaks[worst] + transient)} on "
            f"stage {worst}, which has {in_words(total)}: {_advice(setting, least)}, a schedule that holds "
            f"less, or a hint such as bf, which keeps within what there is"
        )


def _of_device(share: Share, room: int) -> int:
    """The budget of a device with which each of its stages has this room."""
    return share.transient + room * (share.others + 1)


def _named(setting: Setting) -> str:
    return f"activation_budget={setting}"


def _advice(setting: Setting, least: int) -> str:
    if isinstance(setting, int):
        return f"give at least activation_budget={least}, {REMEDY}"
    return f"take another device, {REMEDY.removeprefix('or take ')}"


UNITS: Mapping[str, int] = {
    **{"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30},
}


def parse_setting(given: object) -> Setting:
    """A budget as users give it: "auto", None, bytes, or text such as "2GiB", "512 MiB", "1.5GB".

    Raises:
        UsageError: anything else.
    """
    if given is None or (isinstance(given, str) and given == "auto"):
        return given  # type: ignore[return-value]
    found: float = -1
    if isinstance(given, Integral) and not isinstance(given, bool):
        found = int(given)
    elif isinstance(given, str):
        number = given.rstrip("kKMGiB ")
        unit = UNITS.get(given[len(number) :].strip())
        try:
            found = float(number) * unit if unit else -1
        except ValueError:
            found = -1
    if not 1 <= found < 2**63:
        raise UsageError(
            f"activation_budget={given!r}: give 'auto', None, a number of bytes, or text such as '2GiB' "
            f"(units: {', '.join(filter(None, UNITS))})"
        )
    return int(found)
