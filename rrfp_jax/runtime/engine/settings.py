"""The settings that an engine goes by, in groups that are passed on whole. Each group checks itself, once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from rrfp_jax.core.accumulation import SPARE_GRADIENTS
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_numbers, path_of
from rrfp_jax.runtime.autodiff.residuals import check_remat
from rrfp_jax.runtime.engine.pacing import Delays
from rrfp_jax.runtime.run.consensus import Terms
from rrfp_jax.runtime.stages.memory import Setting, parse_setting
from rrfp_jax.runtime.transport.choice import TransportName, check_transport

Group = TypeVar("Group")


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """What stages may hold, and what they compute again instead of holding it.

    Attributes:
        remat: what backwards compute again: "none", "full" (all but a layer's input), or a policy of
            `jax.checkpoint_policies` by name.
        max_in_flight: most microbatches that a stage holds under a hint; None for twice the number of stages,
            or as many as fit if there is a budget in bytes.
        activation_budget: bytes of each device for microbatches in flight, a number or text ("2GiB"); "auto"
            for what is left (CPUs do not say what that is); None for no limit. Fixed orders that may hold
            more are refused.
        spare_gradients: gradients that a stage may park until their turn comes, each as large as its
            parameters; more of them help where messages overtake one another
            (`benchmarks/results/simulated.md`).

    Raises:
        UsageError: one that cannot be, with its name and value.
    """

    remat: str = "none"
    max_in_flight: int | None = None
    activation_budget: str | int | None = "auto"
    spare_gradients: int = SPARE_GRADIENTS

    def __post_init__(self) -> None:
        check_numbers(self)
        check_remat(self.remat)
        parse_setting(self.activation_budget)
        limit, spare = self.max_in_flight, self.spare_gradients
        if limit is not None and not is_whole(limit):
            raise UsageError(f"max_in_flight={limit!r}: give a whole number")
        if limit is not None and limit < 1:
            raise UsageError(f"max_in_flight={limit}: a stage must be able to hold one microbatch")
        if not is_whole(spare):
            raise UsageError(f"spare_gradients={spare!r}: give a whole number")
        if spare < 0:
            raise UsageError(f"spare_gradients={spare}: must not be negative")

    @property
    def budget(self) -> Setting:
        """`activation_budget`, with text as a number of bytes."""
        return parse_setting(self.activation_budget)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the processes of a run go about its steps, whatever those compute.

    Attributes:
        stall_seconds: without any progress for so long (s), a step is given up, naming what it waited for.
        transport: what carries messages between processes: "nixl", from device to device; "socket", through
            hosts; "auto", NIXL if it works between all neighbours, else sockets (`docs/transport.md`).
        executables: a folder to keep compiled programs in, so that another start compiles nothing; None to
            compile at every start. Nobody else may be able to write to it: see `docs/security.md`.
        terms: by which the processes of a stage agree, where there are several.
        delays: to inject, for experiments.

    Raises:
        UsageError: one that cannot be, with its name and value.
    """

    stall_seconds: float = 300.0
    transport: TransportName = "auto"
    executables: str | Path | None = None
    terms: Terms = field(default_factory=Terms)
    delays: Delays = field(default_factory=Delays)

    def __post_init__(self) -> None:
        check_numbers(self)
        if not is_positive(self.stall_seconds):
            raise UsageError(f"stall_seconds={self.stall_seconds!r}: give a number of seconds above 0")
        check_transport(self.transport)
        folder = self.executables
        if folder is not None and (not isinstance(folder, (str, PathLike)) or not str(folder)):
            raise UsageError(
                f"executables={folder!r}: give a folder to keep compiled programs in, such as "
                f"'runs/.executables', or None to compile at every start"
            )
        if folder is not None:
            object.__setattr__(self, "executables", path_of("executables", folder))


def group_of(kind: type[Group], flat: Any) -> Group:
    """The group of this kind, from something that has its fields as attributes."""
    return kind(**{item.name: getattr(flat, item.name) for item in fields(kind)})  # type: ignore[arg-type]


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, of Python or NumPy; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """Whether it is a number above 0; True is none."""
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return bool(number and value > 0)


GUARDS = (
    "jax_transfer_guard",
    "jax_transfer_guard_host_to_device",
    "jax_transfer_guard_device_to_device",
    "jax_transfer_guard_device_to_host",
)


def check_jax_settings() -> None:
    """Refuse settings of JAX's own under which no stage can run.

    Raises:
        UsageError: naming the setting.
    """
    if getattr(jax.config, "jax_disable_jit"):  # noqa: B009 (JAX's types lack it)
        raise UsageError(
            "jax_disable_jit=True: stages are programs that are compiled before they run, so nothing could "
            "run; unset it (JAX_DISABLE_JIT), and to step through a layer call it in plain JAX"
        )
    for name in GUARDS:
        if getattr(jax.config, name) == "disallow_explicit":
            raise UsageError(
                f"{name}='disallow_explicit': data and messages must get to devices; use 'disallow', under "
                f"which only transfers that nobody asked for fail"
            )
