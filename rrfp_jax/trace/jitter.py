"""Injected jitter: the random delays with which the paper perturbs every stage (section 7.6, Table 6).

After each F and B that took c seconds by itself, its delay not included:

    e <- 0.9 e + 0.1 c                                running mean of the stage and kind; the first c sets it
    delay = alpha * max(base, e) * (0.5 + U(0, 1))    with probability p, else 0

Both draws belong to the task, not to the order of the calls: two schedules that run the same step with the
same seed delay the same tasks by the same multiple of max(base, e), so a comparison of them is paired.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from rrfp_jax.core.tasks import Input, Kind, Task


@dataclass(frozen=True)
class Level:
    """How often a task is delayed, and by how much: `base` seconds, `alpha` times what the task takes."""

    probability: float
    base: float
    alpha: float


LEVELS: Mapping[str, Level] = {  # paper, Table 6
    "J0": Level(probability=0.0, base=0.000, alpha=0.0),
    "J1": Level(probability=0.1, base=0.005, alpha=0.5),
    "J2": Level(probability=0.2, base=0.010, alpha=1.0),
    "J3": Level(probability=0.3, base=0.015, alpha=1.5),
}


def by_name(name: str) -> Level:
    """A level of the paper by its name, J0 (no jitter) to J3; ValueError if there is none."""
    if name not in tuple(LEVELS):
        raise ValueError(f"jitter={name!r}: no such level; choose one of {', '.join(LEVELS)}")
    return LEVELS[name]


_KEY = Struct("<6q")  # seed, step, stage, kind, chunk, microbatch
_WORDS = Struct("<2Q")


def uniforms(seed: int, step: int, stage: int, task: Task | Input) -> tuple[float, float]:
    """Two independent draws from [0, 1) by the arguments alone; BLAKE2b is equal in all versions."""
    digest = blake2b(_KEY.pack(seed, step, stage, *task), digest_size=_WORDS.size).digest()
    first, second = _WORDS.unpack(digest)
    return (first >> 11) * 2.0**-53, (second >> 11) * 2.0**-53


class Jitter:
    """The delays of one run at one level; ValueError for a seed that does not fit 64 signed bits."""

    def __init__(self, level: Level, seed: int) -> None:
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed={seed}: give an integer of at most 64 signed bits")
        self.level, self.seed = level, seed
        self._means: dict[tuple[int, Kind], float] = {}

    def delay(self, step: int, stage: int, task: Task, measured: float) -> float:
        """Seconds to add after `task`, which took `measured` seconds by itself; to be called once a task."""
        level = self.level
        if not level.probability:
            return 0.0
        key = stage, task.kind
        mean = self._means[key] = 0.9 * self._means[key] + 0.1 * measured if key in self._means else measured
        hit, size = uniforms(self.seed, step, stage, task)
        return level.alpha * max(level.base, mean) * (0.5 + size) if hit < level.probability else 0.0
