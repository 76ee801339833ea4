"""What is predicted of a step, and the devices that it is predicted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from rrfp_jax.forecast.devices import Accelerator, Link
from rrfp_jax.runtime.stages.memory import Setting, StageLedger
from rrfp_jax.runtime.transport.choice import TransportName

NO_LINK = Link(bytes_per_second=inf, latency=0.0)


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

    @property
    def between(self) -> Link:
        """What is between neighbours."""
        return NO_LINK if self.shared else self.link

    def stages_of_each(self, stages: int) -> list[range]:
        """By device, its stages."""
        return [range(stages)] if self.shared else [range(s, s + 1) for s in range(stages)]

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
