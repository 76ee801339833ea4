"""Workloads: how long each task and transfer of a step takes, for the simulator and the paced device.

A workload is five tables of seconds, `[i][j]` being stage i and microbatch j:

    forward             F(i, j)
    backward_input      the part of the backward that the previous stage waits for
    backward_weight     the rest; the fused backward B(i, j) lasts as long as both
    transfer_forward    an activation, from stage i to i + 1; in the last row, to stage 0
    transfer_backward   a gradient, from stage i to i - 1; in the first row, to the last stage

and perhaps a sixth, of bytes:

    activation_bytes    what stage i keeps of microbatch j from its F to its release

That is one chunk a stage. Several share a stage's times equally, and with looped chunks the model goes round:
only then are the transfers between the last stage and the first read. In files the transfers may be left out,
being zero then, and `transfer_forward` may lack the last stage's row; `transfer_backward` may not be cut
short, as rows would no longer count stages.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

Table: TypeAlias = tuple[tuple[float, ...], ...]
Factors: TypeAlias = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Workload:
    """The durations of one step in seconds, and what it keeps in bytes, by `[stage][microbatch]`.

    Raises:
        ValueError: no stage, no microbatch, tables of unequal shapes, or a time that is not finite and >= 0.
    """

    forward: Table
    backward_input: Table
    backward_weight: Table
    transfer_forward: Table
    transfer_backward: Table
    activation_bytes: Table | None = None

    def __post_init__(self) -> None:
        if not self.forward or not self.forward[0]:
            raise ValueError("forward is empty: a workload has at least one stage and one microbatch")
        for name in _NAMES:
            self._check(name, getattr(self, name), "seconds")
        if not math.isfinite(sum(sum(row) for name in _NAMES for row in getattr(self, name))):
            raise ValueError("the times are too large: together they must be a finite number of seconds")
        if self.activation_bytes is not None:
            self._check(BYTES, self.activation_bytes, "bytes")

    def _check(self, name: str, table: Table, unit: str) -> None:
        if len(table) != self.stages:
            raise ValueError(f"{name} has {len(table)} rows, forward has {self.stages}: give one row a stage")
        for i, row in enumerate(table):
            if len(row) != self.microbatches:
                raise ValueError(
                    f"{name}[{i}] has {len(row)} entries, forward[0] has {self.microbatches}: "
                    "give every row one entry a microbatch"
                )
            for j, time in enumerate(row):
                if not _is_time(time):
                    raise ValueError(
                        f"{name}[{i}][{j}] = {_shown(time)}: give a finite number of {unit}, at least 0"
                    )

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.forward)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the step."""
        return len(self.forward[0])

    def scaled(self, forward: Factors, backward: Factors) -> Workload:
        """With the times of its forwards, and of both parts of its backwards, times `[stage][microbatch]`."""
        return replace(
            self,
            forward=_scaled(self.forward, forward),
            backward_input=_scaled(self.backward_input, backward),
            backward_weight=_scaled(self.backward_weight, backward),
        )

    @classmethod
    def from_json_object(cls, data: object) -> Workload:
        """The workload of a file, from what `json.load` made of it.

        Raises:
            ValueError: unknown or missing keys, wrong types, or what the class itself refuses.
        """
        if not isinstance(data, dict):
            raise ValueError(
                f"a workload is a {type(data).__name__}: give an object with {', '.join(_NAMES)}"
            )
        if unknown := [key for key in data if key not in (*_NAMES, BYTES)]:
            raise ValueError(f"{unknown[0]!r} is not a table of a workload: use {', '.join(_NAMES)}, {BYTES}")
        if missing := [name for name in _NAMES if name not in data and not name.startswith("transfer")]:
            raise ValueError(f"{missing[0]} is missing: only the transfers may be left out of a workload")
        tables = {name: _table(name, rows) for name, rows in data.items()}
        stages = len(tables["forward"])
        zeros = _filled(stages, len(tables["forward"][0]) if stages else 0, 0.0)
        for name in _NAMES:
            tables.setdefault(name, zeros)
        if len(tables["transfer_forward"]) == stages - 1:
            tables["transfer_forward"] += zeros[-1:]
        return cls(**tables)

    def as_json_object(self) -> dict[str, list[list[float]]]:
        """All tables, as `json.dump` takes them; `from_json_object` gives back an equal workload."""
        tables = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: [list(row) for row in table] for name, table in tables.items() if table is not None}


BYTES = "activation_bytes"
_NAMES = tuple(field.name for field in fields(Workload) if field.name != BYTES)


def constant(
    stages: int, microbatches: int, forward: float, backward_ratio: float = 2.0, transfer: float = 0.0
) -> Workload:
    """Equal tasks: a forward takes `forward` seconds, a transfer between stages `transfer` seconds.

    A backward takes `backward_ratio` times a forward, half of that for the input and half for the weights.

    Raises:
        ValueError: no stage, no microbatch, or a time that is not finite and >= 0.
    """
    half = _filled(stages, microbatches, forward * backward_ratio / 2)
    links = _filled(stages, microbatches, transfer)
    return Workload(_filled(stages, microbatches, forward), half, half, links, links)


def log_normal(
    stages: int,
    microbatches: int,
    *,
    forward: float,
    sigma: float,
    shared: float,
    seed: int,
    backward_ratio: float = 2.0,
    transfer: float = 0.0,
) -> Workload:
    """`constant`, with the time of each F and each B multiplied by a log-normal factor of mean 1.

    The factor is exp(N) with N of standard deviation `sigma`. Of N's variance the share `shared` belongs to
    the microbatch, the same on every stage and in both directions, as where lengths differ; the rest to the
    task alone. Normal draws come from `random.Random(seed).gauss`, microbatch by microbatch: that of the
    microbatch, then for each stage that of F and that of B. So a seed gives the same file again, and only
    their scale depends on `sigma` and `shared`.

    Raises:
        ValueError: `sigma` below 0 or not finite, `shared` outside 0..1, or what `constant` refuses.
    """
    if not _is_time(sigma):
        raise ValueError(f"sigma={sigma}: the standard deviation of a logarithm is finite and at least 0")
    if not 0 <= shared <= 1:
        raise ValueError(f"shared={shared}: the microbatch's share of the variance is from 0 to 1")
    mean = constant(stages, microbatches, forward, backward_ratio, transfer)
    draw = random.Random(seed).gauss
    common, own = sigma * math.sqrt(shared), sigma * math.sqrt(1 - shared)
    forwards: list[list[float]] = [[] for _ in range(stages)]
    backwards: list[list[float]] = [[] for _ in range(stages)]
    for _ in range(microbatches):
        level = common * draw(0.0, 1.0) - sigma * sigma / 2  # E exp(N) = exp(mean + variance / 2)
        for i in range(stages):
            forwards[i].append(math.exp(level + own * draw(0.0, 1.0)))
            backwards[i].append(math.exp(level + own * draw(0.0, 1.0)))
    return mean.scaled(forwards, backwards)


def _is_time(value: object) -> bool:
    """Whether it is a number >= 0 that a float can hold; JSON's true, NaN and Infinity are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= sys.float_info.max


def _shown(value: object) -> str:
    """Python writes no number of more than 4,300 digits, and nobody reads one of a hundred."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def _table(name: str, rows: object) -> Table:
    """Rows of a file as tuples; their entries are checked by Workload."""
    if not isinstance(rows, list):
        raise ValueError(f"{name} is a {type(rows).__name__}: give a list with one row a stage")
    for i, row in enumerate(rows):
        if not isinstance(row, list):
            raise ValueError(
                f"{name}[{i}] is a {type(row).__name__}: give a list with one entry a microbatch"
            )
    return tuple(map(tuple, rows))


def _filled(stages: int, microbatches: int, time: float) -> Table:
    return ((time,) * microbatches,) * stages


def _scaled(table: Table, factors: Factors) -> Table:
    return tuple(
        tuple(time * factor for time, factor in zip(*rows, strict=True))
        for rows in zip(table, factors, strict=True)
    )
