"""The kinds of steps that studies simulate: one is the base, each of the others changes one thing."""

from __future__ import annotations

from dataclasses import dataclass

from rrfp_jax.sim.families import FAMILIES, FORWARD_SECONDS, Step, varied

STAGES, PER_STAGE, SIGMA, TRANSFER = 8, 4, 0.3, 0.1


@dataclass(frozen=True)
class Cell:
    """What is simulated; transfers in forwards, `per_stage` microbatches per stage."""

    changed: str
    stages: int = STAGES
    per_stage: int = PER_STAGE
    sigma: float = SIGMA
    transfer: float = TRANSFER
    family: str | None = None

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return self.stages * self.per_stage

    def step(self, seed: int) -> Step:
        """One of its steps."""
        if self.family is not None:
            return FAMILIES[self.family](self.stages, self.microbatches, seed)
        transfer = self.transfer * FORWARD_SECONDS
        return varied(self.stages, self.microbatches, seed, sigma=self.sigma, transfer=transfer)


CELLS = (
    Cell("base"),
    *(Cell(f"{n} stages", stages=n) for n in (4, 16, 32, 64)),
    *(Cell(f"{n} a stage", per_stage=n) for n in (1, 2, 8)),
    *(Cell(f"sd {sigma:g}", sigma=sigma) for sigma in (0.0, 0.15, 0.45, 0.6)),
    *(Cell(f"transfers {part:g}", transfer=part) for part in (0.0, 0.3, 1.0)),
    *(Cell(name, family=name) for name in FAMILIES if name not in ("constant", "log-normal")),
)
