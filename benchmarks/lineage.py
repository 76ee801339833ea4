"""What a run that was started again has trained on, step by step, from its `metrics.jsonl`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lineage:
    """The steps that the final parameters have seen.

    Attributes:
        steps: their lines, in order: each step once.
        resumes: at which step the run went on, each time that it went back or was started again there.
        skipped: places, each such as "step 7 follows step 4", where data was left out.
    """

    steps: tuple[Mapping[str, Any], ...]
    resumes: tuple[int, ...]
    skipped: tuple[str, ...]


def lineage(lines: Iterable[Mapping[str, Any]]) -> Lineage:
    """Follow a run: a line of a step that was there before takes its place, and all after it count no more.

    Args:
        lines: of all attempts, in the order in which they were written, each with its "step".
    """
    steps: list[Mapping[str, Any]] = []
    resumes: list[int] = []
    skipped: list[str] = []
    for line in lines:
        step = line["step"]
        if step < len(steps):
            resumes.append(step)
            del steps[step:]
        elif step > len(steps):
            skipped.append(f"step {step} follows {f'step {len(steps) - 1}' if steps else 'nothing'}")
            steps += [{}] * (step - len(steps))
        steps.append(line)
    return Lineage(tuple(steps), tuple(resumes), tuple(skipped))
