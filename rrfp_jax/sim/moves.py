"""Random moves from an order of a step to another: the neighbourhoods of the local search in `planned.py`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeAlias

from rrfp_jax.core.tasks import FORWARD, Task

Rows: TypeAlias = Sequence[Sequence[Task]]
"""The order of each stage."""


def relabelled(rows: Rows, rng: random.Random) -> Rows:
    """Microbatches change places, in all stages alike: two of them, or one goes elsewhere in their sequence.

    The distance is near or far alike, because gradients that are added in order allow only near ones.
    """
    sequence = [task.microbatch for task in rows[0] if task[:2] == (FORWARD, 0)]
    new, here = sequence[:], rng.randrange(len(sequence))
    distance = round(len(sequence) ** rng.random()) * rng.choice((-1, 1))
    there = min(max(here + distance, 0), len(sequence) - 1)
    if rng.random() < 0.5:
        new[here], new[there] = new[there], new[here]
    else:
        new.insert(there, new.pop(here))
    label = dict(zip(sequence, new, strict=True))
    return [[Task(kind, chunk, label[j]) for kind, chunk, j in row] for row in rows]


def reranked(rows: Rows, starts: Sequence[Sequence[float]], span: float, rng: random.Random) -> Rows:
    """Tasks that start in some stretch of time are moved: each by itself, or all of a microbatch alike.

    The result is meant as a ranking: as an order it may be one that nobody can follow.

    Args:
        rows: what is dispatched.
        starts: when its tasks start (s).
        span: how long the step takes (s).
        rng: where the randomness comes from.
    """
    centre, half = rng.uniform(0.0, span), span * math.exp(rng.uniform(-3.0, 0.0))
    distance = span * math.exp(rng.uniform(-6.0, -2.0))
    alike = rng.choice((_own, _of_microbatch, _of_direction))
    moves: dict[object, float] = {}

    def place(stage: int, task: Task, start: float) -> float:
        if abs(start - centre) > half:
            return start
        key = alike(stage, task)
        if key not in moves:
            moves[key] = rng.gauss(0.0, distance)
        return start + moves[key]

    moved = []
    for stage, (tasks, times) in enumerate(zip(rows, starts, strict=True)):
        places = [place(stage, task, start) for task, start in zip(tasks, times, strict=True)]
        moved.append([tasks[at] for at in sorted(range(len(tasks)), key=places.__getitem__)])
    return moved


def _own(stage: int, task: Task) -> object:
    return stage, task


def _of_microbatch(stage: int, task: Task) -> object:
    return task.microbatch


def _of_direction(stage: int, task: Task) -> object:
    return task.kind is FORWARD, task.microbatch
