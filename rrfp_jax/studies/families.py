"""Named families of steps, whose variability others have measured or injected.

Each draws a step from (stages, microbatches, seed). It says what is *known* beforehand, such as the
microbatches' lengths, and what *actually* happens, which adds what nobody can know. A forward takes 10 ms on
average. A backward takes twice as long unless said otherwise, in equal halves. A microbatch of average length
holds 64 MiB on a stage. These three numbers are nominal: only ratios matter. Seeds are paired: a seed gives
the same step again.

    log-normal          sd 0.3 of the logarithm, within the coefficients of variation 0.18-0.44 of
                        StragglerAnalysis; half of the variance is the microbatch's, and known
    length-imbalanced   StragglerAnalysis: 8 % of the microbatches take 2 x in F and 2.65 x in B (2.5 to 2.8),
                        the same on every stage; B/F = 2.1; noise of 2 % a task (1.5-3 %), unknown
    multimodal          the first quarter of the stages encodes images, the rest text: images vary 4.15 x
                        between lightest and heaviest (DIP), text by 0.2; the last stage takes 2.07 x in F and
                        1.42 x in B (StragglerAnalysis); noise as above
    slow-link           transfers of 1 ms (StragglerAnalysis: 0.4-8 ms), but 30 ms on the middle link, as
                        PipeMorph injects against forwards of about 10 ms; noise as above
    straggler           one stage, by the seed, is 2.5 x slower (StragglerAnalysis); nobody knows; noise as
                        above

StragglerAnalysis is ByteDance's published traces, DIP and PipeMorph (Adaptra) are systems papers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rrfp_jax.trace.costs import Workload, constant, log_normal
from rrfp_jax.trace.records import RecordedStep

FORWARD_SECONDS = 0.010
ACTIVATION_BYTES = 64 * 2**20

SIGMA, SHARED = 0.3, 0.5
NOISE = 0.02
HEAVY_SHARE, HEAVY_FORWARD, HEAVY_BACKWARD, LENGTH_RATIO = 0.08, 2.0, 2.65, 2.1
IMAGE_SPREAD, TEXT_SIGMA, ENCODERS = 4.15, 0.2, 0.25
LAST_FORWARD, LAST_BACKWARD = 2.07, 1.42
TRANSFER_SECONDS, SLOW_TRANSFER_SECONDS = 0.001, 0.030
STRAGGLER = 2.5


@dataclass(frozen=True)
class Step:
    """One step: what is known beforehand, and what happens; of one that has run, how it ran."""

    known: Workload
    actual: Workload
    ran: RecordedStep | None = None


Family = Callable[[int, int, int], Step]
"""(stages, microbatches, seed) -> a step."""


def _constant(stages: int, microbatches: int, seed: int) -> Step:
    workload = _with_bytes(constant(stages, microbatches, FORWARD_SECONDS), [1.0] * microbatches)
    return Step(workload, workload)


def varied(stages: int, microbatches: int, seed: int, *, sigma: float = SIGMA, transfer: float = 0.0) -> Step:
    """The log-normal family with another standard deviation, and with transfers of so many seconds."""

    def drawn(sigma: float, shared: float) -> Workload:
        mean = {"forward": FORWARD_SECONDS, "transfer": transfer}
        return log_normal(stages, microbatches, **mean, sigma=sigma, shared=shared, seed=seed)

    lengths = drawn(sigma * math.sqrt(SHARED), 1.0)  # the same draws, without what is the task's own
    sizes = [time / FORWARD_SECONDS for time in lengths.forward[0]]
    return Step(_with_bytes(lengths, sizes), _with_bytes(drawn(sigma, SHARED), sizes))


def _length_imbalanced(stages: int, microbatches: int, seed: int) -> Step:
    draw = random.Random(seed)
    heavy = [draw.random() < HEAVY_SHARE for _ in range(microbatches)]
    forward = [HEAVY_FORWARD if long else 1.0 for long in heavy]
    backward = [HEAVY_BACKWARD if long else 1.0 for long in heavy]
    mean = constant(stages, microbatches, FORWARD_SECONDS, backward_ratio=LENGTH_RATIO)
    known = _with_bytes(mean.scaled([forward] * stages, [backward] * stages), forward)
    return Step(known, noisy(known, draw))


def _multimodal(stages: int, microbatches: int, seed: int) -> Step:
    draw = random.Random(seed)
    half = math.log(IMAGE_SPREAD) / 2
    images = [math.exp(draw.uniform(-half, half)) for _ in range(microbatches)]
    texts = [math.exp(draw.gauss(-(TEXT_SIGMA**2) / 2, TEXT_SIGMA)) for _ in range(microbatches)]
    encoders = max(1, round(stages * ENCODERS)) if stages > 1 else 0
    sizes = [images if i < encoders else texts for i in range(stages)]
    forward, backward = list(sizes), list(sizes)
    forward[-1] = [size * LAST_FORWARD for size in sizes[-1]]
    backward[-1] = [size * LAST_BACKWARD for size in sizes[-1]]
    mean = constant(stages, microbatches, FORWARD_SECONDS)
    held = tuple(tuple(size * ACTIVATION_BYTES for size in row) for row in sizes)
    known = replace(mean.scaled(forward, backward), activation_bytes=held)
    return Step(known, noisy(known, draw))


def _slow_link(stages: int, microbatches: int, seed: int) -> Step:
    mean = constant(stages, microbatches, FORWARD_SECONDS, transfer=TRANSFER_SECONDS)
    slow = (SLOW_TRANSFER_SECONDS,) * microbatches
    before = (stages - 1) // 2
    forward, backward = list(mean.transfer_forward), list(mean.transfer_backward)
    if stages > 1:
        forward[before] = backward[before + 1] = slow
    known = replace(mean, transfer_forward=tuple(forward), transfer_backward=tuple(backward))
    known = _with_bytes(known, [1.0] * microbatches)
    return Step(known, noisy(known, random.Random(seed)))


def _straggler(stages: int, microbatches: int, seed: int) -> Step:
    draw = random.Random(seed)
    slow = draw.randrange(stages)
    known = _with_bytes(constant(stages, microbatches, FORWARD_SECONDS), [1.0] * microbatches)
    factors = [[STRAGGLER if i == slow else 1.0] * microbatches for i in range(stages)]
    return Step(known, noisy(known.scaled(factors, factors), draw))


FAMILIES: Mapping[str, Family] = {
    "constant": _constant,
    "log-normal": varied,
    "length-imbalanced": _length_imbalanced,
    "multimodal": _multimodal,
    "slow-link": _slow_link,
    "straggler": _straggler,
}


def by_name(name: str) -> Family:
    """A family by its name; ValueError if there is none."""
    if name not in tuple(FAMILIES):
        raise ValueError(f"family={name!r}: no such family; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _with_bytes(workload: Workload, sizes: Sequence[float]) -> Workload:
    """With what every stage holds of microbatches of these sizes, 1 being average."""
    row = tuple(size * ACTIVATION_BYTES for size in sizes)
    return replace(workload, activation_bytes=(row,) * workload.stages)


def noisy(workload: Workload, draw: random.Random, sigma: float = NOISE) -> Workload:
    """Every F and every B times a log-normal factor of its own, with mean 1 and this sd of the logarithm."""

    def factors() -> list[list[float]]:
        return [[math.exp(draw.gauss(-(sigma**2) / 2, sigma)) for _ in row] for row in workload.forward]

    return workload.scaled(factors(), factors())
