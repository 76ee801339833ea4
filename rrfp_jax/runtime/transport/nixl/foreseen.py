"""What is known of messages before there are any: how large slots must be, and what copies out of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import jax

from rrfp_jax.runtime.transport.nixl.copiers import Copiers, OneArrayCompiler, by_jit
from rrfp_jax.runtime.transport.nixl.packing import ALIGNMENT, cuts_of, packed
from rrfp_jax.runtime.transport.nixl.places import SLOTS, room_for
from rrfp_jax.runtime.transport.protocol import Devices, Specs

Group = tuple[jax.Device, ...]
"""Devices of this process which one or several of its stages are on; one slab is theirs."""


@dataclass(frozen=True)
class Foreseen:
    """What is known of the messages to this process before there are any.

    Attributes:
        messages: by stage, shape and dtype of each array of those that there may be.
        room: by stage, bytes of the largest message on each device, where only that is known.
        compiler: makes the programs that copy them out of slots.
    """

    messages: Mapping[int, Collection[Specs]] = field(default_factory=dict)
    room: Mapping[int, int] = field(default_factory=dict)
    compiler: OneArrayCompiler = by_jit

    def slot_size(self, devices: Devices, group: Group) -> int:
        """Bytes of each slot of these devices at the beginning, for the stages that are on them."""
        own = [stage for stage in devices if (*devices[stage],) == group]
        known = [packed(specs, len(group)).size for stage in own for specs in self.messages.get(stage, ())]
        return max(known) if any(known) else max(room_for(self.room.get(stage, 0)) for stage in own)


def groups_of(devices: Devices) -> Sequence[Group]:
    """The devices of each slab, given those of each stage."""
    return list(dict.fromkeys((*own,) for own in devices.values()))


def prepare(copiers: Copiers, group: Group, sizes: Iterable[int], messages: Iterable[Specs]) -> None:
    """Compile what copies these messages out of slots of these sizes, and of those that grow for one of them.

    Args:
        copiers: compile, each program once.
        group: whose slots.
        sizes: of their arrays, in bytes.
        messages: to stages that are there.
    """
    sizes = set(sizes)
    needs = {specs: packed(specs, len(group)).size + ALIGNMENT for specs in messages}
    grown = {need for need in needs.values() if need > min(sizes)}
    for (specs, need), size in product(needs.items(), sizes | grown):
        if ALIGNMENT < need <= size:  # one without bytes takes no slot
            for device, (_, cuts) in zip(group, cuts_of(specs, len(group)), strict=True):
                copiers.of(device, size, cuts)


def compile_copiers(devices: Devices, first: Foreseen, later: Mapping[int, Collection[Specs]]) -> None:
    """Compile what a start with these messages would, and what comes later in the run; without any slots.

    Args:
        devices: by stage, those of one process; they may be absent.
        first: what is foreseen at the start.
        later: messages by stage.
    """
    copiers = Copiers(first.compiler)
    for group in groups_of(devices):
        own = [stage for stage in devices if (*devices[stage],) == group]
        messages = [specs for of in (first.messages, later) for stage in own for specs in of.get(stage, ())]
        prepare(copiers, group, {first.slot_size(devices, group) + ALIGNMENT}, messages)


def slot_bytes(size: int) -> int:
    """What the slots of this size take of a device's memory."""
    return SLOTS * (size + ALIGNMENT)
