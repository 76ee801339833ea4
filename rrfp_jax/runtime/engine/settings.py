"""The settings of a run: one object, which checks itself, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np

from rrfp_jax.core.admission import SPARE_GRADIENTS, Accumulation
from rrfp_jax.core.foresight import Dispatching
from rrfp_jax.core.group import GroupProtocol
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.scheduler import check_can_end
from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.step_rules import StepRules, default_max_in_flight
from rrfp_jax.core.tasks import Placement
from rrfp_jax.errors import UsageError, refusing
from rrfp_jax.fields import check_numbers, path_of, says_its_arguments
from rrfp_jax.loss_scale import LossScale, loss_scale_of
from rrfp_jax.runtime.autodiff.residuals import check_remat
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.run.consensus import CarrierName
from rrfp_jax.runtime.stages.memory import Setting, parse_setting
from rrfp_jax.runtime.transport.choice import TransportName

OnNonfinite: TypeAlias = Literal["stop", "skip"]

Rebalance: TypeAlias = Literal["off", "suggest", "auto"]


@says_its_arguments()
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a step computes, what stages may hold, and how processes communicate.

    Pass them to a Trainer as `settings=`; the most common ones are also arguments of the Trainer. A
    `RunConfig` inherits these fields.

    Attributes:
        seed: of initial values and random keys.
        clip_norm: scale the gradient down to this norm, taken over all stages; None for no clipping.
        loss_scale: factor on the loss before it is differentiated, for models that compute in float16: a
            number, or "dynamic", which finds one by skipping steps; None for 1.
        on_nonfinite: what to do with a step whose loss or gradient is not finite: "stop" with a
            TrainingError, or "skip" its update, up to 20 times in a row. "skip" lets evaluations go on, too.
        remat: activation checkpointing, what backwards compute again: "none", "full" (everything but a
            layer's input), or a policy of `jax.checkpoint_policies` by name.
        layers_per_program: consecutive layers that a program has, at most. More make steps of narrow layers
            faster, and compiling slower; results then depend on where stages are cut, by rounding
            (`docs/numbers.md`). Stages of several devices (`tp`) are one program each.
        activation_budget: bytes of each device for microbatches in flight, a number or text ("2GiB"); "auto"
            for what is left (CPUs do not report it); None for no limit. Fixed orders that may hold more are
            rejected.
        max_in_flight: most microbatches that a stage holds under a hint; None for twice the number of stages,
            or as many as fit if there is a budget in bytes.
        transport: what carries messages between processes: "nixl", from device to device; "socket", through
            hosts; "auto", NIXL if it works between all neighbours, else sockets (`docs/transport.md`).
        rebalance: whether layers move to other stages when measured costs predict a gain
            (`docs/performance.md`): "off"; "suggest" prints which would, and what it would save; "auto" moves
            them between two steps.
        executables: a folder to keep compiled programs in, so that a restart compiles nothing; None to
            compile at every start. Nobody else may have write access: see `docs/security.md`.
        stall_seconds: stop a step that makes no progress for this long (s), naming what it waited for.
        spare_gradients: gradients that a stage may park until their turn comes, each as large as its
            parameters; more of them help where messages overtake one another
            (`benchmarks/results/simulated.md`).
        accumulation: "index" adds gradients in microbatch order, so results are bitwise identical in any
            order of tasks; "arrival" adds them as they arrive.
        equal_schedules: run every backward as the same two programs, also where the schedule does not split
            it, so that all schedules of a placement give bitwise identical results; see `docs/numbers.md`.
        agreement: what carries the messages by which the processes of a stage agree on each task: "kv", the
            key-value store of `jax.distributed`, or "socket" (`docs/transport.md`).
        protocol: a "leader" decides, or all are "unanimous".
        dispatch: "ready" dispatches a task when its input is there; "foreseen" also when that is computed on
            another device of the process and expected in time, which hides the host's latency. With delays
            that are injected, with one device in the process, where processes share a stage, and where
            `activation_budget` has no room for it (`docs/memory.md`), it is as "ready".
        delays: injected delays, to test schedules: text such as "jitter=J2,skew=0.001"; empty for none
            (`benchmarks/paced.md`).

    Raises:
        UsageError: an invalid value, with its name.
    """

    seed: int = 0
    clip_norm: float | None = None
    loss_scale: str | float | LossScale | None = None
    on_nonfinite: OnNonfinite = "stop"
    remat: str = "none"
    layers_per_program: int = 1
    activation_budget: str | int | None = "auto"
    max_in_flight: int | None = None
    transport: TransportName = "auto"
    rebalance: Rebalance = "off"
    executables: str | Path | None = None
    stall_seconds: float = 300.0
    spare_gradients: int = SPARE_GRADIENTS
    accumulation: Accumulation = "index"
    equal_schedules: bool = False
    agreement: CarrierName = "kv"
    protocol: GroupProtocol = "leader"
    dispatch: Dispatching = "foreseen"
    delays: str | Delays = ""

    def __post_init__(self) -> None:
        check_numbers(self)
        for name, words in WORDS.items():
            *first, last = map(repr, words)
            _require(self, name, getattr(self, name) in words, f"choose {', '.join(first)} or {last}")
        for name, is_good, remedy in NUMBERS:
            _require(self, name, is_good(getattr(self, name)), remedy)
        if self.equal_schedules and self.accumulation != "index":
            raise UsageError(
                f"equal_schedules=True with accumulation={self.accumulation!r}: gradients that are added as "
                f"they come are not bitwise identical; leave accumulation at 'index'"
            )
        loss_scale_of(self.loss_scale)
        object.__setattr__(self, "seed", int(self.seed))  # NumPy's, too, which JSON does not know
        check_remat(self.remat)
        parse_setting(self.activation_budget)
        if type(self.injected) is Delays:  # others have what no text says
            object.__setattr__(self, "delays", str(self.injected))
        folder = self.executables
        is_path = folder is None or (isinstance(folder, (str, PathLike)) and str(folder))
        remedy = "give a folder to keep compiled programs in, such as 'runs/.executables'"
        _require(self, "executables", is_path, f"{remedy}, or None to compile at every start")
        if folder is not None:
            object.__setattr__(self, "executables", str(path_of("executables", folder)))

    @property
    def budget(self) -> Setting:
        """`activation_budget`, with text as a number of bytes."""
        return parse_setting(self.activation_budget)

    @property
    def injected(self) -> Delays:
        """`delays` that the text says."""
        return Delays.of(self.delays)

    def as_text(self) -> dict[str, str]:
        """What must be equal in all processes, by the names that users type."""
        own = ("stall_seconds", "executables")  # of each process
        return {item.name: str(getattr(self, item.name)) for item in fields(Settings) if item.name not in own}

    def limited(self, stages: int) -> Settings:
        """Settings with the usual limit on the number of microbatches in flight, if these have none."""
        most = self.max_in_flight
        return replace(self, max_in_flight=default_max_in_flight(stages) if most is None else most)

    def rules(
        self, placement: Placement, microbatches: int, schedule: Schedule, forward_only: bool = False
    ) -> StepRules:
        """The rules of a step of so many microbatches on each replica."""
        return StepRules(
            placement=placement,
            microbatches=microbatches,
            schedule=schedule,
            limit=self.max_in_flight,
            accumulation=self.accumulation,
            spare_gradients=self.spare_gradients,
            forward_only=forward_only,
        )


def check_order(rules: StepRules) -> None:
    """Refuse a schedule that cannot run a step with these rules.

    Raises:
        UsageError: a fixed order lacks a task, naming stage and task, or must deadlock; or a hint is not
            defined for the placement or the number of microbatches.
    """
    with refusing():
        if isinstance(rules.schedule, FixedOrder):
            check_can_end(rules)
        else:  # which asks the hint, once, for what each stage begins with
            _ = rules.stages


WORDS = {name: get_args(of) for name, of in get_type_hints(Settings).items() if get_origin(of) is Literal}
"""Settings that are one of a few words, each with these."""


def _require(group: Any, name: str, good: Any, remedy: str) -> None:
    if not good:
        raise UsageError(f"{name}={getattr(group, name)!r}: {remedy}")


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, of Python or NumPy; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """Whether it is a number above 0; True is none."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and bool(value > 0)


NUMBERS: Sequence[tuple[str, Callable[[Any], bool], str]] = (
    ("equal_schedules", lambda x: isinstance(x, bool), "give True or False"),
    ("clip_norm", lambda x: x is None or is_positive(x), "give a number above 0; leave it out for no limit"),
    ("seed", lambda x: is_whole(x) and 0 <= x < 2**32, f"give a whole number from 0 to {2**32 - 1}"),
    ("layers_per_program", lambda x: is_whole(x) and x >= 1, "give a whole number from 1"),
    ("max_in_flight", lambda x: x is None or is_whole(x), "give a whole number"),
    ("max_in_flight", lambda x: x is None or x >= 1, "a stage must be able to hold one microbatch"),
    ("spare_gradients", is_whole, "give a whole number"),
    ("spare_gradients", lambda x: x >= 0, "must not be negative"),
    ("stall_seconds", is_positive, "give a number of seconds above 0"),
)
"""Settings that are a number or a yes, what each must be, and what to give instead."""
