"""`"auto"`: of several hints the one with which the simulator finds a step to be fastest, within its limits.

Every candidate is simulated on what is known of the step: its costs, and what each stage may hold. A
candidate brings a placement of its own, and the charges that follow from it. Nothing here depends on a clock,
so equal arguments give equal choices.

Large steps are cut short: all candidates get the same first microbatches, so many that about `MOST_TASKS`
tasks are simulated in all, but at least as many as there are stages. So what a choice costs is bounded: with
the seven `CANDIDATES` 4 s at most up to 64 stages, and beyond 90 four times that with twice the stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter

from rrfp_jax.core.hints import Hint
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import Budgets, StepRules
from rrfp_jax.sim.engine import Links, simulate
from rrfp_jax.trace.costs import StepCosts
from rrfp_jax.trace.records import StepTrace

CANDIDATES = ("ranked:zb-v", "ranked:v-zb", "ranked:v-half", "ranked:v-min", "ranked:zb-h2", "bfw", "bf")
"""In this order of preference where all else is equal."""

EQUAL = 0.005
"""Times that differ by no larger share count as equal. Of hints with equal times the one with fewest tasks is
taken, as each task costs a dispatch and most a message, which predictions know least of."""

GAIN = 0.02
"""By which share another hint must be faster before the present one is exchanged: what is measured is noisy,
and a step in which nothing changes is worth something."""

MOST_TASKS = 300_000
"""Tasks that all simulations of a choice have together; more only where a microbatch a stage takes more."""

SHOWN = 2
"""Other candidates that are told of in a line."""


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Let the simulator choose the hint, by predicted costs before the first step, by measured ones after.

    Attributes:
        candidates: names of hints to choose from.
        exchange: whether the hint may change between steps once costs have been measured. The placement
            stays as it was chosen before the first step.

    Raises:
        ValueError: no candidate, an unknown one, or a fixed order, which no limit holds back.
    """

    candidates: tuple[str, ...] = CANDIDATES
    exchange: bool = True

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ValueError(f"candidates={self.candidates!r}: name hints, such as {', '.join(CANDIDATES)}")
        for name in self.candidates:
            if not isinstance(by_name(name), Hint):
                raise ValueError(
                    f"candidates: {name} is a fixed order, which keeps to no limit; choose ranked:{name}"
                )

    @property
    def hints(self) -> dict[str, Hint]:
        return {name: hint for name in self.candidates if isinstance(hint := by_name(name), Hint)}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A step as it would be with some schedule; `at_once` stages can compute at the same time."""

    rules: StepRules
    costs: StepCosts
    budgets: Budgets = None
    links: Links = "parallel"
    at_once: float = inf

    @property
    def tasks(self) -> int:
        """Tasks of one microbatch on all stages; ValueError if the hint is not defined here."""
        stages = range(self.rules.placement.stages)
        return sum(1 + len(kinds) for stage in stages for kinds in self.rules.backward_kinds(stage))

    def first(self, microbatches: int) -> Candidate:
        """The same step with its first microbatches only."""
        if microbatches >= self.rules.microbatches:
            return self
        budgets = self.budgets and [
            own and replace(own, costs=[row[:microbatches] for row in own.costs]) for own in self.budgets
        ]
        return replace(self, rules=replace(self.rules, microbatches=microbatches), budgets=budgets)

    def simulated(self) -> StepTrace:
        """The step in virtual time; ValueError if the hint is not defined here, or no microbatch can run."""
        return simulate(self.rules, self.costs, links=self.links, budgets=self.budgets)

    def seconds(self, trace: StepTrace | None = None) -> float:
        """What the step takes, as it was simulated before or is now."""
        trace = trace or self.simulated()
        compute = sum(trace.busy(stage) for stage in range(trace.stages))
        return max(trace.makespan, compute / self.at_once)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A hint that was chosen, and why."""

    name: str
    seconds: Mapping[str, float]  # by candidate, for the simulated microbatches; the fastest first
    simulated: int  # microbatches
    microbatches: int

    def __str__(self) -> str:
        """In one line, such as "bfw: 0.412 s a step, beside bf 0.431"."""
        others = [f"{name} {seconds:.4g}" for name, seconds in self.seconds.items() if name != self.name]
        more = [f"{len(others) - SHOWN} more"] if len(others) > SHOWN else []
        part = "a step"
        if self.simulated < self.microbatches:
            part = f"for {self.simulated} of {self.microbatches} microbatches"
        told = f"{self.name}: {self.seconds[self.name]:.4g} s {part}"
        return ", ".join([f"{told}, beside {others[0]}", *others[1:SHOWN], *more]) if others else told


def choose(
    candidates: Mapping[str, Candidate | str], present: str | None = None, most_tasks: int = MOST_TASKS
) -> Choice:
    """The candidate that takes least time, or the one with fewest tasks of those that are as fast (`EQUAL`).

    Candidates are steps as they would be, or why they cannot be. The `present` one stays unless another takes
    less than `1 - GAIN` of its time. ValueError says for each why none of them can run.
    """
    refused: dict[str, str] = {}
    able: dict[str, Candidate] = {}
    tasks: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for name, one in candidates.items():
        try:
            if isinstance(one, str):
                raise ValueError(one)
            tasks[name], able[name] = one.tasks, one
        except ValueError as error:
            refused[name] = str(error)
    rules = [able[name].rules for name in tasks]
    simulated = 0
    if rules:  # a multiple of the stages, unless it is all microbatches
        stages = rules[0].placement.stages
        affordable = max(1, most_tasks // sum(tasks.values()) // stages) * stages
        simulated = min(rules[0].microbatches, affordable)
    for name in tasks:
        try:
            seconds[name] = able[name].first(simulated).seconds()
        except ValueError as error:
            refused[name] = str(error)
    if not seconds:
        reasons = "; ".join(f"{name}: {refused[name]}" for name in candidates)
        raise ValueError(f"no hint can run: {reasons or 'there is none to choose from'}")
    seconds = dict(sorted(seconds.items(), key=itemgetter(1)))  # stable: the first of equals stays first
    fastest = min(seconds.values())
    name = min((one for one in seconds if (1 - EQUAL) * seconds[one] <= fastest), key=tasks.__getitem__)
    if present in seconds and fastest >= (1 - GAIN) * seconds[present]:
        name = present
    return Choice(name=name, seconds=seconds, simulated=simulated, microbatches=rules[0].microbatches)
